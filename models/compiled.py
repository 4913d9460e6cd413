"""Executables that are kept in a folder, and found there by whoever compiles the same again."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def keeping_compiled(folder: Path) -> Iterator[None]:
    """Inside, what is compiled is kept by jax, however small, and taken from there."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}

    def configure(values: Mapping[str, Any]) -> None:
        compilation_cache.reset_cache()  # it looks at the settings once
        for name, value in values.items():
            jax.config.update(name, value)

    configure(settings)
    try:
        yield
    finally:
        configure(before)
