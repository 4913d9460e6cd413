"""What `/metrics` computes."""

from __future__ import annotations

import pytest

from serving.engine.actions import Counts
from serving.engine.records import State
from serving.http.metrics import Metrics
from tests.serving.engine.fake_backend import LIMITS, FakeBackend


def test_the_roofline_counts_what_is_read() -> None:
    metrics = Metrics("m", FakeBackend(), lambda: State(0, 0, 0.0, Counts()))
    room = LIMITS.slots * LIMITS.max_length
    assert metrics.roofline_fraction() is None
    metrics.ran(2, 0.008, steps=2, held=room // 4)
    assert metrics.roofline_fraction() == pytest.approx(1.064e6 / 1e9 / 0.004)
    metrics.ran(8, 0.5, steps=0, held=0)  # a chunk of a prompt
    assert metrics.roofline_fraction() == pytest.approx(1.064e6 / 1e9 / 0.004)
    for _ in range(500):
        metrics.ran(2, 0.002, steps=1, held=room)
    assert metrics.roofline_fraction() == pytest.approx(1.256e6 / 1e9 / 0.002)
