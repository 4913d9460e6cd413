"""Local lowerings of linear algebra: the op itself on this device's share of the batch.

Layouts are orders of dims and configurations speak of matrices alone, so both hold as they are.
"""

from spmd.ir.dialect.linalg import MATRIX_CALLS
from spmd.ir.dialect.registry import BATCHED_CALL
from spmd.lowering.local.table import local, same_op

local("stablehlo.fft", "stablehlo.cholesky", "stablehlo.triangular_solve")(same_op)
local(BATCHED_CALL, *(f"custom_call:{target}" for target in MATRIX_CALLS))(same_op)
