"""Prices of what a plan decided against, beside every joint choice, and beside other plans."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.compiler import timed
from spmd.explain.prices import Prices, mark_groups, relief_of, replanned, taken_axes
from spmd.explain.words import spec_text
from spmd.ir.program import Op
from spmd.options import Options
from spmd.planning.network import decoded
from spmd.planning.solver import FORBIDDEN, Solution
from tests.explain import programs
from tests.explain.programs import MESH
from tests.programs import llama, mlp

lowered = functools.partial(programs.lowered, topology="a100:8")


def two_products(x: Any, v: Any, w: Any) -> Any:
    return jnp.tanh(x @ v) @ w


PRODUCT_SPECS = (("data", "model"), ("data", "model"), ("data", None))
PRODUCT_SHAPES = ((256, 512), (512, 1024), (1024, 256))


@pytest.fixture(scope="module")
def plan() -> Any:
    return lowered(two_products, *PRODUCT_SHAPES, specs=PRODUCT_SPECS).stages.plan


def ops_of(plan: Any) -> list[Op]:
    return [op for op in plan.program.walk() if op.name == "stablehlo.dot_general"]


def test_prices_are_times_of_the_best_joint_choices(plan: Any) -> None:
    alternatives = Prices(plan)
    checked = 0
    for op in ops_of(plan):
        number, index = alternatives._built.units.of[op.results[0]]
        left = alternatives._built.domains.left[number][index]
        others = alternatives.others(op.results[0])
        states_priced = [state for state, _ in others]
        assert plan.states[op.results[0]] not in states_priced
        assert len(set(states_priced)) == len(others)
        for state, price in others:
            times = []  # of the cheapest plans that make the choice
            costs = alternatives._built
            network, variable = costs.network, costs.variables[number]
            joint = [
                states
                for states in itertools.product(*(range(len(c)) for c in network.unary))
                if left[variable.choices[states[number]]] == state
            ]
            least = min(map(network.cost, joint))
            assert least < FORBIDDEN / 2
            for states in joint:
                if network.cost(states) <= least * (1 + 1e-9):
                    made = decoded(costs, Solution(states, least, least))
                    assert made.exposed == plan.exposed
                    assert made.states[op.results[0]] == state
                    times.append(timed(made, Options()).run_seconds)
            assert plan.run_seconds + price.seconds in [pytest.approx(t) for t in times]
            checked += 1
    assert checked >= 3


def test_an_arguments_price_is_what_the_program_takes_when_it_is_marked_so(plan: Any) -> None:
    argument = plan.program.body.args[0]
    others = Prices(plan).others(argument)
    assert others
    for sharding, price in others:
        x = eval(spec_text(sharding, MESH), {"replicated": (None, None)})
        other = lowered(two_products, *PRODUCT_SHAPES, specs=(x, *PRODUCT_SPECS[1:]))
        assert other.cost - plan.run_seconds == pytest.approx(price.seconds, abs=1e-12)


def test_all_times_that_are_shown_are_of_one_kind(training: Any) -> None:
    plan = training.stages.plan
    facts = training._facts()
    assert facts.least_seconds <= plan.run_seconds
    assert plan.run_seconds == pytest.approx(training.cost)
    for relief in (relief_of(plan, group) for group in mark_groups(plan)[:5]):
        assert plan.run_seconds + relief.price.seconds >= 0
    for losers in Prices(plan).of_conflicts(plan.propagated.conflicts[:3]):
        for _, price in losers:
            assert plan.run_seconds + price.seconds >= facts.least_seconds * (1 - 1e-9)


@pytest.fixture(
    scope="module",
    params=["mlp", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("scan", "unrolled"))],
)
def training(request: Any) -> Any:
    mesh = spmd.make_mesh(data=4, model=2)
    if request.param == "mlp":
        return mlp(mesh).lower()
    return llama(mesh, "adamw", request.param == "scan").lower(topology=spmd.Topology("a100:8"))


def test_moves_add_up_to_the_plan(training: Any) -> None:
    sent = sum(c.bytes * c.count for c in training.collectives)
    assert sum(move.bytes for move in training.stages.plan.moves) == pytest.approx(sent, rel=1e-2)


def test_losing_claims_are_priced_the_cheapest_first(training: Any) -> None:
    plan = training.stages.plan
    alternatives = Prices(plan)
    conflicts = plan.propagated.conflicts[:6]
    for conflict, losers in zip(conflicts, alternatives.of_conflicts(conflicts), strict=True):
        taken = taken_axes(plan, conflict)
        claims = {(), *(axes for axes, _, _ in conflict.claims)}
        assert {axes for axes, _ in losers} <= claims - {taken}
        assert [p.seconds for _, p in losers] == sorted(p.seconds for _, p in losers)


# Marks.


def marked(x: Any, w: Any, mark: bool = True) -> Any:
    h = x @ w
    if mark:
        h = spmd.mark_sharding(h, MESH, (None, "data"))  # x has its rows over data
    return jnp.tanh(h) * 2


SHAPES = ((1024, 1024), (1024, 1024))
SPECS = (("data", None), (None, None))


def test_a_marks_price_is_that_of_the_program_without_it() -> None:
    plan = lowered(marked, *SHAPES, specs=SPECS).stages.plan
    plain = lowered(lambda x, w: marked(x, w, False), *SHAPES, specs=SPECS).stages.plan
    reliefs = [relief_of(plan, group) for group in mark_groups(plan)[:5]]
    relief = min(reliefs, key=lambda relief: relief.price.seconds)
    assert "test_alternatives.py" in relief.marks.name
    assert relief.price.seconds == pytest.approx(plain.run_seconds - plan.run_seconds)
    assert relief.price.seconds < 0
    assert relief.price.bytes == -sum(move.bytes for move in plan.moves)


def test_marks_that_cost_nothing_are_not_spoken_of() -> None:
    plan = lowered(lambda x, w: marked(x, w, False), *SHAPES, specs=SPECS).stages.plan
    assert Prices(plan).marks.body == []


def test_tries_are_limited_and_the_most_expensive_come_first(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = training.stages.plan
    groups = mark_groups(plan)
    assert [g.seconds for g in groups] == sorted((g.seconds for g in groups), reverse=True)
    monkeypatch.setattr("spmd.explain.prices.MOST_TRIES", 1)
    count = sum(group.seconds > 0 for group in groups)
    assert Prices(plan).marks.remark.startswith(f"without 1 of the {count} kinds of marks")


def test_opening_an_argument_says_what_it_holds_more() -> None:
    specs = (("data", None), ("data", None))
    plan = lowered(lambda x, w: marked(x, w, False), *SHAPES, specs=specs).stages.plan
    relief = next(relief_of(plan, g) for g in mark_groups(plan) if g.name == "argument w")
    assert relief.price.argument_bytes == 1024 * 1024  # 2 MiB over model, 1 MiB of it here
    assert relief.price.bytes < 0


def test_a_program_without_mark_ops_still_computes_the_same_plan() -> None:
    """Nothing is left of a dropped mark, in loops neither."""

    def looped(x: Any, w: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            return spmd.mark_sharding(jnp.tanh(c @ w), MESH, ("data", None)), None

        return jax.lax.scan(body, x, None, length=3)[0]

    plan = lowered(looped, *SHAPES, specs=SPECS).stages.plan
    marks = [v for v, m in plan.propagated.marks.items() if m.reason.startswith("mark_sharding")]
    assert marks
    other = replanned(plan, drop=marks)
    assert not [op for op in other.program.walk() if op.name == "spmd.mark"]
    assert other.seconds <= plan.seconds * (1 + 1e-9)
    changed = replanned(plan, change={plan.program.body.args[1]: plan.arguments[0]})
    assert changed.arguments[1] == plan.arguments[0]
    assert np.isfinite(changed.seconds)
