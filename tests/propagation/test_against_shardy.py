"""Our propagation beside Shardy's: what follows by necessity agrees, what differs has a reason."""

import os
from functools import lru_cache
from pathlib import Path

import pytest

from benchmarks import shardy
from spmd.ir.control_flow import ties
from spmd.mesh.sharding import Sharding, is_legal
from tests.ir.dialect.cases_given import CASES, LONG, Case
from tests.ir.dialect.cases_marked import MARKED
from tests.propagation.against_shardy import (
    EQUAL,
    FOLLOWS,
    NO_RULE,
    OPERAND,
    SUB_AXIS,
    UNEXPLAINED,
    Comparison,
    Pair,
    compare,
    describe,
    explain,
)
from tests.propagation.necessity import Necessity, Place

PAGE = Path(__file__).parents[2] / "docs" / "shardy.md"

SHARDYS_OWN = {
    OPERAND: "it puts a mark on the operand's producer too",
    SUB_AXIS: "it takes sub-axes off arguments and results, as we do in the plan",
    NO_RULE: "it lets nothing through CHLO ops and `if`",
}
"""Reasons for which Shardy may lack what follows by necessity."""

QUICK = [case for case in CASES if not case.name.startswith(LONG)]


@lru_cache(maxsize=2)
def shardys(is_quick: bool) -> dict[str, list[shardy.Value] | shardy.Failure]:
    return shardy.run_all(texts(is_quick))


@lru_cache(maxsize=2)
def texts(is_quick: bool) -> dict[str, str]:
    return {case.name: case.text() for case in CASES if (case in QUICK) == is_quick}


compared: dict[str, Comparison] = {}


def comparison(case: Case) -> Comparison:
    if case.name not in compared:
        theirs = shardys(case in QUICK)[case.name]
        assert not isinstance(theirs, shardy.Failure), theirs.message
        compared[case.name] = compare(texts(case in QUICK)[case.name], case.mesh, theirs)
    return compared[case.name]


def values_find_each_other(found: Comparison) -> None:
    body = found.stages.program.body
    keys = [pair.key for pair in found.pairs]
    assert len(set(keys)) == len(keys)
    for what, values in (("argument", body.args), ("result", body.results)):
        cheap = sum(value in found.stages.propagated.cheap for value in values)
        assert sum(op == what for _, op, _ in keys) == len(values) - cheap
    ops = [op for op in found.stages.program.walk() if not op.name.endswith("constant")]
    inside = [pair for pair in found.pairs if pair.key[0]]
    assert len(inside) >= len(ops) // 3


def what_is_necessary_agrees(found: Comparison) -> None:
    excused = shardys_own(found)
    for pair in found.pairs:
        for dim, (ours, theirs) in enumerate(zip(pair.ours, pair.theirs, strict=True)):
            must = found.needs.must.get((pair.value, dim), ())
            assert ours[: len(must)] == must, (pair, dim, must)
            assert theirs[: len(must)] == must or pair in excused, (pair, dim, must)


def shardys_own(found: Comparison) -> set[Pair]:
    """Differences for which only Shardy has a reason, and those that come with them."""
    reasons = {*SHARDYS_OWN, FOLLOWS}
    return {pair for pair, why in explain(found).items() if reasons.intersection(why)}


def every_difference_has_a_reason(found: Comparison) -> None:
    why = explain(found)
    unknown = [describe(found, p, reasons) for p, reasons in why.items() if UNEXPLAINED in reasons]
    assert unknown == []


def no_axis_splits_a_value_twice(found: Comparison) -> None:
    program, mesh = found.stages.program, found.stages.plan.mesh
    for pair in found.pairs:
        shape = program.types[pair.value].shape
        for dims in (pair.ours, pair.theirs, pair.planned or ()):
            assert not dims or is_legal(Sharding(dims), shape, mesh, even=False), pair


