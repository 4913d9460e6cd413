"""What is exported: pure functions at fixed shapes, over weights and a state that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args

import numpy.typing as npt

Role = Literal["weights", "state", "input"]
"""Of an argument. Weights and state belong to the bundle; inputs come with each call."""

ROLES: tuple[Role, ...] = get_args(Role)


class BundleError(ValueError):
    """A bundle that cannot be made, read or run; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A function to export.

    Attributes:
      name: what callers ask for: letters, digits, `_`, `-` and `.`, as in `decode_t512`.
      fn: pure, of the positional arguments `args`. One with a state returns (state, outputs), the
        state with the same structure, shapes and dtypes; any other returns its outputs.
      args: a pytree of `jax.ShapeDtypeStruct`s for each argument.
      arg_names: a name for each, which begins the paths of its leaves: `("weights", "state", "x")`.
      roles: of each argument. Those of weights have parts of one tree: paths count. At most one
        is the state, which is donated.
      tags: how callers choose among functions: `{"kind": "decode", "length": 512}`.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    arg_names: tuple[str, ...]
    roles: tuple[Role, ...]
    tags: Mapping[str, int | str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One array of a state: it begins filled with a number.

    Attributes:
      shape, dtype: of the array; `dtype` is what `jnp.dtype` takes.
      fill: the number.
    """

    shape: tuple[int, ...]
    dtype: Any
    fill: float = 0


class Weight(Protocol):
    """One array of the weights: `numpy.asarray` reads it, when it is written and not before.

    numpy's and jax's arrays are such; so is anything that reads a file on demand, as long as jax
    takes it for a leaf (a dataclass is one, a named tuple is not).
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dims."""

    @property
    def dtype(self) -> Any:
        """Its dtype, as `jnp.dtype` takes it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All of it."""
