"""Local lowerings of random number generation: the op itself."""

from spmd.ir.dialect.random import THREEFRY_CALLS
from spmd.lowering.local.table import local, same_op

local("stablehlo.rng_bit_generator")(same_op)
local(*(f"custom_call:{target}" for target in THREEFRY_CALLS))(same_op)
