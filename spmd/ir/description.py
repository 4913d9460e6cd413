"""`Description`: all that the compiler knows of an op, as data.

The descriptions are written in `spmd.ir.dialect`, by family. Algorithms ask an op's kind for a
trait (`op.kind.about.is_elementwise`), and for one op alone by a name from here (`BROADCAST`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

# Ops that algorithms ask for by name, because they alone are what is looked for.
BARRIER = "stablehlo.optimization_barrier"
BROADCAST = "stablehlo.broadcast_in_dim"
CONSTANT = "stablehlo.constant"
CONVERT = "stablehlo.convert"
DYNAMIC_SLICE = "stablehlo.dynamic_slice"
REDUCE = "stablehlo.reduce"
RESHAPE = "stablehlo.reshape"
SCATTER = "stablehlo.scatter"
SUBTRACT = "stablehlo.subtract"
TRANSPOSE = "stablehlo.transpose"
FROM_MANUAL = "spmd.from_manual"
"""The inverse of `spmd.to_manual`: joins the devices' pieces to the value outside of a region."""

COMPOSITE = "stablehlo.composite"
"""A call of a function that stays whole; its attribute `name` says which."""

CUSTOM_CALL = "stablehlo.custom_call"
"""A call of a library; its attribute `call_target_name` says which."""


class Role(IntEnum):
    """How XLA's fusion treats an op.

    Attributes:
      INSIDE: computed inside its readers, again for each.
      ONCE: computed inside its only reader; stored where there are several.
      ALIAS: another name for its operand's memory.
      UPDATE: writes a piece into its first operand's memory.
      FOLD: reads what is computed inside it, and stores its result.
      CALL: reads stored operands and stores its results.
      REGION: control flow.
    """

    INSIDE = 0
    ONCE = 1
    ALIAS = 2
    UPDATE = 3
    FOLD = 4
    CALL = 5
    REGION = 6


class Description(NamedTuple):
    """All that is known of an op by its name.

    Attributes:
      rule: from the op's kind to its sharding `Rule`; None for control flow.
      batched: from its kind, a number of such ops and which operands differ among them, the op that
        does all at once (`spmd.ir.dialect.batched`); None where there is none.
      is_same_locally: one device computes its piece by the op itself, at the pieces' shapes.
      vanishes: one device's piece of the result is its piece of the operand.
      is_elementwise: each element of the results depends on the same elements of the operands.
      linear: of an elementwise op, the groups of operands in which it is linear.
      reducer: the reduction whose terms it combines: `add`, `max`, ...
      is_source: it has no operands, and any piece of it can be made anywhere.
      is_mark: the user said how its result is split.
      is_repeatable: equal ops over equal operands may be done once.
      has_effect: it is kept even if nobody reads its results.
      flops: floating-point operations of an op of this kind, where arithmetic decides its time.
      arithmetic: the kind of kernel that does them, as in `Chip.efficiency`; empty for products.
      reads: the kind of operands that a library expects, which fixes their order of dims in memory:
        `matrices` or `images`; empty if any order will do.
      reads_pieces: it reads no more of its operands than it writes.
      bytes_read: from the op's kind, the bytes that it reads of each operand, where not all.
      passes: from the op's kind, how often it goes through its operands, where not once.
      workspace: from the op's kind, the bytes that it takes while it runs, on backends that look
        for the indices of what it chooses.
      role: what XLA's fusion makes of it.
      is_in_place: each of its results may lie in its operand's memory, if nothing else reads that.
      in_library: a library's reduction computes it inside, if nothing else reads it.
      collective: of a collective, its kind: `all_gather`, `all_reduce`, ...
      along: the attribute that says along which dim devices have their pieces.
      region: of control flow, what its regions are: `loop`, `branches` or `manual`.
      selector: dtype of the scalar that chooses among its branches.
      tells_devices: its result depends on which device it runs on, beside its operands.
      is_global: only the whole program has it, never one device's.
      is_local: only one device's program has it.
      is_manual: in the whole program only manual regions have it.
    """

    rule: Callable[[Any], Any] | None = None
    batched: Callable[[Any, int, Sequence[bool]], Any] | None = None
    is_same_locally: bool = False
    vanishes: bool = False
    is_elementwise: bool = False
    linear: tuple[tuple[int, ...], ...] = ()
    reducer: str = ""
    is_source: bool = False
    is_mark: bool = False
    is_repeatable: bool = True
    has_effect: bool = False
    flops: Callable[[Any], float] | None = None
    arithmetic: str = ""
    reads: str = ""
    reads_pieces: bool = False
    bytes_read: Callable[[Any], Sequence[float]] | None = None
    passes: Callable[[Any], float] | None = None
    workspace: Callable[[Any], int] | None = None
    role: Role = Role.CALL
    is_in_place: bool = False
    in_library: bool = False
    collective: str = ""
    along: str = ""
    region: str = ""
    selector: str = ""
    tells_devices: bool = False
    is_global: bool = False
    is_local: bool = False
    is_manual: bool = False


UNKNOWN = Description()
"""Description of ops that nobody described: nothing is known, and there is no rule."""


def columns(kind: Any) -> float:
    """The columns of an op's largest matrix, each of which a factorisation goes through it for."""
    shape = max((t.shape for t in kind.operands), key=math.prod, default=())
    return max(1, *shape[-2:]) if shape else 1


UNKNOWN_CALL = Description(is_repeatable=False, has_effect=True, passes=columns)
"""Description of other custom calls: they may have effects, so they run as often as written."""

DESCRIPTIONS: dict[str, Description] = {}
"""Name of an op, `custom_call:<target>` or `composite:<name>` -> its description."""


def key_of(name: str, attrs: Mapping[str, Any]) -> str:
    """The key of an op's description: a custom call's target, a composite's name, or its own."""
    if name == COMPOSITE:
        return f"composite:{attrs['name']}"
    if name == CUSTOM_CALL:
        return f"custom_call:{attrs.get('call_target_name', '')}"
    return name
