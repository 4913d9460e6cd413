"""`spmd.plan`: searches meshes and choices of a machine that is not here."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.errors import ArgumentError, MeshError, PlanError
from spmd.plan import Spot

MESHES = [{"data": 8 // size, "model": size} for size in (1, 2, 4, 8)]


def build(mesh: Any, batch: int = 512, gated: Any = (False, True), width: int = 8192) -> Any:
    """A layer whose weights are worth splitting, over `model` if not over `data`."""

    def step(w_in: Any, w_out: Any, x: Any) -> Any:
        h = spmd.mark_sharding(x @ w_in, mesh, ("data", "model"))
        return ((jnp.tanh(h) * (h if gated else 1)) @ w_out).sum()

    shapes = (1024, width), (width, 1024), (batch, 1024)
    return spmd.Task(
        jax.grad(step), [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes], tokens=batch
    )


def marked_nowhere(mesh: Any, width: int = 2048) -> Any:
    structs = [jax.ShapeDtypeStruct(s, np.float32) for s in ((4096, 256), (256, width))]
    return (lambda x, w: (jnp.tanh(x @ w) ** 2).mean()), structs


@pytest.fixture(scope="module")
def found() -> spmd.Plans:
    return spmd.plan(build, "v5e:2x4", prices={"v5e": 1.2})


def test_the_best_is_that_of_all_meshes(found: spmd.Plans):
    """The search goes to neighbours; no mesh and choice, tried one by one, is faster."""
    every = [spmd.plan(build, "v5e-8", meshes=MESHES, gated=gated) for gated in (False, True)]
    assert found.is_over and [len(plans.rows) for plans in every] == [4, 4]
    assert found.best.rate == pytest.approx(max(plans.best.rate for plans in every))
    rates = [row.rate for row in found.rows]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) > 2
    assert {tuple(row.axes.values()) for row in found.rows} <= {(8, 1), (4, 2), (2, 4), (1, 8)}


def test_what_a_row_says(found: spmd.Plans):
    best = found.best
    assert best.chosen["gated"] is False and best.verdict == "fits"
    assert best.seconds == best.lowered.cost and best.rate == 512 / best.seconds
    assert sum(best.sent.values()) == sum(c.bytes * c.count for c in best.lowered.collectives)
    assert set(best.spent) <= {"compute", "data", "model", "data, model"}
    assert sum(best.spent.values()) == pytest.approx(best.seconds, rel=0.02)
    assert best.cost == pytest.approx(1.2 * 8 * (1e6 / best.rate) / 3600)
    text = str(found)
    head = text.splitlines()[1].split("  ")
    assert head[0] == "mesh" and "gated" in text and "cost/M" in text and "fits" in text
    assert f"best: {found.label(best)}" in text and "a run is compute" in text


def test_a_larger_batch_is_tried(found: spmd.Plans):
    """Weights are sent as often for twice the tokens."""
    assert found.larger is not None and found.larger.chosen["batch"] == 1024
    assert found.larger.rate > found.best.rate
    assert any(line.startswith("batch=1024: +") for line in found.advice())


def test_several_machines_and_a_page(tmp_path: Path):
    plans = spmd.plan(build, ["h200:2x4", spmd.Topology("v5e:2x4")], gated=False)
    assert {str(row.machine) for row in plans.rows} == {"h200:2x4", "v5e:2x4"}
    assert plans.best.machine.chip.name == "h200" and "gated" not in plans.table()[0]
    plans.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(plans.label(row) in page for row in plans.rows) and "http" not in page


def test_specs_are_found_where_nothing_is_marked():
    plans = spmd.plan(marked_nowhere, "h200:8", meshes=[{"data": 8}, {"data": 4, "model": 2}])
    assert all(any(s.dims for s in row.lowered.stages.plan.arguments) for row in plans.rows)
    code = plans.best.recipe()
    assert code.startswith("mesh = spmd.make_mesh(data=") and "mark_sharding(x, mesh" in code
    with pytest.raises(ArgumentError, match="no settings"):
        plans.best.recipe(".yaml")


def test_what_is_refused_is_said():
    def odd(mesh: Any, parts: Any = (3, 2)) -> Any:
        if mesh.shape["data"] % parts:
            raise ValueError(f"{parts} parts do not divide data={mesh.shape['data']}")
        return marked_nowhere(mesh)

    plans = spmd.plan(odd, "h200:8", meshes=[{"data": 8}])
    assert list(plans.refused.values()) == ["3 parts do not divide data=8"]
    assert plans.best.chosen == {"parts": 2}
    with pytest.raises(PlanError, match="no plan of odd was found") as caught:
        spmd.plan(odd, "h200:8", meshes=[{"data": 8}], parts=3)
    assert "3 parts do not divide" in str(caught.value)


def test_what_does_not_fit_comes_last():
    plans = spmd.plan(marked_nowhere, "v5e:1x1", width=2**24)
    assert plans.best.verdict == "does not fit" and "more devices" in plans.advice()[1]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: spmd.plan(build, "v5e:2x4", batches=3), ArgumentError, "no parameter 'batches'"),
        (lambda: spmd.plan(lambda mesh, n: None, "h200:8"), ArgumentError, "no value for 'n'"),
        (lambda: spmd.plan(build, "h900:8"), MeshError, "unknown chip 'h900'"),
        (lambda: spmd.plan(lambda mesh: 3, "h200:8"), PlanError, "no plan of <lambda> was found"),
    ],
)
def test_wrong_uses(call: Any, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        call()


def test_neighbours_reach_every_mesh():
    seen, todo = set[tuple[int, ...]](), [Spot((("a", 12), ("b", 1), ("c", 1)), ())]
    while todo:
        spot = todo.pop()
        if (sizes := tuple(size for _, size in spot.axes)) not in seen:
            seen.add(sizes)
            todo += spot.neighbours({})
            assert np.prod(sizes) == 12
    assert len(seen) == 18  # 12 as a product of three
