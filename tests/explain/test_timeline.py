"""The timeline adds up to the plan's cost, and memory over time to what is alive."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.explain.liveness import ARGUMENTS, KINDS, liveness_of
from spmd.explain.timeline import COMPUTE, merged, timeline_of
from tests.programs import llama

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))


def lowered(fn: Any, *shapes: Any, specs: Any = None) -> spmd.Lowered:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return spmd.jit(fn, mesh=MESH, in_specs=specs).lower(*structs, topology=spmd.Topology("h200:8"))


@pytest.fixture(scope="module", params=[True, False], ids=["scan", "unrolled"])
def training(request: Any) -> Any:
    mesh = spmd.make_mesh(data=4, model=2)
    return llama(mesh, "adamw", request.param).lower(topology=spmd.Topology("h200:8"))


def test_the_timeline_is_as_long_as_the_plan_says(training: Any) -> None:
    plan = training.stages.plan
    timeline = timeline_of(plan)
    assert timeline.seconds == pytest.approx(plan.seconds, rel=1e-6)
    assert sum(s.seconds for s in timeline.flat()) == pytest.approx(plan.seconds, rel=1e-6)
    segments = sorted(timeline.flat(), key=lambda s: s.start)
    for before, after in itertools.pairwise(segments):
        assert before.end <= after.start + 1e-9


def test_merging_keeps_the_time(training: Any) -> None:
    timeline = timeline_of(training.stages.plan)
    segments = list(timeline.flat())
    fewer = merged(segments, timeline.seconds / 50)
    assert len(fewer) < len(segments)
    assert sum(s.ops for s in fewer) == len(segments)
    for lane in (COMPUTE, "data", "model"):
        whole = timeline.lane_seconds(lane)
        assert sum(s.seconds for s in fewer if lane in s.lanes) == pytest.approx(whole, rel=0.2)


def test_a_loop_is_one_iteration_so_many_times() -> None:
    def looped(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]

    specs = (("data", None), (None, "model"))
    plan = lowered(looped, (64, 64), (64, 64), specs=specs).stages.plan
    timeline = timeline_of(plan)
    (loop,) = timeline.loops
    assert loop.trips == 5
    assert loop.seconds == pytest.approx(5 * loop.body.seconds)
    assert "test_timeline.py" in loop.label
    assert timeline.seconds == pytest.approx(plan.seconds, rel=1e-6)


def test_memory_over_a_chain_of_ops() -> None:
    """Of a chain, an op's operand and result are alive; the last one is the program's result."""

    def chain(x: Any) -> Any:
        return jnp.tanh(jnp.sin(jnp.exp(x)))

    program = lowered(chain, (1024, 1024), specs=(("data", None),)).stages.optimized.program
    size = 1024 * 1024 * 4 // 4
    alive = liveness_of(program, {})
    assert alive.steps == (
        (size, 0, 0, size),
        (size, 0, 0, 2 * size),
        (size, size, 0, size),
    )
    assert alive.peak_bytes == 3 * size
    assert alive.at_peak[0].bytes == size
    donated = liveness_of(program, {0: 0})
    assert donated.steps[-1] == (size, 0, 0, size)


def test_memory_of_a_training_step(training: Any) -> None:
    stages = training.stages
    alive = liveness_of(stages.optimized.program, dict(stages.plan.links))
    program = stages.optimized.program
    arguments = sum(program.types[v].bytes for v in program.body.args)
    assert {step[0] for step in alive.steps} == {arguments}
    assert alive.peak_bytes == max(map(sum, alive.steps)) > arguments
    assert max(step[KINDS.index("saved for the gradient")] for step in alive.steps) > 0
    held = sum(row.bytes for row in alive.at_peak if row.kind == ARGUMENTS)
    assert held == arguments
    shown = sum(row.bytes for row in alive.at_peak)
    assert shown <= alive.peak_bytes
