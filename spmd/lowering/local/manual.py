"""Local lowerings of what is in manual regions.

One device's program is what a manual region is written in already: the ways in and out vanish, and
collectives are themselves at the pieces of their operands.

before: `%5 = spmd.to_manual %0 : (tensor<8x16xf32>) -> tensor<2x16xf32>`   (%0 split 4 x 2 ways)
after:  nothing: `%0` is a `tensor<2x8xf32>` on each device, and `%5` is the same
"""

from spmd.ir.control_flow import FROM_MANUAL, TO_MANUAL
from spmd.ir.dialect.registry import LONE_CALL
from spmd.ir.legality import COLLECTIVES, DEVICE_IDS
from spmd.lowering.local.table import LocalOp, local, same_op

local(*COLLECTIVES)(same_op)
local(*DEVICE_IDS, LONE_CALL)(same_op)


@local(TO_MANUAL, FROM_MANUAL)
def _boundary(op: LocalOp) -> tuple[int, ...]:
    """Nothing: the operand's piece is the result's piece."""
    return op.operands
