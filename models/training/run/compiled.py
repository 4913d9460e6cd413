"""Compiled programs that a restart finds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def keeping_compiled(folder: Path) -> Iterator[None]:
    """Programs that are compiled inside are kept: a restart compiles none of them again."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:  # the user's place
        yield
        return
    settings = {
        "jax_compilation_cache_dir": str(folder.absolute()),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        _configure(settings)
        yield
    finally:
        _configure(before)


def _configure(settings: Mapping[str, Any]) -> None:
    compilation_cache.reset_cache()  # it looks at the settings once
    for name, value in settings.items():
        jax.config.update(name, value)
