"""The drawn timeline takes the predicted time, and memory over time adds up to the prediction."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spmd.explain.memory import ARGUMENTS, KINDS, RESULTS, memory_curve
from spmd.explain.page.pictures import bars_of, merged, timeline_svg
from spmd.predict.timeline import COMPUTE
from tests.explain.programs import lowered


def test_the_bars_take_the_scheduled_time_and_lanes_do_one_thing_at_a_time(training: Any) -> None:
    bars, timeline = bars_of(training._report().timeline), training.timeline
    assert timeline.scheduled_seconds <= timeline.seconds
    assert max(bar.end for bar in bars) == pytest.approx(timeline.scheduled_seconds, rel=1e-6)
    compute = sum(bar.seconds for bar in bars if bar.kind == COMPUTE)
    assert compute == pytest.approx(timeline.compute_seconds, rel=1e-6)
    moved = sum(bar.seconds for bar in bars if bar.kind != COMPUTE)
    assert moved == pytest.approx(timeline.comm_seconds, rel=1e-6)
    bars = sorted(bars_of(training._report().timeline), key=lambda bar: bar.start)
    for lane in (COMPUTE, "data"):
        own = [bar for bar in bars if bar.lane == lane]
        assert own
        for before, after in itertools.pairwise(own):
            assert before.end <= after.start + 1e-9


def test_merging_keeps_the_time(training: Any) -> None:
    bars = bars_of(training._report().timeline)
    least = training.timeline.scheduled_seconds / 50
    fewer = merged(bars, least)
    assert len(fewer) < len(bars)
    assert sum(ops for _, ops in fewer) == len(bars)
    for lane in (COMPUTE, "data", "model"):
        drawn = [bar for bar, _ in fewer]
        whole, found = (sum(b.seconds for b in some if b.lane == lane) for some in (bars, drawn))
        assert found == pytest.approx(whole, rel=0.2, abs=least / 4)  # what lies between two


def test_a_loop_takes_the_time_of_all_iterations() -> None:
    def looped(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]

    low = lowered(looped, (64, 64), (64, 64), specs=(("data", None), (None, "model")))
    bars = bars_of(low._report().timeline)
    (loop,) = [slot for slot in low.timeline.slots if slot.op.is_loop]
    inside = [s for s in low.timeline.slots if s.depth > loop.depth]
    assert sum(b.seconds for b in bars) >= 5 * sum(s.seconds for s in inside) * (1 - 1e-9) > 0
    assert max(bar.end for bar in bars) >= loop.end * (1 - 1e-9)
    assert "loop ×5" in timeline_svg(low._report().timeline)


def test_memory_over_a_chain_of_products() -> None:
    """The first and the last product lie in the place of the result, and XLA says so, too."""

    def chain(x: Any, w: Any) -> Any:
        return jnp.sin(((x @ w) @ w) @ w)

    shape, size = (1024, 1024), 1024 * 1024 * 4
    specs = (("data", None), (None, None))
    low = lowered(chain, shape, shape, specs=specs, out_specs=("data", None))
    program, use = low.stages.optimized.program, low.predicted_memory
    curve = memory_curve(use, program)
    arguments, piece = size + size // 4, size // 4
    assert curve.steps == (
        (arguments, piece, 0, 0),
        (arguments, piece, 0, piece),
        (arguments, piece, 0, piece),
        (arguments, piece, 0, 0),
    )
    assert [kind for _, _, kind, *_ in curve.at_peak.rows].count(RESULTS) == 1
    options: dict[str, Any] = {"out_specs": ("data", None), "donate_argnums": (0,)}
    donated = lowered(chain, shape, shape, specs=specs, **options)
    again = memory_curve(donated.predicted_memory, donated.stages.optimized.program)
    assert again.steps[0] == (arguments, 0, 0, piece)


def test_memory_of_a_training_step(training: Any) -> None:
    use, program = training.predicted_memory, training.stages.optimized.program
    curve = memory_curve(use, program)
    assert {step[0] for step in curve.steps} == {use.arguments + use.constants}
    assert max(map(sum, curve.steps)) == sum(curve.steps[curve.peak]) == use.peak
    assert max(step[KINDS.index("saved for the gradient")] for step in curve.steps) > 0
    rows = curve.at_peak.rows
    held = sum(size for size, _, kind, *_ in rows if kind == ARGUMENTS)
    assert held == use.arguments + use.constants
    assert sum(size for size, *_ in rows) == use.peak
    assert any("model.py" in place for *_, place in rows)
