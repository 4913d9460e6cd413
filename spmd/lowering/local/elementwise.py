"""Local lowerings of elementwise ops: the op itself."""

from spmd.ir.dialect.elementwise import CHLO, LINEAR, NONLINEAR
from spmd.lowering.local.table import LocalOp, local, same_op

local(*(f"stablehlo.{name}" for name in (*NONLINEAR, *LINEAR)))(same_op)
local(*(f"chlo.{name}" for name in CHLO))(same_op)
local("stablehlo.optimization_barrier")(same_op)


@local("spmd.mark")
def _mark(op: LocalOp) -> tuple[int, ...]:
    """Nothing: the operand arrives in the marked sharding."""
    return op.operands
