"""Rewrite: ops whose results nobody reads are dropped.

before: `%1 = negate %0; %2 = tanh %0; return %2`
after:  `%2 = tanh %0; return %2`
"""

from __future__ import annotations

from spmd.ir.program import Program, Region, Value, free_values, has_effect


def remove_dead(program: Program) -> Program:
    """Drops ops whose results nobody reads (effects are kept)."""

    # Backwards, so that the readers of a value are seen before its op. A loop's carry that nobody
    # reads stays: whether its body needs it takes a look around the loop.
    def region(old: Region, needed: set[Value]) -> Region:
        needed.update(old.results)
        kept = []
        for op in reversed(old.ops):
            if needed.isdisjoint(op.results) and op.results and not has_effect(op):
                continue
            if op.regions:
                for inner in op.regions:
                    needed.update(free_values(inner))
                op = op._replace(regions=tuple(region(r, set()) for r in op.regions))
            needed.update(op.operands)
            kept.append(op)
        return Region(old.args, tuple(reversed(kept)), old.results)

    return program._replace(body=region(program.body, set()))
