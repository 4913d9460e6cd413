"""The cheapest of all answers to what is kept and what is made again: against trying them all."""

import itertools
import math
from collections.abc import Set
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.ir.program import Op, OpKind, Value
from spmd.ir.types import TensorType
from spmd.lowering.recompute import cheapest_cut

F32 = TensorType((), "f32")


def op_of(result: Value, operands: tuple[Value, ...]) -> Op:
    return Op(OpKind("stablehlo.test", (F32,) * len(operands), (F32,), {}), operands, (result,))


costs = st.sampled_from((0.0, 1.0, 2.0, 5.0, 11.0, math.inf))
finite = costs.filter(math.isfinite)


class Problem(NamedTuple):
    """Ops, and what it costs to keep a value, to do its op again, and to have an operand early."""

    ops: list[Op]
    needed: list[Value]
    keep: list[float]
    again: list[float]
    early: dict[tuple[Value, Value], float]  # (operand, result of the op that reads it) -> price

    def cost(self, made: Set[Value], kept: Set[Value]) -> float:
        """What an answer costs; an operand that several ops read is early once, for all."""
        soonest = dict.fromkeys((value for value, _ in self.early), 0.0)
        for (value, result), price in self.early.items():
            soonest[value] = max(soonest[value], price if result in made else 0.0)
        return (
            sum(self.again[v] for v in made)
            + sum(self.keep[v] for v in kept)
            + sum(soonest.values())
        )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(1, 6))
    ops = []
    for result in range(1, count + 1):
        reads = draw(st.lists(st.integers(0, result - 1), max_size=3, unique=True))
        ops.append(op_of(result, tuple(reads)))
    needed = draw(st.lists(st.integers(1, count), unique=True))
    again = [0.0, *(draw(costs) for _ in ops)]
    keep = [0.0, *(draw(finite if math.isinf(price) else costs) for price in again[1:])]
    early = {(v, op.results[0]): draw(finite) for op in ops for v in op.operands}
    return Problem(ops, needed, keep, again, early)


def cheapest(problem: Problem) -> tuple[float, int]:
    """What it costs, and how few ops are done again, by trying every set of such ops."""
    best = math.inf, 0
    for chosen in itertools.product((False, True), repeat=len(problem.ops)):
        again = list(itertools.compress(problem.ops, chosen))
        made = {op.results[0] for op in again}
        asked = set(problem.needed) | {v for op in again for v in op.operands}
        best = min(best, (problem.cost(made, asked - made), len(made)))
    return best


@given(problems())
@settings(max_examples=150, deadline=None)
def test_no_answer_is_cheaper(problem: Problem) -> None:
    found = cheapest_cut(
        problem.ops,
        problem.needed,
        problem.keep.__getitem__,
        lambda op: problem.again[op.results[0]],
        lambda value, op: problem.early[value, op.results[0]],
    )
    made = {op.results[0] for op in found.again}
    there = made | found.kept
    assert there >= set(problem.needed)
    assert all(there >= set(op.operands) for op in found.again)
    assert (problem.cost(made, found.kept), len(made)) == cheapest(problem)
