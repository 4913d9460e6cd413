"""Rewrite: equal ops over equal operands are done once, and transposes of transposes are one.

before: `%2 = all_gather %1 {data}; ...; %7 = all_gather %1 {data}`
after:  `%2 = all_gather %1 {data}; ...` and every use of `%7` reads `%2`

before: `%1 = transpose %0 [1, 0]; %2 = transpose %1 [1, 0]`
after:  every use of `%2` reads `%0`

An op inside a branch may reuse one that is visible from it, never the other way round. A loop's
body reuses nothing from outside: XLA's export of loops that capture values is fragile.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.ir.dead import remove_dead
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, edit_ops


def dedupe(program: Program) -> Program:
    """Removes ops that repeat a visible one; the first stays where it is."""
    turned: dict[Value, tuple[Value, tuple[int, ...]]] = {}  # a transpose -> of what, and how
    joined = False

    # Operands are replaced before they are compared, so that chains collapse: with %3 and %4 equal
    # gathers, `%5 = tanh %3; %6 = tanh %4` are equal as well, once %4 is %3.
    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        nonlocal joined
        if op.regions or not op.kind.about.is_repeatable:
            return None
        if op.name == "stablehlo.transpose":
            (source,), order = op.operands, tuple(op.kind.attrs["permutation"])
            if source in turned:
                joined, (source, before) = True, turned[source]
                order = tuple([before[p] for p in order])
                result = b.transpose(source, order)
                if result != source:
                    turned[result] = source, order
                return (result,)
            turned[op.results[0]] = source, order
        first = b.once((op.kind, op.operands), lambda: op.results)
        return None if first is op.results else first

    found = edit_ops(program, edit)
    return remove_dead(found) if joined else found
