"""The registered composites: name -> the JAX functions by which one device computes each.

A composite (`jax.lax.composite`) is a function of its own in a module. A registered one is a single
op until it is emitted, with a sharding rule that was registered, too; any other is inlined.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from spmd.errors import SpmdError
from spmd.ir.program import OpKind
from spmd.ir.types import Dense, Opaque

# Attributes of a composite. Its own have a prefix in their names, among those of the op.
PREFIX = "with."
PLATFORM = "spmd.platform"  # the platform that the program is compiled for

# Its attributes in one device's program alone.
KERNEL = "spmd.kernel"  # whether a kernel computes it
WORKSPACE = "spmd.workspace"  # bytes that it holds while it runs
# Of one that exchanges by itself: the atoms along which it does, whose names its kernel gets as
# `axes`, for jax's collectives; bytes that a device has for its group, itself included; and the
# sizes of the mesh's atoms.
AXES, SENT, MESH = "spmd.axes", "spmd.sent", "spmd.mesh"

Function = Callable[..., Any]
"""A JAX function of local arrays; a composite's attributes are its keyword arguments."""


class Composite(NamedTuple):
    """One device's JAX functions of a composite; `decomposition` None: only the module has one."""

    decomposition: Function | None  # at any shapes; None if only the module has one
    kernels: Mapping[str, Function]  # by platform; NotImplemented is for shapes that one lacks


COMPOSITES: dict[str, Composite] = {}
"""Maps the name of a registered composite in modules to what computes it."""


def whole_composites(platform: str) -> frozenset[str]:
    """Returns the names of registered composites with a decomposition or a `platform` kernel."""
    return frozenset(
        name for name, c in COMPOSITES.items() if c.decomposition or platform in c.kernels
    )


def arguments_of(kind: OpKind) -> dict[str, Any]:
    """Returns a composite's own attributes as keyword arguments; SpmdError for one of MLIR text."""
    found = {}
    for key, value in kind.attrs.items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            found[name] = value.array() if isinstance(value, Dense) else value
            if isinstance(value, Opaque):
                raise SpmdError(
                    f"attribute {name} of composite {kind.attrs['name']} is {value.text[:60]}",
                    required="a bool, a number, a string, a tuple of these, or a numpy array",
                    fix="pass anything else as an operand",
                )
    return found
