"""`Description`: what the compiler knows of an op by its name, as data.

Modules of `spmd.ir.dialect` write the descriptions. Other code reads a trait of an op
(`op.kind.about.is_elementwise`), or compares its name where it means one op alone (`BROADCAST`).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

# Ops that algorithms ask for by name, because they alone are what is looked for.
BARRIER = "stablehlo.optimization_barrier"
BROADCAST = "stablehlo.broadcast_in_dim"
CONCATENATE = "stablehlo.concatenate"
CONSTANT = "stablehlo.constant"
CONVERT = "stablehlo.convert"
DIVIDE = "stablehlo.divide"
DYNAMIC_SLICE = "stablehlo.dynamic_slice"
REDUCE = "stablehlo.reduce"
RESHAPE = "stablehlo.reshape"
SCATTER = "stablehlo.scatter"
SUBTRACT = "stablehlo.subtract"
TRANSPOSE = "stablehlo.transpose"
# the inverse of `spmd.to_manual`: joins the devices' pieces to the value outside of a region
FROM_MANUAL = "spmd.from_manual"
COMPOSITE = "stablehlo.composite"  # a function that stays whole; its attribute `name` says which
CUSTOM_CALL = "stablehlo.custom_call"  # a call of a library; `call_target_name` says of which


class Role(IntEnum):
    """How XLA's fusion treats an op: whether a reader's kernel computes it, and what is stored."""

    INSIDE = 0  # computed inside its readers, again for each
    ONCE = 1  # computed inside its only reader; stored where there are several
    ALIAS = 2  # another name for its operand's memory
    UPDATE = 3  # writes a piece into its first operand's memory
    FOLD = 4  # reads what is computed inside it, and stores its result
    CALL = 5  # reads stored operands and stores its results
    REGION = 6  # control flow


class Description(NamedTuple):
    """All that the compiler knows of the ops of one name: sharding rule, traits, cost functions."""

    rule: Callable[[Any], Any] | None = None  # its sharding `Rule`; None for control flow
    # of how many such ops, and which operands differ among them, the op that does all at once
    # (`spmd.ir.dialect.batched`); None where there is none
    batched: Callable[[Any, int, Sequence[bool]], Any] | None = None
    is_same_locally: bool = False  # one device computes its piece by the op itself, at such shapes
    vanishes: bool = False  # one device's piece of the result is its piece of the operand
    is_elementwise: bool = False  # each element depends on the same elements of the operands
    linear: tuple[tuple[int, ...], ...] = ()  # if elementwise, groups of operands it is linear in
    reducer: str = ""  # the reduction whose terms it combines: `add`, `max`, ...
    is_source: bool = False  # it has no operands, and any piece of it can be made anywhere
    is_mark: bool = False  # the user said how its result is split
    is_repeatable: bool = True  # equal ops over equal operands may be done once
    has_effect: bool = False  # it is kept even if nobody reads its results
    flops: Callable[[Any], float] | None = None  # where arithmetic decides its time
    arithmetic: str = ""  # the kind of kernel, as in `Chip.efficiency`; empty for products
    # (op's kind, platform) -> the dtype of its products; None: the first operand's
    multiplies: Callable[[Any, str | None], str] | None = None
    # operands that a library expects, which fixes their order of dims in memory: `matrices` or
    # `images`; empty if any order will do
    reads: str = ""
    reads_pieces: bool = False  # it reads no more of its operands than it writes
    bytes_read: Callable[[Any], Sequence[float]] | None = None  # of each operand, where not all
    passes: Callable[[Any], float] | None = None  # how often it reads operands, where not once
    between_memories: bool = False  # it moves its operand between a device's memory and its host's
    # bytes that it takes while it runs, on backends that look for the indices of what it chooses
    workspace: Callable[[Any], int] | None = None
    role: Role = Role.CALL
    is_in_place: bool = False  # results may lie in operands' memory, if nothing else reads that
    in_library: bool = False  # a library's reduction computes it inside, if nothing else reads it
    collective: str = ""  # of a collective, its kind: `all_gather`, `all_reduce`, ...
    along: str = ""  # the attribute that says along which dim devices have their pieces
    region: str = ""  # of control flow, what its regions are: `loop`, `branches` or `manual`
    selector: str = ""  # dtype of the scalar that chooses among its branches
    tells_devices: bool = False  # its result depends on which device it runs on
    is_global: bool = False  # only the whole program has it, never one device's
    is_local: bool = False  # only one device's program has it
    is_manual: bool = False  # in the whole program only manual regions have it


UNKNOWN = Description()
"""The description of an op that has none in `DESCRIPTIONS`: no rule, every trait at its default."""


def columns(kind: Any) -> float:
    """Returns how often an op may read operands: the larger of the largest one's last 2 sizes."""
    shape = max((t.shape for t in kind.operands), key=math.prod, default=())
    return max(1, *shape[-2:]) if shape else 1


