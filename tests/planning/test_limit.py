"""Memory limits: plans keep to them, or an error names the least that was found."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd
from benchmarks.programs.catalog import programs
from spmd.compiler import plan_problem
from spmd.lowering.recompute import AGAIN
from spmd.planning.exact import least_held
from spmd.planning.search import Search

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))
LAYERS, ROWS, WIDTH, HIDDEN = 6, 256, 64, 256


def layer(x: Any, w: Any) -> Any:
    return x + jax.nn.gelu(x @ w["in"] / 8) @ w["out"] / 16


def loss(ws: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)


def types() -> tuple[Any, Any]:
    marked = {
        "in": ((LAYERS, WIDTH, HIDDEN), (None, "data", "model")),
        "out": ((LAYERS, HIDDEN, WIDTH), (None, "model", "data")),
    }
    ws = {
        name: spmd.mark_sharding(jax.ShapeDtypeStruct(shape, jnp.float32), MESH, spec)
        for name, (shape, spec) in marked.items()
    }
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return ws, spmd.mark_sharding(x, MESH, ("data", None))


@cache
def lowered(limit: int | None = None, topology: str = "", **options: Any) -> spmd.Lowered:
    chosen = spmd.Options(memory_limit=limit, unroll=0, **options)
    machine = spmd.Topology(topology) if topology else None
    jitted = spmd.jit(jax.value_and_grad(loss), mesh=MESH, options=chosen)
    return jitted.lower(*types(), topology=machine)


@pytest.mark.parametrize("topology", ["", pytest.param("h200:8", marks=pytest.mark.heavy)])
def test_every_limit_is_kept_to_or_the_least_memory_is_named(topology: str) -> None:
    plain = lowered(topology=topology, recompute=False).predicted_memory.peak
    least, kept = [], []
    for share in (0.8, 0.7, 0.5, 0.05):
        limit = int(share * plain)
        try:
            found = lowered(limit, topology)
        except spmd.PlanError as error:
            assert error.least_bytes > limit
            least.append(error.least_bytes)
        else:
            assert found.predicted_memory.peak <= limit
            assert not least, "a lower limit was kept to than one that was not"
            kept.append(found.predicted_memory.peak)
    assert len(kept) > 2
    assert least
    assert min(kept) < 0.6 * plain


@pytest.mark.thorough
def test_recomputation_can_be_turned_off() -> None:
    plain = lowered(recompute=False)
    assert not plain.stages.plan.recomputed
    with pytest.raises(spmd.PlanError, match=r"allow spmd\.Options\(recompute=True\)"):
        lowered(int(0.5 * plain.predicted_memory.peak), recompute=False)


def test_what_takes_longer_to_write_and_read_is_made_again_without_a_limit() -> None:
    free, plain = lowered(), lowered(recompute=False)
    assert free.stages.plan.recomputed
    assert free.cost < plain.cost
    assert free.predicted_memory.peak < plain.predicted_memory.peak
    sent = [sum(c.bytes * c.count for c in found.collectives) for found in (free, plain)]
    assert sent[0] == sent[1]


def test_reports_say_what_is_made_again() -> None:
    tight = lowered(int(0.5 * lowered(recompute=False).predicted_memory.peak))
    text = tight.explain(prices=False)
    assert "made again rather than held" in text
    assert "makes values of" in text  # the note, with the limit
    assert AGAIN in "".join(op.loc.note for op in tight.stages.optimized.program.walk())


@pytest.mark.parametrize("limit", [8 << 20, pytest.param(4 << 20, marks=pytest.mark.heavy)])
def test_prices_of_copies_of_one_result_do_not_reach_others(limit: int) -> None:
    """Loops have several results of several ranks, of which a plan may copy one."""
    mesh, built = programs("^remat/mlp-default@4x2$")[0].make()
    jitted = spmd.jit(built.fn, mesh=mesh, options=spmd.Options(memory_limit=limit))
    try:
        assert jitted.lower(*built.args).predicted_memory.peak <= limit
    except spmd.PlanError as error:
        assert error.least_bytes > limit


def test_a_limit_that_nothing_can_keep_to_is_refused_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = lowered(recompute=False)
    held = plain.predicted_memory
    needed = sum(least_held(plain.stages.plan.problem).values())
    assert 0.9 * (held.arguments + held.results - held.aliased) <= needed <= held.peak

    def never(*_: object) -> None:
        raise AssertionError("it is planned")

    monkeypatch.setattr("spmd.planning.exact.weighed", never)
    with pytest.raises(
        spmd.PlanError, match=r"however it is split: .* arguments, .* results"
    ) as refused:
        lowered(needed - 1)
    assert refused.value.least_bytes == needed
    with pytest.raises(AssertionError, match="it is planned"):
        lowered(needed)


def test_results_that_are_returned_whole_count() -> None:
    """A piece of `x` and one of `exp(x)` take 2 MiB; the whole result takes 4 on its own."""
    step = spmd.jit(jnp.exp, mesh=MESH, in_specs=(("data", None),), out_specs=(None, None))
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    trial = plan_problem(step.lower(x).stages.plan.problem, spmd.Options())
    assert not Search(3 << 20, [trial]).fits(trial)
    assert Search(trial.bytes, [trial]).fits(trial)
