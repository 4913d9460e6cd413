"""Local lowerings of ops that belong to no family: the op itself."""

from spmd.lowering.local import local, same_op
from spmd.propagation.rules_misc import PLACEMENT_CALLS

local(*(f"custom_call:{target}" for target in PLACEMENT_CALLS))(same_op)