def closed_dims_stay_as_marked(found: Comparison) -> None:
    propagated = found.stages.propagated
    results = set(propagated.program.body.results)
    for pair in found.pairs:
        mark = propagated.marks.get(pair.value)
        if mark is None:
            continue
        own_value = not (pair.key[0] and pair.value in results and pair.key[1] != MARK)
        for dim, is_open in enumerate(mark.open):
            length = len(mark.dims[dim]) if is_open else None
            assert pair.ours[dim][:length] == mark.dims[dim]
            # Shardy marks a result where it is returned, not the value that is returned.
            assert not own_value or pair.theirs[dim][:length] == mark.dims[dim]


MARK = "sdy.sharding_constraint"


def values_that_are_one_are_split_alike(found: Comparison) -> None:
    propagated = found.stages.propagated
    body = propagated.program.body
    own_way = {*propagated.cheap, *propagated.marks, *body.args, *body.results}
    for op in propagated.program.walk():
        for tie in ties(op) if op.regions else ():
            values = {v for v in (*tie.inside, tie.result) if v not in own_way}
            assert len({propagated.proposals[v] for v in values}) <= 1, (op.loc, tie)


def barriers_pass_everything(found: Comparison) -> None:
    theirs = {pair.value: pair.theirs for pair in found.pairs}
    for op in found.stages.program.walk():
        if op.name != "stablehlo.optimization_barrier":
            continue
        for operand, result in zip(op.operands, op.results, strict=True):
            if is_settled(found.needs, operand, theirs) and is_settled(found.needs, result, theirs):
                proposals = found.stages.propagated.proposals
                assert proposals[operand] == proposals[result]
                assert theirs[operand] == theirs[result]


def is_settled(needs: Necessity, value: int, theirs: dict) -> bool:
    """Whether Shardy has a value and nothing about it is a matter of choice."""
    places: list[Place] = [(value, dim) for dim in range(len(theirs.get(value, ())))]
    return bool(places) and not any(p in needs.contested or p in needs.disputed for p in places)


CHECKS = (
    values_find_each_other, what_is_necessary_agrees, every_difference_has_a_reason,
    no_axis_splits_a_value_twice, closed_dims_stay_as_marked, values_that_are_one_are_split_alike,
    barriers_pass_everything,
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in QUICK else pytest.mark.heavy, id=c.name) for c in CASES],
)
def test_what_both_propagate(case: Case) -> None:
    for check in CHECKS:
        check(comparison(case))


def test_a_batch_keeps_its_axis_from_weights() -> None:
    """Both the batch and the weights are split over `data`; no activation is marked."""
    case = next(case for case in MARKED if case.name == "conflict.weights_from_a_loss")
    found = comparison(case)
    assert {pair.relation for pair in found.pairs} == {EQUAL}
    data = found.stages.plan.mesh.axis_atoms["data"]
    tanh = [pair for pair in found.pairs if pair.key[1] == "stablehlo.tanh"]
    assert [pair.ours[0] for pair in tanh] == [data] * 2


def test_most_is_compared_and_most_is_equal() -> None:
    split = [p for case in QUICK for p in comparison(case).pairs if any(p.ours) or any(p.theirs)]
    must = [place for case in QUICK for place in comparison(case).needs.must]
    assert len(split) > 1000 and len(must) > 1000
    assert sum(pair.relation == EQUAL for pair in split) > 0.8 * len(split)


@pytest.mark.thorough
def test_a_module_that_fails_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    good = "func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> }"
    found = shardy.run_all({"first": good, "bad": "not a module", "last": good})
    assert isinstance(found["bad"], shardy.Failure)
    assert found["first"] == found["last"] and not isinstance(found["last"], shardy.Failure)

    monkeypatch.setattr(shardy, "propagated", aborting)
    aborted = shardy.run_all({"first": "", "bad": "abort", "last": ""})
    assert aborted["first"] == aborted["last"] == []
    assert isinstance(aborted["bad"], shardy.Failure)


def aborting(text: str) -> list[shardy.Value]:
    if text:
        os.abort()
    return []


def test_the_page_lists_every_module() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for case in CASES:
        assert f"| `{case.name}` |" in page, f"{case.name}: run tools/run compare_shardy"
