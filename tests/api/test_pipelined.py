"""Pipelines over stages: values and gradients are those of a scan over layers, on any mesh."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.explain.steps import pipeline_rows
from spmd.ir.pipelines import SCHEDULES, Pipeline, pipeline_of, pipelines_in

pytestmark = pytest.mark.exact_plans

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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(s, marks=pytest.mark.heavy if s in ("gpipe", "1f1b", "interleaved") else ())
        for s in (None, *SCHEDULES)
    ],
)
def test_under_plain_jax(schedule: str | None, wanted: Any) -> None:
    def forward(params: Any, x: Any) -> Any:
        return spmd.pipeline(layer, params, x, stages=2, microbatches=4, schedule=schedule)

    assert_same(jax.jit(of_loss(jax.checkpoint(forward)))(PARAMS, X), wanted)
    mapped = jax.vmap(forward, in_axes=(None, 0))(PARAMS, X.reshape(2, B // 2, H))
    np.testing.assert_allclose(mapped.reshape(B, H), scanned(PARAMS, X), rtol=1e-4, atol=1e-6)


class Case:
    """A pipeline's loss and gradients on a mesh, compiled once."""

    def __init__(
        self,
        schedule: str,
        microbatches: int,
        is_chunked: bool = False,
        planner: Literal["exact", "greedy"] = "exact",
        **axes: int,
    ):
        mesh, model = spmd.make_mesh(**axes), "model" if "model" in axes else None
        lead = (None, "stage") if is_chunked else ("stage",)
        params = in_chunks(PARAMS) if is_chunked else PARAMS
        rules = {"up": (*lead, None, model), "down": (*lead, model, None)}
        given = spmd.mark_tree(params, mesh, rules), spmd.mark_sharding(X, mesh, ("data", None))

        def forward(params: Any, x: Any) -> Any:
            how: dict[str, Any] = {"stages": axes["stage"], "chunks": 2 if is_chunked else None}
            return spmd.pipeline(
                layer, params, x, **how, microbatches=microbatches, schedule=schedule
            )

        out = (None, (jax.tree.map(lambda leaf: leaf.sharding, given[0]), None))
        options = spmd.Options(planner=planner)
        jitted = spmd.jit(of_loss(forward), mesh=mesh, out_specs=out, options=options)
        self.compiled = jitted.compile(*given)
        self.found = self.compiled(*given)
        if is_chunked:
            loss, (grads, of_x) = self.found
            self.found = loss, (jax.tree.map(lambda g: g.reshape(L, *g.shape[2:]), grads), of_x)

    @property
    def permutes(self) -> list[tuple[tuple[int, int], ...]]:
        ops = self.compiled.stages.optimized.program.walk()
        return [op.kind.attrs["pairs"] for op in ops if op.collective == "collective_permute"]


@pytest.fixture(scope="module")
def gpipe() -> Case:
    return Case("gpipe", 8, stage=4, data=2)


@pytest.fixture(scope="module")
def interleaved() -> Case:
    return Case("interleaved", 4, is_chunked=True, stage=4, data=2)


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_values_and_gradients(name: str, request: Any, wanted: Any) -> None:
    assert_same(request.getfixturevalue(name).found, wanted)


@pytest.mark.thorough
def test_1f1b_beside_a_model_axis(wanted: Any) -> None:
    assert_same(Case("1f1b", 4, planner="greedy", stage=2, data=2, model=2).found, wanted)


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_stages_send_to_their_neighbours_alone(name: str, request: Any) -> None:
    case = request.getfixturevalue(name)
    # A device's number is 2 * stage + data: neighbours are 2 apart, and a ring goes on at 0.
    right = {(i, i + 2) for i in range(6)} | ({(6, 0), (7, 1)} if name == "interleaved" else set())
    left = {(b, a) for a, b in right}
    assert {frozenset(pairs) for pairs in case.permutes} == {frozenset(right), frozenset(left)}
    over_stage = [c for c in case.compiled.collectives if "stage" in c.axes]
    kinds = {"collective_permute", "all_gather", "all_reduce", "reduce_scatter"}
    assert {c.kind for c in over_stage} <= kinds
    # No weight goes over stages; x and y do, once.
    assert all(c.count == 1 for c in over_stage if c.kind != "collective_permute")
    assert all(c.bytes <= 2 * X.nbytes for c in over_stage)


