"""Functions to export: pure, at fixed shapes, over weights and a state that they share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

Role = Literal["weights", "state", "read", "input"]
"""Of an argument. Weights and state belong to who runs the functions; inputs come with a call. What
is `read` is a part of the state that the function does not replace."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A function to export."""

    name: str  # what callers ask for: letters, digits, `_`, `-` and `.`, as in `step_r8_t512`
    # pure, of the positional arguments `args`. One with a state returns (state, outputs), the state
    # with the same structure, shapes and dtypes; any other returns its outputs.
    fn: Callable[..., Any]
    # a pytree of `jax.ShapeDtypeStruct`s for each argument; those of the state and of inputs may
    # have symbolic dims, as `jax.export.symbolic_shape` makes them
    args: tuple[Any, ...]
    # a name for each, which begins the paths of its leaves: `("weights", "state", "x")`
    arg_names: tuple[str, ...]
    # of each argument. At most one has the weights and at most one the state, which is donated.
    roles: tuple[Role, ...]
    # how callers choose among functions: `{"kind": "step", "length": 512}`
    tags: Mapping[str, int | str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One array of a state: it begins filled with a number."""

    # shape, dtype: of the array; a dim may be symbolic. `dtype` is what `jnp.dtype` takes.
    shape: tuple[Any, ...]
    dtype: Any
    fill: float = 0  # the number