UNKNOWN_CALL = Description(is_repeatable=False, has_effect=True, passes=columns)
"""The description of a custom call that has none in `DESCRIPTIONS`: it counts as having effects."""

DESCRIPTIONS: dict[str, Description] = {}
"""Maps an op's key (its name, `custom_call:<target>`, `composite:<name>`) to its description."""


def key_of(name: str, attrs: Mapping[str, Any]) -> str:
    """Returns an op's key in `DESCRIPTIONS`: name, `custom_call:<target>` or `composite:<name>`."""
    if name == COMPOSITE:
        return f"composite:{attrs['name']}"
    if name == CUSTOM_CALL:
        return f"custom_call:{attrs.get('call_target_name', '')}"
    return name


ALONE = "spmd.alone"  # attribute of a custom call: all axes of the mesh are manual where it is

# Keys of custom calls that have no description of their own: of those that have batch dims, and of
# those that are `ALONE`, so that no axis is left to split them.
BATCHED_CALL = "custom_call:num_batch_dims"
LONE_CALL = "custom_call:in_manual_region"

LIBRARY_CALL = re.compile(
    r"(lapack|(cu|hip)(solver|sparse|_cholesky_update))_?.*_ffi$|(cu|hip)_lu_pivots_to_permutation$"
)
"""Matches the targets of custom calls of linear algebra libraries."""


def is_known_call(target: str) -> bool:
    """Whether a custom call's target has a rule, or is of a known linear algebra library."""
    return f"custom_call:{target}" in DESCRIPTIONS or LIBRARY_CALL.match(target) is not None


def batch_rank(kind: Any) -> int | None:
    """Returns how many leading dims of a custom call's operands are a batch; None if unknown.

    jax writes the number on each call of a target registered as batch-partitionable. In other calls
    of linear algebra libraries it is the largest operand rank less 2; in all others it is unknown.
    """
    frontend = getattr(kind.attrs.get("mhlo.frontend_attributes"), "text", "")
    said = re.search(r'num_batch_dims = "(\d+)"', frontend)
    if said is not None:
        return int(said[1])
    is_library = LIBRARY_CALL.match(str(kind.attrs.get("call_target_name", "")))
    return max([0, *(t.rank - 2 for t in kind.operands)]) if is_library else None


def rule_name(kind: Any) -> str:
    """Returns the key in `DESCRIPTIONS` by which an op's description is looked up: `key_of` mostly.

    A custom call without a description of its own has `LONE_CALL` if it is `ALONE`, or else
    `BATCHED_CALL` if its `batch_rank` is known.
    """
    name = key_of(kind.name, kind.attrs)
    if kind.name != CUSTOM_CALL or name in DESCRIPTIONS:
        return name
    if kind.attrs.get(ALONE):
        return LONE_CALL
    return BATCHED_CALL if batch_rank(kind) is not None else name
