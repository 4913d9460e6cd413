"""Traces: events that ui.perfetto.dev reads, lanes in which nothing overlaps."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.explain import trace
from spmd.explain.trace import MEASURED, PREDICTED, trace_of

NANOSECOND = 1.001e-3
"""Times are whole nanoseconds, written in microseconds."""


@pytest.fixture(scope="module")
def looped(devices8: Any) -> Any:
    """Two loops, one in the other, with collectives inside and outside."""
    mesh = spmd.make_mesh(data=4, model=2)

    def inner(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T, None

    def layer(x: Any, w: Any) -> Any:
        return jax.lax.scan(inner, x, jnp.stack([w] * 3))[0], None

    def fn(x: Any, ws: Any) -> Any:
        return jax.lax.scan(layer, x, ws)[0].sum()

    specs = (("data", None), (None, None, "model"))
    jitted = spmd.jit(jax.grad(fn, argnums=1), mesh=mesh, in_specs=specs)
    return jitted.compile(jnp.ones((64, 32)), jnp.ones((4, 32, 64)))


def slices(written: Any, pid: int) -> list[dict[str, Any]]:
    return [e for e in written["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]


def check(written: Any, pids: set[int]) -> None:
    events = written["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in events if e["name"] == "process_name"} == pids
    for event in events:
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in names
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"]
    key = lambda e: (e["pid"], e["tid"])  # noqa: E731
    rows = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (*key(e), e["ts"]))
    for _, row in itertools.groupby(rows, key):
        for one, two in itertools.pairwise(row):
            assert one["ts"] + one["dur"] <= two["ts"] + NANOSECOND


def test_the_predicted_run(looped: Any, tmp_path: Path) -> None:
    looped.save_trace(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    check(written, {PREDICTED})
    # Every iteration of every loop is there, and takes the time that was predicted.
    made = [e for e in slices(written, PREDICTED) if "kind" in e["args"]]
    timeline = looped.timeline
    assert len(made) == sum(s.trips for s in timeline.slots if not s.op.regions)
    seconds = sum(e["dur"] for e in made) * 1e-6
    assert seconds == pytest.approx(timeline.compute_seconds + timeline.comm_seconds, rel=1e-3)
    ends = max(e["ts"] + e["dur"] for e in made) * 1e-6
    assert ends == pytest.approx(timeline.scheduled_seconds, rel=1e-3)


def test_long_loops_show_their_first_iteration(looped: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(trace, "MOST_SLOTS", 5)
    written = trace_of(looped._report())
    check(written, {PREDICTED})
    made = [e for e in slices(written, PREDICTED) if "kind" in e["args"]]
    assert len(made) == sum(not s.op.regions for s in looped.timeline.slots)
    ends = max(e["ts"] + e["dur"] for e in made) * 1e-6
    assert ends == pytest.approx(looped.timeline.scheduled_seconds, rel=1e-3)


@pytest.mark.thorough
def test_the_measured_step_is_a_process_of_its_own(looped: Any) -> None:
    measured = looped.measure(np.ones((64, 32), np.float32), np.ones((4, 32, 64), np.float32))
    written = trace_of(looped._report(), measured.step)
    check(written, {PREDICTED, MEASURED})
    assert len(slices(written, MEASURED)) == len(measured.step)
