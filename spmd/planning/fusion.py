"""Which values of a local program lie in memory: XLA computes the others where they are used.

Backends fuse alike as far as memory is concerned: elementwise ops, broadcasts and everything that
only moves elements around are computed inside whatever reads them, again for each reader unless
that is expensive. Contractions, reductions, collectives and library calls read and write memory.
"""

from __future__ import annotations

from enum import IntEnum

from spmd.ir.program import OpKind
from spmd.propagation.rules_elementwise import CHLO, LINEAR, NONLINEAR


class Role(IntEnum):
    """What XLA makes of an op.

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


_EXPENSIVE = (
    "atan2", "cbrt", "cosine", "exponential", "exponential_minus_one", "log", "log_plus_one",
    "logistic", "power", "rsqrt", "sine", "sqrt", "tan", "tanh", "divide", "remainder",
)  # fmt: skip
_MOVES = (
    "broadcast_in_dim", "concatenate", "constant", "dynamic_slice", "iota", "pad", "reverse",
    "slice", "transpose",
)  # fmt: skip

_ROLES: dict[str, Role] = {
    **{f"stablehlo.{name}": Role.INSIDE for name in (*NONLINEAR, *LINEAR, *_MOVES)},
    **{f"chlo.{name}": Role.ONCE for name in CHLO},
    "chlo.square": Role.INSIDE,
    **{f"stablehlo.{name}": Role.ONCE for name in _EXPENSIVE},
    **{f"spmd.{name}": Role.INSIDE for name in ("axis_index", "local_slice", "neutral")},
    **{f"stablehlo.{name}": Role.ALIAS for name in ("reshape", "optimization_barrier")},
    "stablehlo.bitcast_convert": Role.ALIAS,
    "stablehlo.dynamic_update_slice": Role.UPDATE,
    "stablehlo.scatter": Role.UPDATE,
    "stablehlo.reduce": Role.FOLD,
    "stablehlo.reduce_window": Role.FOLD,
    "stablehlo.gather": Role.ONCE,
    "stablehlo.while": Role.REGION,
    "stablehlo.case": Role.REGION,
    "stablehlo.if": Role.REGION,
}


def role(kind: OpKind) -> Role:
    """What XLA makes of an op; one that is not known is a call."""
    found: Role | None = kind._cache.get("fusion.role")
    if found is None:
        found = kind._cache["fusion.role"] = _ROLES.get(kind.name, Role.CALL)
    return found
