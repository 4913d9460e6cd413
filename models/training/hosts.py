"""What a run does because there may be other processes: one place for all of it.

With one process every function here does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

import spmd
from models.training.run import RunError


def initialize() -> None:
    """Join the other processes, if a launcher or a cluster says that there are any.

    Has to come before anything else asks for devices.
    """
    join = getattr(spmd, "initialize", None)
    if join is not None:
        join()


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def check_same(what: Mapping[str, str]) -> None:
    """Raise an error that names the process that differs, unless all have the same values."""
    if jax.process_count() == 1:
        return
    _from_launch("check_same")(what)


@contextlib.contextmanager
def watchdog(timeout_seconds: float) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after each step; too long without a call, and stacks are dumped.

    Args:
        timeout_seconds: how long a step may take; 0 watches nothing.
    """
    if not timeout_seconds:
        yield lambda step: None
        return
    with _from_launch("Watchdog")(timeout_seconds) as dog:
        yield lambda step: dog.beat(step=step)


def _from_launch(name: str) -> Any:
    found = getattr(importlib.import_module("spmd.launch"), name, None)
    if found is None:
        raise RunError(f"this build of spmd has no spmd.launch.{name}, which the run asks for")
    return found
