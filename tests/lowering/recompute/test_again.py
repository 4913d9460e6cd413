"""The cheapest of all answers to what is kept and what is made again: against trying them all."""

import itertools
import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd.ir.program import Op, OpKind, Value
from spmd.ir.types import TensorType
from spmd.lowering.recompute.again import Cut, cheapest_cut

F32 = TensorType((), "f32")


def op_of(result: Value, operands: tuple[Value, ...]) -> Op:
    kind = OpKind("stablehlo.test", (F32,) * len(operands), (F32,), {})
    return Op(kind, operands, (result,))


CHAIN = [op_of(1, (0,)), op_of(2, (1,)), op_of(3, (2,))]


def never_early(value: Value, op: Op) -> float:
    return 0.0


def cut_of(keep: dict[Value, float], again: dict[Value, float], needed: Iterable[Value]) -> Cut:
    redo = lambda op: again[op.results[0]]  # noqa: E731
    return cheapest_cut(CHAIN, needed, keep.__getitem__, redo, never_early)


def test_what_is_cheap_to_make_and_needed_is_made_again() -> None:
    keep, again = {0: 0.0, 1: 5.0, 2: 5.0, 3: 5.0}, {1: 9.0, 2: 1.0, 3: 1.0}
    found = cut_of(keep, again, (2, 3))
    assert found.kept == {2}
    assert [op.results[0] for op in found.again] == [3]
    assert cut_of(keep, again | {1: 3.0}, (2, 3)).kept == {0}
    assert cut_of({}, {}, ()) == Cut(frozenset(), ())
    assert not cut_of({0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0}, {1: 1.0, 2: 1.0, 3: 1.0}, (1, 2, 3)).again


def test_what_cannot_be_kept_is_made_again_and_what_cannot_be_made_is_kept() -> None:
    keep, again = {0: 0.0, 1: 1.0, 2: math.inf, 3: 1.0}, {1: math.inf, 2: 99.0, 3: 1.0}
    found = cut_of(keep, again, (2,))
    assert found.kept == {1}
    assert [op.results[0] for op in found.again] == [2]


def test_what_is_early_pays_once() -> None:
    """Two ops read one value early: it is held once, for both."""
    ops = [op_of(1, (0,)), op_of(2, (1,)), op_of(3, (1,))]
    keep = {0: 0.0, 1: 2.0, 2: 4.0, 3: 4.0}

    def early(value: Value, op: Op) -> float:
        return 3.0 if value == 1 else 0.0

    prices = keep.__getitem__, lambda op: math.inf if op.results[0] == 1 else 1.0, early
    assert cheapest_cut(ops, (2, 3), *prices).kept == {1}  # 2 + 3 + 1 + 1 < 4 + 4
    assert cheapest_cut(ops, (2,), *prices).kept == {2}  # 2 + 3 + 1 > 4


costs = st.sampled_from((0.0, 1.0, 2.0, 5.0, 11.0, math.inf))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Op], list[Value], list[float], list[float]]:
    count = draw(st.integers(1, 6))
    ops = []
    for result in range(1, count + 1):
        reads = draw(st.lists(st.integers(0, result - 1), max_size=3, unique=True))
        ops.append(op_of(result, tuple(reads)))
    needed = draw(st.lists(st.integers(1, count), min_size=1, unique=True))
    keep = [0.0, *(draw(costs.filter(math.isfinite)) for _ in ops)]
    return ops, needed, keep, [0.0, *(draw(costs) for _ in ops)]


def cheapest(ops: list[Op], needed: list[Value], keep: list[float], again: list[float]) -> float:
    """By trying every set of ops that are done again."""
    best = math.inf
    for chosen in itertools.product((False, True), repeat=len(ops)):
        made = {op.results[0] for op, is_again in zip(ops, chosen, strict=True) if is_again}
        asked = set(needed) | {v for op in ops if op.results[0] in made for v in op.operands}
        best = min(best, sum(again[v] for v in made) + sum(keep[v] for v in asked - made))
    return best


@given(problems())
@settings(max_examples=150, deadline=None)
def test_no_answer_is_cheaper(
    problem: tuple[list[Op], list[Value], list[float], list[float]],
) -> None:
    ops, needed, keep, again = problem
    redo = lambda op: again[op.results[0]]  # noqa: E731
    found = cheapest_cut(ops, needed, keep.__getitem__, redo, never_early)
    made = {op.results[0] for op in found.again}
    there = made | found.kept
    assert there >= set(needed)
    assert all(there >= set(op.operands) for op in found.again)
    cost = sum(again[v] for v in made) + sum(keep[v] for v in found.kept)
    assert cost == pytest.approx(cheapest(ops, needed, keep, again), abs=1e-6)
