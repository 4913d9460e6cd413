"""Local lowerings of random number generation: the op itself."""

from spmd.lowering.local import local, same_op
from spmd.propagation.rules_random import THREEFRY_CALLS

local("stablehlo.rng_bit_generator")(same_op)
local(*(f"custom_call:{target}" for target in THREEFRY_CALLS))(same_op)
