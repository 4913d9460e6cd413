"""How often XLA has compiled something in this process, by jax's own account."""

from __future__ import annotations

from typing import Any

import jax

EVENT = "/jax/core/compile/backend_compile_duration"

_durations: list[float] = []


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event == EVENT:
        _durations.append(duration_secs)  # several threads compile: one step, and nothing is lost


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """Programs that were compiled, or read from jax's cache, since this module was imported."""
    return len(_durations)
