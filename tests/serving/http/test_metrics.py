"""What `/metrics` computes."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from serving.engine.actions import Counts, Step
from serving.engine.records import State
from serving.http.metrics import Metrics
from serving.http.traffic import RequestMetrics
from tests.serving.engine.fake_backend import FakeBackend


def metrics_of(state: State) -> Metrics:
    requests = RequestMetrics("m", lambda: (state.running, state.waiting))
    return Metrics(requests, FakeBackend(), lambda: state)


def test_the_roofline_counts_what_is_read() -> None:
    metrics = metrics_of(State(0, 0, 64, 0, 0, Counts()))
    assert metrics.roofline_fraction() is None
    metrics.ran(step(rows=2, decoding=2, seen=64), 0.004)
    assert metrics.roofline_fraction() == pytest.approx(1.064e6 / 1e9 / 0.004)
    metrics.ran(step(rows=8, decoding=1, seen=100), 0.5)  # a chunk of a prompt
    assert metrics.roofline_fraction() == pytest.approx(1.064e6 / 1e9 / 0.004)
    for _ in range(500):
        metrics.ran(step(rows=2, decoding=2, seen=256), 0.002)
    assert metrics.roofline_fraction() == pytest.approx(1.256e6 / 1e9 / 0.002)


def step(rows: int, decoding: int, seen: int) -> Step:
    return Step((), {}, (), (), (), False, rows, decoding, seen)


def test_pages_are_shown() -> None:
    counts = Counts(prefilled=5, reused=7, repeated=11, preempted=2)
    metrics = metrics_of(State(3, 4, 64, 16, 8, counts))
    text = generate_latest(metrics.requests.registry).decode()
    for name, value in {
        "vllm:kv_cache_usage_perc": 0.25, "spmd:pages": 64, "spmd:pages_held": 16,
        "spmd:pages_cached": 8, "vllm:num_preemptions_total": 2, "spmd:repeated_tokens_total": 11,
        "vllm:prefix_cache_hits_total": 7, "vllm:prompt_tokens_total": 12,
    }.items():  # fmt: skip
        assert f'{name}{{model_name="m"}} {float(value)}\n' in text
    assert 'block_size="4"' in text and 'num_gpu_blocks="64"' in text
