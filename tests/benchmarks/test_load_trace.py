"""benchmarks/load_trace.py: a device's time that is not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.load_trace import GAP_SECONDS, Busy, busy, main, together
from spmd.measure.profile import STEP


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], Busy(0, 1, 4)),
        ([(0, 4)], Busy(1, 0, 0)),
        ([(0, 1), (0.5, 2), (3, 4)], Busy(0.75, 1, 1)),
        ([(3, 9), (1, 2), (1.2, 1.4)], Busy(0.5, 2, 1)),  # in any order, and past the end
        ([(0, 2), (2 + GAP_SECONDS / 2, 4)], Busy(1 - GAP_SECONDS / 8, 0, 0)),
    ],
)
def test_one_device(spans: list[tuple[float, float]], expected: Busy) -> None:
    assert busy(spans, 4.0) == pytest.approx(expected)


def test_devices_together() -> None:
    assert together([Busy(0.5, 2, 0.1), Busy(1.0, 0, 0.0)]) == Busy(0.75, 2, 0.1)


def test_a_trace_of_one_of_two_devices(tmp_path: Path, capsys: Any) -> None:
    square = jax.jit(lambda x: x @ x)
    x = jnp.ones((1000, 1000))
    square(x).block_until_ready()
    with jax.profiler.trace(tmp_path), jax.profiler.TraceAnnotation(STEP):
        square(x).block_until_ready()
    main(str(tmp_path), "2")
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["share"] < 0.5 and found["gaps"] > 0 and found["longest"] > GAP_SECONDS
