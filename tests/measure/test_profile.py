"""Profiles: which events are of which step, device and moment; what a measured program is fed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd
from spmd.measure.profile import STEP, Event, Feed, read_steps, shares
from tests.measure.profiles import Made, profile

STEPS = [Made(STEP, 0, 100), Made(STEP, 200, 320)]


def on(device: int, op: str, **more: Any) -> dict[str, Any]:
    return {"hlo_op": op, "hlo_module": "jit_run", "device_ordinal": device, **more}


def spans(events: tuple[Event, ...]) -> list[tuple[Any, ...]]:
    return [(e.device, e.name, e.op, round(e.start * 1e6), round(e.end * 1e6)) for e in events]


def test_threads_of_a_cpu():
    one = [
        Made("dot", 10, 20, on(0, "dot", _p=7)),  # handed to other threads, which end it
        Made("add", 30, 40, on(0, "add", _p=8)),
        Made("ThunkExecutor::Execute", 0, 90, {"device_ordinal": 0}),
    ]
    two = [
        Made("exp", 12, 14, on(0, "exp")),  # of another task
        Made("ThreadpoolListener::StartRegion", 15, 15),
        Made("all_reduce", 25, 28, on(0, "all_reduce")),  # waited for the product, in its last task
        Made("end: dot", 29, 30, {"_c": 7}),
        Made("ThreadpoolListener::StartRegion", 44, 44),
        Made("end: add", 45, 46, {"_c": 8}),
        Made("dot", 210, 220, on(3, "dot")),
        Made("dot", 150, 160, on(3, "dot")),  # between the steps
    ]
    found = read_steps(profile({"/host:CPU": {"python": STEPS, "one": one, "two": two}}))
    assert [step.seconds for step in found] == pytest.approx([100e-6, 120e-6])
    assert spans(found[0].events) == [
        (0, "dot", "dot", 10, 25),
        (0, "exp", "exp", 12, 14),
        (0, "all_reduce", "all_reduce", 25, 28),
        (0, "add", "add", 30, 45),
    ]
    assert spans(found[1].events) == [(3, "dot", "dot", 10, 20)]


def test_streams_of_gpus():
    planes = {
        "/host:CPU": {
            "python": STEPS,
            "launch": [Made("fusion", 1, 2, on(0, "fusion"))],  # the host's part is no kernel
        },
        "/device:GPU:0": {
            "Stream #14(Compute)": [
                Made("nvjet_hsh_128x256", 205, 215, {"hlo_op": "gemm.1"}),
                Made("loop_add_fusion_2", 10, 12),  # in a CUDA graph
            ],
            "XLA Ops": [Made("gemm.1", 205, 215)],  # derived from the streams
        },
        "/device:GPU:1": {"Stream #15(Memcpy)": [Made("MemcpyD2D", 5, 9, {"hlo_op": "copy.3"})]},
    }
    found = read_steps(profile(planes))
    assert spans(found[0].events) == [
        (1, "MemcpyD2D", "copy.3", 5, 9),
        (0, "loop_add_fusion_2", "", 10, 12),
    ]
    assert spans(found[1].events) == [(0, "nvjet_hsh_128x256", "gemm.1", 5, 15)]


SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 6)).map(
        lambda s: (s[0], float(s[1]), float(s[1] + s[2]))
    ),
    max_size=8,
)


def test_what_comes_first_hides_what_runs_beside_it_and_equals_share():
    dot, gather, copy = (0, 0.0, 4.0), (2, 3.0, 7.0), (1, 6.0, 8.0)
    assert shares([dot, gather, copy]) == [(4, 0), (2, 2), (2, 0)]
    assert shares([(0, 0.0, 2.0), (0, 0.0, 4.0)]) == [(1, 0), (3, 0)]


@given(SPANS)
def test_moments_are_counted_once(spans):
    found = shares(spans)
    covered = [t for t in range(30) if any(a <= t < b for _, a, b in spans)]
    assert sum(seconds for seconds, _ in found) == pytest.approx(len(covered))
    for rank in range(3):
        own = [t for t in covered if any(r == rank and a <= t < b for r, a, b in spans)]
        ours = [share for (r, _, _), share in zip(spans, found, strict=True) if r == rank]
        total = sum(seconds + hidden for seconds, hidden in ours)
        assert total == pytest.approx(len(own))
    first = min((r for r, a, b in spans if b > a), default=0)
    assert not any(
        hidden for (r, _, _), (_, hidden) in zip(spans, found, strict=True) if r == first
    )


pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")


@pytest.fixture
def mesh(devices8: Any) -> Any:
    return spmd.make_mesh(data=8)


def feed_of(fn: Any, mesh: Any, *args: Any, **kwargs: Any) -> tuple[Feed, list[Any]]:
    compiled = spmd.jit(fn, mesh=mesh, donate_argnums=(0, 1), **kwargs).compile(*args)
    given = [jax.device_put(a, s) for a, s in zip(args, compiled.in_shardings, strict=True)]
    return Feed(compiled.executable, given, compiled.donated, compiled.request.links), given


def test_updates_go_on_and_what_was_given_stays(mesh: Any) -> None:
    # Of the two donated arguments one has an update: the other is copied for each step.
    feed, given = feed_of(
        lambda x, y, z: (x + y.sum() + z, y.sum()), mesh, *map(jnp.ones, (8, 4, 8))
    )
    seen = []
    for _ in range(3):
        arguments = feed.prepare()
        seen.append([float(a[0]) for a in arguments])
        feed.run(arguments)
    assert seen == [[1, 1, 1], [6, 1, 1], [11, 1, 1]]
    for argument, size in zip(given, (8, 4, 8), strict=True):
        np.testing.assert_array_equal(argument, np.ones(size))


def test_an_update_that_lies_elsewhere_is_not_given_back(mesh: Any) -> None:
    specs = {"in_specs": ("data", None), "out_specs": ((None,), (None,))}
    feed, given = feed_of(lambda x, y: (x + 1, y * 2), mesh, jnp.ones(8), jnp.ones(8), **specs)
    for _ in range(2):
        arguments = feed.prepare()
        assert float(arguments[0][0]) == 1
        assert arguments[0].sharding == given[0].sharding
        feed.run(arguments)
