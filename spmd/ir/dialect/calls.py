"""Random numbers, and calls of libraries that belong to no other family."""

from __future__ import annotations

from spmd.ir.dialect.elementwise import elementwise_rule
from spmd.ir.dialect.registry import LONE_CALL, op
from spmd.ir.dialect.rule import REPLICATE, Rule, RuleBuilder
from spmd.ir.program import OpKind

PLACEMENTS = ("custom_call:LayoutConstraint", "custom_call:annotate_device_placement")
"""They say where or how an array lies in memory, and leave its elements alone."""

THREEFRY = ("custom_call:cu_threefry2x32_ffi", "custom_call:hip_threefry2x32_ffi")
"""jax's GPU kernels of its default generator: two words of key and of counter give two words."""

op(*PLACEMENTS, *THREEFRY, is_same_locally=True)(elementwise_rule)


@op(LONE_CALL, "stablehlo.rng_bit_generator", is_same_locally=True)
def _whole(kind: OpKind) -> Rule:
    """Nothing is split.

    Random numbers depend on the whole shape by the backend's own algorithm, so every device makes
    all of them; a piece made with a state of its own would hold others. And a call in a manual
    region that nobody described is in one device's program as the user wrote it.
    """
    build = RuleBuilder()
    operands, results = (
        [[build.factor(size, REPLICATE) for size in t.shape] for t in types]
        for types in (kind.operands, kind.results)
    )
    return build.build(operands, results)