@pytest.mark.parametrize(
    ("name", "steps", "bubble"), [("gpipe", 8 + 3, "27.3%"), ("interleaved", 2 * 4 + 3, "27.3%")]
)
def test_the_report_has_the_bubble(name: str, steps: int, bubble: str, request: Any) -> None:
    compiled = request.getfixturevalue(name).compiled
    (row,) = pipeline_rows(compiled.stages)
    assert row.of.steps == steps
    loops = [s for s in compiled.timeline.slots if s.op.is_loop and s.depth == 0]
    assert row.seconds == pytest.approx(sum(slot.seconds for slot in loops))
    assert row.travel is not None and row.travel.runs == 2 * steps
    text = compiled.explain(prices=False).partition("\npipelines\n")[2]
    assert f"schedule {name}, at" in text
    assert f"bubble              {bubble} of" in text
    assert f"{bubble} of" in compiled.summary()


def test_reasons_name_the_pipeline(gpipe: Case) -> None:
    reasons = {c.reason for c in gpipe.compiled.collectives if c.kind == "collective_permute"}
    assert reasons == {"stages send what they made to the next ones"}
    assert not any("pipeline[" in c.layer for c in gpipe.compiled.collectives)


def test_rows_and_trees_go_along() -> None:
    """A state of several leaves, what each row has, what each layer has beside weights."""
    ids = np.arange(B, dtype=np.int32) % 3
    stacked = {"w": PARAMS["up"][..., :H], "number": np.arange(L, dtype=np.float32)}

    def one(w: Any, x: Any, ids: Any) -> Any:
        hidden = jnp.tanh(x["h"] @ w["w"]) * ids[:, None]
        return {"h": x["h"] + hidden, "sum": x["sum"] + w["number"] * hidden.sum(-1)}

    x = {"h": X, "sum": X[:, 0]}

    def loss(forward: Callable[..., Any]) -> Callable[..., Any]:
        def of(stacked: Any, x: Any, ids: Any) -> Any:
            y = forward(stacked, x, ids)
            return jnp.mean(y["h"] ** 2) + jnp.mean(y["sum"])

        return jax.value_and_grad(of)

    def piped(stacked: Any, x: Any, ids: Any) -> Any:
        return spmd.pipeline(one, stacked, x, ids, stages=4, microbatches=4, schedule="interleaved")

    def plain(stacked: Any, x: Any, ids: Any) -> Any:
        return scanned(stacked, x, lambda w, x: one(w, x, ids))

    mesh = spmd.make_mesh(stage=4, data=2)
    jitted = spmd.jit(loss(piped), mesh=mesh, options=spmd.Options(planner="greedy"))
    assert_same(jitted(stacked, x, ids), jax.jit(loss(plain))(stacked, x, ids))


def planned(
    schedule: str | None, rows: int, width: int, parts: int, topology: str, **options: Any
) -> spmd.Lowered:
    """A gradient of many rows, planned for four devices that are not here."""
    mesh = spmd.Mesh(None, (4,), ("stage",))
    w, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((L, width, width), (rows, width)))

    def loss(w: Any, x: Any) -> Any:
        y = spmd.pipeline(
            lambda w, x: jnp.tanh(x @ w), w, x, stages=4, microbatches=parts, schedule=schedule
        )
        return jnp.mean(y.astype(jnp.float32) ** 2)

    specs = (("stage", None, None), (None, None))
    chosen = spmd.Options(unroll=0, recompute=False, **options)
    jitted = spmd.jit(jax.grad(loss), mesh=mesh, in_specs=specs, options=chosen)
    return jitted.lower(w, x, topology=spmd.Topology(topology))


