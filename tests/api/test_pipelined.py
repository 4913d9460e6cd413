"""Pipelines over stages: values and gradients are those of a scan over layers, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.explain.pipelines import pipeline_rows
from spmd.ir.pipelines import SCHEDULES, Pipeline, pipeline_of

L, B, H = 8, 32, 16


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


PARAMS = {"up": normal(0, L, H, 2 * H) / 8, "down": normal(1, L, 2 * H, H) / 8}
X = normal(2, B, H)


def layer(w: Any, x: Any) -> Any:
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # not defined at zeros
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def scanned(params: Any, x: Any, layer: Callable[..., Any] = layer) -> Any:
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)[0]


def of_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda params, x: jnp.mean(jnp.sin(forward(params, x))), (0, 1))


def assert_same(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)


@pytest.fixture(scope="module")
def wanted() -> Any:
    return jax.jit(of_loss(scanned))(PARAMS, X)


def in_chunks(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(2, L // 2, *leaf.shape[1:]), params)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_under_plain_jax(schedule: str | None, wanted: Any) -> None:
    def forward(params: Any, x: Any) -> Any:
        return spmd.pipeline(layer, params, x, stages=2, microbatches=4, schedule=schedule)

    assert_same(jax.jit(of_loss(jax.checkpoint(forward)))(PARAMS, X), wanted)
    mapped = jax.vmap(forward, in_axes=(None, 0))(PARAMS, X.reshape(2, B // 2, H))
    np.testing.assert_allclose(mapped.reshape(B, H), scanned(PARAMS, X), rtol=1e-4, atol=1e-6)


class Case:
    """A pipeline's loss and gradients on a mesh, compiled once."""

    def __init__(self, schedule: str, microbatches: int, is_chunked: bool = False, **axes: int):
        mesh, model = spmd.make_mesh(**axes), "model" if "model" in axes else None
        lead = (None, "stage") if is_chunked else ("stage",)
        params = in_chunks(PARAMS) if is_chunked else PARAMS
        rules = {"up": (*lead, None, model), "down": (*lead, model, None)}
        given = (
            spmd.mark_tree(params, mesh, rules),
            spmd.mark_sharding(X, mesh, ("data", None)),
        )
        self.loss = of_loss(
            lambda params, x: spmd.pipeline(
                layer,
                params,
                x,
                stages=axes["stage"],
                microbatches=microbatches,
                schedule=schedule,
                chunks=2 if is_chunked else None,
            )
        )
        out = (None, (in_specs(given[0]), None))
        self.compiled = spmd.jit(self.loss, mesh=mesh, out_specs=out).compile(*given)
        self.found = self.compiled(*given)
        if is_chunked:
            loss, (grads, of_x) = self.found
            self.found = loss, (jax.tree.map(lambda g: g.reshape(L, *g.shape[2:]), grads), of_x)

    @property
    def permutes(self) -> list[tuple[tuple[int, int], ...]]:
        program = self.compiled.stages.optimized.program
        return [
            op.kind.attrs["pairs"] for op in program.walk() if op.collective == "collective_permute"
        ]


def in_specs(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, params)


@pytest.fixture(scope="module")
def gpipe() -> Case:
    return Case("gpipe", 8, stage=4, data=2)


@pytest.fixture(scope="module")
def interleaved() -> Case:
    return Case("interleaved", 4, is_chunked=True, stage=4, data=2)


def test_gpipe(gpipe: Case, wanted: Any) -> None:
    assert_same(gpipe.found, wanted)


def test_interleaved(interleaved: Case, wanted: Any) -> None:
    assert_same(interleaved.found, wanted)


def test_1f1b_beside_a_model_axis(wanted: Any) -> None:
    assert_same(Case("1f1b", 4, stage=2, data=2, model=2).found, wanted)


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_stages_send_to_their_neighbours_alone(name: str, request: Any) -> None:
    case = request.getfixturevalue(name)
    # A device's number is 2 * stage + data: neighbours are 2 apart, and a ring goes on at 0.
    right = {(i, i + 2) for i in range(6)} | ({(6, 0), (7, 1)} if name == "interleaved" else set())
    left = {(b, a) for a, b in right}
    assert {frozenset(pairs) for pairs in case.permutes} == {frozenset(right), frozenset(left)}
    over_stage = [c for c in case.compiled.collectives if "stage" in c.axes]
    assert {c.kind for c in over_stage} <= {"collective_permute", "all_reduce", "reduce_scatter"}
    # No weight goes over stages; x and y do, once.
    assert all(c.count == 1 for c in over_stage if c.kind != "collective_permute")
    assert all(c.bytes <= 2 * X.nbytes for c in over_stage)


@pytest.mark.parametrize(
    ("name", "steps", "bubble"),
    [("gpipe", 8 + 3, "27.3%"), ("interleaved", 2 * 4 + 3, "27.3%")],
)
def test_the_report_has_the_bubble(name: str, steps: int, bubble: str, request: Any) -> None:
    compiled = request.getfixturevalue(name).compiled
    (row,) = pipeline_rows(compiled.stages)
    assert (row.steps, row.of.steps) == (steps, steps)
    loops = [s for s in compiled.timeline.slots if s.op.is_loop and s.depth == 0]
    assert row.seconds == pytest.approx(sum(slot.seconds for slot in loops))
    assert row.sends == 2 * steps
    text = compiled.explain().partition("\npipelines\n")[2]
    assert f"schedule {name}, at" in text
    assert f"bubble                 {bubble} of" in text
    assert f"{bubble} of" in compiled.summary()
