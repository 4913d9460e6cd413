"""What is exported: functions, the weights that they read, and the state that they share."""

from typing import Any, Protocol, get_args

import numpy.typing as npt

from spmd.errors import SpmdError
from spmd.models.function import Function, Role, StateLeaf

__all__ = ["ROLES", "BundleError", "Function", "Role", "StateLeaf", "Weight", "one_line"]

ROLES: tuple[Role, ...] = get_args(Role)


class BundleError(ValueError):
    """A bundle that cannot be made, read or run; the message is one line."""


def one_line(error: BaseException) -> str:
    """What an error comes down to, in one line."""
    if isinstance(error, SpmdError):
        parts = [error.what, error.op, error.actual and f"actual: {error.actual}", error.fix]
        return "; ".join(part for part in parts if part).replace("\n", " ")[:600]
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]


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
