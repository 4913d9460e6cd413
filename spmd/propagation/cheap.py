"""Which values are cheaper to compute again than to move.

Constants, iotas, broadcasts of scalars and short elementwise chains over them have no sharding of
their own: every use gets a copy in the sharding that it wants, so they constrain no plan.
"""

from __future__ import annotations

from spmd.ir.dialect.elementwise import CHLO, LINEAR, NONLINEAR
from spmd.ir.dialect.registry import rule_name
from spmd.ir.program import Program, Value

LONGEST_CHAIN = 12
"""Elementwise ops on top of each other beyond which recomputing stops being cheap."""

_SOURCES = {"stablehlo.constant", "stablehlo.iota"}
_CHAIN = {f"stablehlo.{name}" for name in (*NONLINEAR, *LINEAR)} | {f"chlo.{n}" for n in CHLO}
_CHAIN.add("stablehlo.broadcast_in_dim")


def cheap_values(program: Program) -> frozenset[Value]:
    """Values of rank 1 or more that are recomputed for every use."""
    depth: dict[Value, int] = {}
    types = program.types
    for op in program.walk():
        if op.regions or len(op.results) != 1 or not types[op.results[0]].rank:
            continue
        name = rule_name(op.kind)
        if name in _SOURCES:
            depth[op.results[0]] = 0
        elif name in _CHAIN and all(v in depth or not types[v].rank for v in op.operands):
            below = max((depth.get(v, 0) for v in op.operands), default=0)
            if below < LONGEST_CHAIN:
                depth[op.results[0]] = below + 1
    return frozenset(depth)
