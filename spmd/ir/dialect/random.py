"""Rules of random number generation."""

from __future__ import annotations

from spmd.ir.dialect.registry import rule
from spmd.ir.dialect.rule import REPLICATE, Rule, RuleBuilder
from spmd.ir.program import OpKind

THREEFRY_CALLS = ("cu_threefry2x32_ffi", "hip_threefry2x32_ffi")
"""jax's GPU kernels of its default generator: elementwise over keys and counters."""


@rule("stablehlo.rng_bit_generator")
def _rng_bit_generator(kind: OpKind) -> Rule:
    """Nothing is split: every device makes all numbers, and so the same as one device would.

    The numbers depend on the whole shape by the backend's own algorithm; generating a piece with
    a state of its own would give others.
    """
    build = RuleBuilder()
    operands, results = (
        [[build.factor(size, REPLICATE) for size in t.shape] for t in types]
        for types in (kind.operands, kind.results)
    )
    return build.build(operands, results)


@rule(*(f"custom_call:{target}" for target in THREEFRY_CALLS))
def _threefry(kind: OpKind) -> Rule:
    """`i, i, i, i -> i, i`: two words of key and of counter give two words."""
    build = RuleBuilder()
    shape = kind.results[0].shape
    dims = [build.factor(size) for size in shape]
    operands = [dims if t.shape == shape else [] for t in kind.operands]
    return build.build(operands, [dims] * len(kind.results))
