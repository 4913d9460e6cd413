"""What collectives, marks and prices say: sentences that name the user's own lines and values."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.explain import prices
from spmd.explain.prices import Price, Prices
from spmd.ir.program import Frame, Loc, numberless
from spmd.mesh.sharding import Sharding
from tests.explain.programs import MESH, lowered, trained
from tests.programs import mlp

HERE = "test_reasons.py"


def linear(x: Any, w: Any) -> Any:
    return x @ w


def block(x: Any, w: Any) -> Any:
    return jnp.tanh(linear(x, w))


def test_a_sum_says_what_is_summed_over_what_and_who_needs_it() -> None:
    (found,) = lowered(
        block, (1024, 512), (512, 256), specs=((None, "model"), ("model", None))
    ).collectives
    assert re.match(r"sum of dot_general over model: \w.* needs \(.*\), it is \(", found.reason)
    inner, outer = found.source.split(" <- ")
    assert f"{HERE}:{linear.__code__.co_firstlineno + 1} (linear)" in inner
    assert f"{HERE}:{block.__code__.co_firstlineno + 1} (block)" in outer


def test_a_gather_names_the_argument() -> None:
    def step(params: Any, x: Any) -> Any:
        return block(x, params["layers"][0]["w"])

    w = spmd.mark_sharding(jax.ShapeDtypeStruct((512, 512), jnp.float32), MESH, ("data", None))
    x = spmd.mark_sharding(jax.ShapeDtypeStruct((8192, 512), jnp.float32), MESH, ("data", None))
    jitted = spmd.jit(step, mesh=MESH, out_specs=("data", None))
    (found,) = jitted.lower({"layers": [{"w": w}]}, x, topology=spmd.Topology("h200:8")).collectives
    assert found.kind == "all_gather"
    assert found.reason == (
        'operand 1 of dot_general needs it whole, argument params/layers/*/w is ("data", None)'
    )


def test_a_mark_that_needs_something_is_named_with_its_line() -> None:
    def step(x: Any, w: Any) -> Any:
        return block(spmd.mark_sharding(x, MESH, (None, "data")), w)

    program = lowered(step, (1024, 512), (512, 256), specs=(("data", None), ()))
    reasons = [c.reason for c in program.collectives]
    assert any(
        "mark_sharding at " in r and HERE in r and 'needs (None, "data")' in r for r in reasons
    )


@pytest.mark.thorough
def test_every_collective_of_a_training_step_reads_well(training: Any) -> None:
    assert training.collectives
    for c in training.collectives:
        assert "stablehlo." not in c.reason
        assert re.search(r" needs (\(|it whole)| reads its neighbours' ", c.reason), c.reason
        assert not re.search(r"[{}]", c.reason), c.reason  # shardings are written as specs are
        assert not re.search(r"/\d+/", c.reason), c.reason  # layers are alike
        assert re.search(r"\w+\.py:\d+ \(", c.source), c.source
        assert "site-packages" not in c.source
    reasons = [c.reason for c in training.collectives]
    assert any(r.endswith("(in the gradient)") for r in reasons)
    assert any("argument params/" in r for r in reasons)


def test_the_innermost_user_line_and_its_caller_and_names_without_numbers() -> None:
    helper, caller = Frame("m.py", 3, "linear"), Frame("m.py", 9, "mlp")
    library = Frame("/x/site-packages/optax/a.py", 1, "update")
    assert Loc(frames=(library, helper, helper, caller)).trail == "m.py:3 (linear) <- m.py:9 (mlp)"
    assert Loc(frames=(helper, Frame("m.py", 20, "<module>"))).trail == "m.py:3 (linear)"
    assert Loc(frames=(library,)).trail == str(library)
    assert Loc().trail == ""
    assert numberless("params/layers/12/w0/3") == "params/layers/*/w0/*"
    assert numberless("2") == "2"


# The whole text.


@pytest.mark.thorough
def test_the_text_says_how_good_the_plan_is_and_what_the_conflicts_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prices, "MOST_TRIES", 1)
    monkeypatch.setattr(prices, "MOST_CONFLICTS", 2)
    program = trained(True)
    text = program.explain()
    assert re.search(r"lower bound +\S+ \w+: arithmetic alone, ", text)
    assert re.search(r"conflicts: \d+, of \d+ kinds", text)
    assert re.search(r"(no axis|model|data) instead +.* more", text)
    assert "marks that forbid something cheaper" in text
    quick = program.explain(prices=False)
    assert " instead  " not in quick
    assert "conflicts: " in quick
    monkeypatch.setattr(prices, "MOST_OPS", 1)  # a large program: fewer prices, and it says so
    assert re.search(r"conflicts: .* would cost \(the first 1\)", program.explain())


def test_the_text_and_its_value_say_what_a_mark_costs() -> None:
    def step(x: Any, w: Any) -> Any:
        return spmd.mark_sharding(block(x, w), MESH, (None, "data")) * 2

    program = lowered(step, (1024, 512), (512, 256), specs=(("data", None), (None, "model")))
    text = program.explain()
    section = text[text.index("marks that forbid") : text.index("memory per device")]
    assert re.search(
        rf'without mark_sharding at \S*{HERE}:\d+ \(step\).* \(None, "data"\)  ', section
    )
    assert re.search(r"\S+ us less, \S+ \w+ less sent", section)
    ops = program.stages.plan.program.walk()
    value = next(op.results[0] for op in ops if op.name == "spmd.mark")
    assert re.search(r"without this mark: .* less sent", program.explain(f"%{value}"))


def test_one_value_says_why_not_otherwise() -> None:
    training = mlp(spmd.make_mesh(data=4, model=2)).lower()
    program = training.stages.plan.program
    value = next(op.results[0] for op in program.walk() if op.label == "dot_general")
    text = training.explain(f"%{value}")
    assert "instead (the rest of the plan adapting):" in text
    assert re.search(r"(more sent|costs the same|bytes sent)", text)


@pytest.mark.parametrize(("seconds", "is_said"), [(-1e-3, True), (1e-3, False), (0.0, False)])
def test_one_value_gets_one_verdict(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_said: bool
) -> None:
    """What is faster otherwise is not called the cheapest: what to mark is said instead."""
    program = lowered(block, (1024, 512), (512, 256), specs=(("data", None), None))
    priced = Sharding(((), program.mesh.axis_atoms["data"])), Price(seconds, 0)
    monkeypatch.setattr(Prices, "others", lambda *_: (priced,))
    open_one, marked = program.explain("w"), program.explain("x")
    assert "cheapest" not in open_one + marked
    assert ('the planner did not find it: mark it (None, "data")' in open_one) == is_said
    assert ('its mark forbids what is faster: mark it (None, "data")' in marked) == is_said


def test_patterns_and_source_lines(training: Any) -> None:
    many = training.explain("opt_state/0/*", prices=False)
    assert many.count("argument opt_state/0/") >= 8
    assert re.search(r"\d+ more match", many)
    line = linear.__code__.co_firstlineno + 1
    program = lowered(block, (1024, 512), (512, 256), specs=(("data", None), (None, "model")))
    assert "dot_general" in program.explain(f"{HERE}:{line}")
    with pytest.raises(spmd.ArgumentError):
        program.explain("nowhere.py:1")
