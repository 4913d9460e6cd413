"""A mark that costs much is named in a warning and in the summary; others are not."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.explain import prices
from spmd.mesh.sharding import Sharding

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))
X, V, W = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8192, 512), (512, 4096), (4096, 512)))
SPECS = (("data", None), (None, "model"), ("model", None))
OF_A_RUN = re.compile(r"costs ([\d.]+)% of a predicted run: (\S+ \S+), without it (\S+ \S+), with")


def products(x: Any, v: Any, w: Any, spec: Any = None) -> Any:
    h = x @ v
    if spec is not None:
        h = spmd.mark_sharding(h, MESH, spec)
    return jnp.tanh(h) @ w


def lowered(
    fn: Any, specs: Any = SPECS, x: Any = X, **options: Any
) -> tuple[spmd.Lowered, list[str]]:
    """A program, and what was warned of its marks."""
    jitted = spmd.jit(fn, mesh=MESH, in_specs=specs, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        program = jitted.lower(x, V, W, topology=spmd.Topology("a100:8"))
    assert all(warning.filename == __file__ for warning in found)
    said = [str(warning.message) for warning in found]
    return program, [text for text in said if "of a predicted run" in text]


def test_a_mark_inside_that_costs_much_is_named_with_its_line_and_both_times() -> None:
    program, warned = lowered(lambda x, v, w: products(x, v, w, ("model", None)))
    without, nothing = lowered(products)
    assert not nothing
    costly = program.prices.costly_mark
    assert costly is not None
    assert costly.seconds == pytest.approx(program.cost)
    assert costly.without == pytest.approx(without.cost)
    assert costly.share == pytest.approx(1 - without.cost / program.cost)
    assert costly.share > prices.LEAST_SHARE
    said = prices.costly_text(costly, MESH)
    assert said.startswith("mark_sharding at explain/test_costly.py")
    assert OF_A_RUN.search(said)
    assert said in program.summary()
    assert [text.partition(": ")[2] for text in warned] == [said]
    h = next(op for op in without.stages.program.walk() if op.name == "stablehlo.dot_general")
    state = without.stages.plan.states[h.results[0]]
    assert state is not None
    assert costly.instead == state.full()


def test_a_result_is_named() -> None:
    _, (said,) = lowered(products, out_specs=(None, None))
    assert "result" in said and "argument" not in said


def test_where_the_marked_values_lie_as_they_are_marked_that_is_no_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, _ = lowered(lambda x, v, w: products(x, v, w, ("model", None)))
    plan = program.stages.plan
    without = prices.replanned(
        plan, [v for v in plan.propagated.marks if v not in plan.program.body.args]
    )
    monkeypatch.setattr("spmd.explain.prices.replanned", lambda *_, **__: without)
    x = next(group for group in prices.mark_groups(plan) if group.name == "argument x")
    relief = prices.relief_of(plan, x)
    costly = relief._replace(price=prices.Price(-1.0, 0), seconds=2.0)
    said = 'argument x ("data", None) costs 50.0% of a predicted run: 2 s, without it 1 s'
    assert prices.costly_text(costly, MESH) == said


def test_marks_that_fit_are_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where arithmetic takes nearly all of the time, nothing is planned again, either."""
    asked: list[Any] = []
    monkeypatch.setattr("spmd.explain.prices.relief_of", lambda *args: asked.append(args))
    program, said = lowered(lambda x, v, w: products(x, v, w, ("data", "model")))
    assert not asked
    monkeypatch.undo()
    assert not said
    assert "of a predicted run" not in program.summary()


def test_neither_a_mark_that_keeps_arguments_small_nor_a_tiny_program_is_spoken_of() -> None:
    """Weights that are split to save memory are gathered in every run: that is their price."""
    specs = (("data", None), (("data", "model"), None), (("data", "model"), None))
    program, said = lowered(products, specs=specs)
    assert program.collectives
    assert not said
    few = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    program, found = lowered(lambda x, v, w: products(x, v, w, (None, None)), x=few)
    assert program.cost < prices.LEAST_SECONDS
    assert not found
    assert program.prices.costly_mark is None


def test_what_is_computed_from_marked_values_counts_once_for_each_mark() -> None:
    def fn(x: Any, v: Any, w: Any) -> Any:
        h = jax.lax.cond(x[0, 0] > 0, lambda: x @ v, lambda: jnp.tanh(x @ v))
        return h @ w, jnp.tanh(w)

    plan = lowered(fn)[0].stages.plan
    x, v, w = plan.program.body.args
    groups = [
        prices.MarkGroup("", values, Sharding(((), ())), 0.0) for values in ((x, v), (v,), (w,))
    ]
    ops = list(plan.program.walk())
    *branches, last = [op.results[0] for op in ops if op.name == "stablehlo.dot_general"]
    sines = [op.results[0] for op in ops if op.name == "stablehlo.tanh"]
    seconds = {w: 1.0, **dict.fromkeys(branches, 10.0), last: 100.0}
    assert len(branches) == 2
    assert prices._seconds_behind(plan, groups, seconds) == [120.0, 20.0, 101.0]
    assert prices._seconds_behind(plan, groups, dict.fromkeys(sines, 1.0)) == [1.0, 1.0, 1.0]
