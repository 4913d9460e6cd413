"""What is exported: functions, and the state that they share; what is wrong with a bundle."""

from typing import get_args

from spmd.errors import SpmdError
from spmd.models.function import Function, Role, StateLeaf

__all__ = ["ROLES", "BundleError", "Function", "Role", "StateLeaf", "one_line"]

ROLES: tuple[Role, ...] = get_args(Role)


class BundleError(ValueError):
    """A bundle that cannot be made, read or run; the message is one line."""


def one_line(error: BaseException) -> str:
    """What an error comes down to, in one line."""
    if isinstance(error, SpmdError):
        parts = [error.what, error.op, error.actual and f"actual: {error.actual}", error.fix]
        return "; ".join(part for part in parts if part).replace("\n", " ")[:600]
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]
