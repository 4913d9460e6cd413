"""How often XLA has compiled something in this process, by jax's own account."""

from __future__ import annotations

import itertools
from typing import Any

import jax

EVENT = "/jax/core/compile/backend_compile_duration"

_seen = itertools.count()
_total = next(_seen)


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    global _total
    if event == EVENT:
        _total = next(_seen)


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """Programs that were compiled, or read from jax's cache, since this module was imported."""
    return _total
