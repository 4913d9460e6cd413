"""Rules of ops that belong to no family: `top_k`, placements and layouts."""

from __future__ import annotations

from spmd.ir.program import OpKind
from spmd.propagation.registry import rule
from spmd.propagation.rule import REPLICATE, Rule, RuleBuilder
from spmd.propagation.rules_elementwise import elementwise_rule

PLACEMENT_CALLS = ("LayoutConstraint", "annotate_device_placement")
"""Targets that say where or how an array lies in memory, and leave its elements alone."""

rule(*(f"custom_call:{target}" for target in PLACEMENT_CALLS))(elementwise_rule)


@rule("chlo.top_k")
def _top_k(kind: OpKind) -> Rule:
    """`i j -> i k, i k`: the searched dim, the last, stays whole."""
    build = RuleBuilder()
    *outer, searched = kind.operands[0].shape
    shared = [build.factor(size) for size in outer]
    found = [*shared, build.factor(kind.results[0].shape[-1], REPLICATE)]
    return build.build([[*shared, build.factor(searched, REPLICATE)]], [found, found])
