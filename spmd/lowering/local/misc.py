"""Local lowerings of ops that belong to no family: the op itself."""

from spmd.ir.dialect.misc import PLACEMENT_CALLS
from spmd.lowering.local.table import local, same_op

local(*(f"custom_call:{target}" for target in PLACEMENT_CALLS))(same_op)
