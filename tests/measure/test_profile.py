"""The reader of profiles: which events are of which step, of which device, and how long."""

from typing import Any

import pytest

from spmd.measure.profile import STEP, Event, read_steps
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
