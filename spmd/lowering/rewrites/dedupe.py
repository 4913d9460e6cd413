"""Rewrite: equal ops over equal operands are done once.

before: `%2 = all_gather %1 {data}; ...; %7 = all_gather %1 {data}`
after:  `%2 = all_gather %1 {data}; ...` and every use of `%7` reads `%2`

An op inside a branch may reuse one that is visible from it, never the other way round. A loop's
body reuses nothing from outside: XLA's export of loops that capture values is fragile.
"""

from __future__ import annotations

from typing import Any

from spmd.ir.program import Op, Program, Region, Value


def dedupe(program: Program) -> Program:
    """Removes ops that repeat a visible one; the first stays where it is."""
    # Operands are replaced before they are compared, so that chains collapse: with %3 and %4 equal
    # gathers, `%5 = tanh %3; %6 = tanh %4` are equal as well, once `same` has %4 -> %3.
    same: dict[Value, Value] = {}

    def region(old: Region, visible: dict[Any, Op]) -> Region:
        ops = []
        seen = dict(visible)
        for op in old.ops:
            operands = tuple([same.get(v, v) for v in op.operands])
            if not op.regions and op.kind.about.is_repeatable:
                first = seen.setdefault((op.kind, operands), op)
                if first is not op:
                    same.update(zip(op.results, first.results, strict=True))
                    continue
            outer = {} if op.is_loop else seen
            regions = tuple([region(r, outer) for r in op.regions])
            ops.append(op._replace(operands=operands, regions=regions))
        return Region(old.args, tuple(ops), tuple(same.get(v, v) for v in old.results))

    return program._replace(body=region(program.body, {}))
