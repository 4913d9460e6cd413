"""Loops with other carries."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from spmd.ir.program import Op, OpKind, Value
from spmd.ir.types import TensorType


class Carry(NamedTuple):
    """A carry of a loop.

    Attributes:
      operand: its value in front of the loop.
      test, inside: the arguments of condition and body.
      after: what the body hands on.
      result: the loop's result.
    """

    operand: Value
    test: Value
    inside: Value
    after: Value
    result: Value


def recarried(
    loop: Op, types: Sequence[TensorType], without: Container[int] = (), more: Sequence[Carry] = ()
) -> Op:
    """A loop with other carries; the ops of its regions are as before.

    before: `%5, %6 = while(%0, %1) { body(%2, %3): ...; return %4, %3 }`
    after:  `%5, %9 = while(%0, %7) { body(%2, %8): ...; return %4, %8 }`, without carry 1

    Args:
      loop: the loop.
      types: of all values.
      without: numbers of the carries that go.
      more: carries that are added at the end.
    """
    cond, body = loop.regions

    def changed(values: Sequence[Value], added: Sequence[Value]) -> tuple[Value, ...]:
        return (*(v for i, v in enumerate(values) if i not in without), *added)

    operands = changed(loop.operands, [carry.operand for carry in more])
    kinds = tuple(types[v] for v in operands)
    return loop._replace(
        kind=OpKind(loop.name, kinds, kinds, loop.kind.attrs),
        operands=operands,
        results=changed(loop.results, [carry.result for carry in more]),
        regions=(
            cond._replace(args=changed(cond.args, [carry.test for carry in more])),
            body._replace(
                args=changed(body.args, [carry.inside for carry in more]),
                results=changed(body.results, [carry.after for carry in more]),
            ),
        ),
    )
