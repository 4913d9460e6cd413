"""`Callback`: a Python function that a program calls while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Callback:
    """A function of the process that compiled the program; ops name it by its number.

    Attributes:
      function: from arrays to a sequence of arrays.
      label: what the user wrote: `jax.debug.print`, `jax.pure_callback of lookup`.
      is_debug: whether it only looks: `jax.debug.print` and `jax.debug.callback`.
      has_effect: whether it does more than compute its results.
      is_ordered: whether it is called in the order of the program among others that are.
    """

    function: Callable[..., Sequence[Any]]
    label: str
    is_debug: bool
    has_effect: bool
    is_ordered: bool