def test_interleaved_is_taken_where_layers_compute_long() -> None:
    lowered = planned(None, 1 << 16, 4096, 4, "v5p:2x2x1")
    (form,) = [form for form in lowered.stages.plan.forms if form.name == "pipelines interleaved"]
    (row,) = pipeline_rows(lowered.stages)
    assert row.of.schedule == "interleaved" and not form.refusal
    assert form.seconds == lowered.cost < form.before


@pytest.mark.thorough
def test_the_schedule_is_that_of_the_fastest_program_that_fits() -> None:
    given = 32 * 1024, 256, 32, "v5e:2x2"
    free = planned("gpipe", *given)
    short = planned(None, *given, memory_limit=64 << 20)
    (lean,) = pipeline_rows(short.stages)
    assert lean.of.schedule == "1f1b"
    assert short.predicted_memory.peak <= 64 << 20 < free.predicted_memory.peak
    forms = {form.name.removeprefix("pipelines "): form for form in short.stages.plan.forms}
    assert "keeps to 64 MiB" in forms["interleaved"].refusal
    assert forms["1f1b"].seconds == short.cost
    assert forms["interleaved 1f1b"].refusal == "another one is faster"


@pytest.mark.parametrize(("is_pipeline", "traces"), [(False, 1), (True, 4)])
def test_what_fits_in_no_way_is_tried_once_a_schedule(is_pipeline: bool, traces: int) -> None:
    mesh, runs = spmd.make_mesh(stage=4, data=2), []

    def forward(params: Any, x: Any) -> Any:
        runs.append(1)
        if is_pipeline:
            return spmd.pipeline(layer, params, x, stages=4, microbatches=4)
        return scanned(params, x)

    jitted = spmd.jit(forward, mesh=mesh, options=spmd.Options(memory_limit=1 << 10))
    layers = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 2), PARAMS)
    with pytest.raises(spmd.PlanError):
        jitted.lower(layers, X)
    assert len(runs) == traces


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 12}, "8 layers are not split evenly over 12 stages"),
        ({"microbatches": 5}, "a batch of 32 rows is not 5 microbatches"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"schedule": "zero bubble"}, "schedule='zero bubble' is none"),
        ({"schedule": "1f1b", "microbatches": 2}, "2 microbatches are not groups of 4 stages"),
        (
            {"schedule": "gpipe", "chunks": 2, "stacked": in_chunks(PARAMS)},
            "chunks=2 with schedule='gpipe'",
        ),
        ({"chunks": 2}, "chunks=2, but the stack has 8 in dim 0"),
        ({"schedule": "interleaved", "stages": 8}, "8 layers are not split evenly over 8 stages"),
        ({"axis": "stages"}, "the mesh has no axis 'stages'"),
        ({"stages": 2}, "2 stages are not split evenly over stage=4"),
        ({"rows": np.zeros(3)}, "the leaves of x and rows have no size of dim 0 in common"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"stages": 4, "microbatches": 4, "stacked": PARAMS, **changes}
    mesh = spmd.make_mesh(stage=4, data=2)
    with pytest.raises(spmd.SpmdError) as error:
        spmd.jit(lambda x: spmd.pipeline(layer, x=x, **given), mesh=mesh).lower(X)
    assert error.value.what.startswith("pipeline: ") and message in error.value.what
    assert "test_pipelined.py" in str(error.value.source)


@pytest.mark.parametrize("of", [Pipeline("stage", 4, 8), Pipeline("s", 2, 6, 2, True, 12)])
def test_scopes_read_back(of: Pipeline) -> None:
    assert pipeline_of(f"jit(f)/transpose(jvp({of.scope}))/while/body") == of
    assert pipeline_of("jit(f)/while") is None
    outer = of._replace(stages=3)
    assert pipelines_in(f"{outer.scope}/while/{of.scope} {outer.scope}") == (outer, of)
