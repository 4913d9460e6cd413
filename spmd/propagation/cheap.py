"""Which values are cheaper to compute again than to move.

Constants, iotas, broadcasts of scalars and short elementwise chains over them have no sharding of
their own: every use gets a copy in the sharding that it wants, so they constrain no plan.
"""

from __future__ import annotations

from spmd.ir.program import Program, Value

LONGEST_CHAIN = 12
"""Elementwise ops on top of each other beyond which recomputing stops being cheap."""


def cheap_values(program: Program) -> frozenset[Value]:
    """Values of rank 1 or more that are recomputed for every use."""
    depth: dict[Value, int] = {}
    types = program.types
    for op in program.walk():
        if op.regions or len(op.results) != 1 or not types[op.results[0]].rank:
            continue
        about = op.kind.about
        if about.is_source:
            depth[op.results[0]] = 0
        elif (about.is_elementwise or about.is_broadcast) and all(
            v in depth or not types[v].rank for v in op.operands
        ):
            below = max((depth.get(v, 0) for v in op.operands), default=0)
            if below < LONGEST_CHAIN:
                depth[op.results[0]] = below + 1
    return frozenset(depth)
