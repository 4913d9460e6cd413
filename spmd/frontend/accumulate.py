"""Accumulate: what is scattered into zeros and then added to something is scattered into that.

The gradient of a value of which each step of a loop reads a piece is made so: zeros around a step's
piece, added to the sum of those before, reading and writing all of it.

before: `%3 = scatter[add] zeros, %i, %update;  %4 = add %sum, %3`
after:  `%4 = scatter[add] %sum, %i, %update`

Only where no two updates fall together: a sum of few bits depends on its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spmd.ir.control_flow import producers_of, users_of
from spmd.ir.description import BROADCAST, CONSTANT, SCATTER
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import is_identity
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import rewrite_ops


def accumulate(program: Program) -> Program:
    """Rewrites such sums; a program without any is returned as it is."""
    if not any(_adds_apart(op) for op in program.walk()):
        return program
    producers, users = producers_of(program), users_of(program)
    sums = {
        op.results[0]: made
        for op, made in _sums_in(program.body)
        if len(users[made.results[0]]) == 1 and _is_zero(made.operands[0], producers)
    }
    scattered = {made.results[0] for made in sums.values()}
    parts: dict[Value, tuple[Value, ...]] = {}  # result of a scatter -> what it reads, in the new

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        result = op.results[0] if op.results else None
        if result in scattered:
            parts[result] = operands
            return operands[:1]
        if result not in sums:
            return None
        made = sums[result]
        (whole,) = [new for v, new in zip(op.operands, operands, strict=True) if v not in parts]
        read = (whole, *parts[made.results[0]][1:])
        return b.op(made.name, read, made.kind.results, made.kind.attrs)

    return rewrite_ops(program, rewrite) if sums else program


def _adds_apart(op: Op) -> bool:
    """Whether an op adds updates to a tensor, each at a place of its own."""
    attrs = op.kind.attrs
    is_alone = op.name == SCATTER and len(op.results) == 1
    return is_alone and attrs["reducer"] == "add" and bool(attrs.get("unique_indices"))


def _sums_in(region: Region) -> Iterator[tuple[Op, Op]]:
    """Each sum of something and of what was scattered in the same region, with the scatter."""
    made: dict[Value, Op] = {}
    for op in region.ops:
        if _adds_apart(op):
            made[op.results[0]] = op
        if op.name == "stablehlo.add" and len(found := made.keys() & set(op.operands)) == 1:
            yield op, made[found.pop()]
        for inner in op.regions:
            yield from _sums_in(inner)


def _is_zero(value: Value, producers: Mapping[Value, Op]) -> bool:
    """Whether a value is zeros: a constant, or one that was broadcast."""
    op = producers.get(value)
    while op is not None and op.name == BROADCAST:
        op = producers.get(op.operands[0])
    if op is None or op.name != CONSTANT:
        return False
    return is_identity(op.kind.attrs["value"], op.kind.results[0].dtype, "add")
