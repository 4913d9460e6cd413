"""Separate: an op whose k-th result depends on its k-th operands alone becomes one op for each.

An op is split in one way, and all of its operands with it. Operands that have nothing to do with
each other would compete for a mesh axis that each of them may have for itself.

before: `%2, %3 = stablehlo.optimization_barrier %0, %1`
after:  `%2 = stablehlo.optimization_barrier %0; %3 = stablehlo.optimization_barrier %1`

before: `%4, %5 = stablehlo.reduce %0, %1, %2, %3 ({ (a, b, c, d): a + c, max(b, d) })`
after:  `%4 = stablehlo.reduce %0, %2 ({ (a, c): a + c }); %5 = stablehlo.reduce %1, %3 (...)`

Barriers that were one are put together again when the program is partitioned
(`spmd.lowering.partition`): what waits for what stays as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd.ir.control_flow import producers_of
from spmd.ir.description import BARRIER, CONSTANT
from spmd.ir.dialect.bodies import separated
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import NEUTRAL, body_reducer, is_identity
from spmd.ir.program import Body, Op, Program, Value
from spmd.ir.rewrite import rewrite_ops


def separate(program: Program) -> Program:
    """Takes every such op apart; a program without any is returned as it is."""
    if not any(len(op.results) > 1 and _is_separable(op) for op in program.walk()):
        return program
    producers = producers_of(program)

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        if len(op.results) == 1 or not _is_separable(op):
            return None
        if op.name == BARRIER:
            types = op.kind.results
            pairs = zip(operands, types, strict=True)
            return [b.op(op.name, (value,), (type_,))[0] for value, type_ in pairs]
        return _reductions(b, op, operands, producers)

    return rewrite_ops(program, rewrite)


def _is_separable(op: Op) -> bool:
    """Whether an op of several results may be one op for each of them."""
    return op.name == BARRIER or bool(_bodies(op))


def _bodies(op: Op) -> tuple[Body, ...]:
    """For each result of a reduction the body that makes it; none if the results share anything."""
    # A sort has a body, too, but its body has one result: the order of all of its operands.
    body = op.kind.attrs.get("body")
    if not isinstance(body, Body) or len(body.region.results) != len(op.results):
        return ()
    return separated(body, len(op.results))


def _reductions(
    b: Builder, op: Op, operands: tuple[Value, ...], producers: Mapping[Value, Op]
) -> list[Value]:
    # What is reduced comes first, what it is reduced with last; a scatter's indices are between.
    made: list[Value] = []
    count = len(op.results)
    shared = operands[count : len(operands) - count]
    for k, body in enumerate(_bodies(op)):
        reducer = body_reducer(body)
        attrs = {**op.kind.attrs, "body": body, "reducer": reducer}
        if NEUTRAL in attrs:
            initial = producers.get(op.operands[k - count])
            attrs[NEUTRAL] = initial is not None and (
                initial.name == CONSTANT
                and is_identity(initial.kind.attrs["value"], initial.kind.results[0].dtype, reducer)
            )
        own = (operands[k], *shared, operands[k - count])
        made += b.op(op.name, own, (op.kind.results[k],), attrs)
    return made
