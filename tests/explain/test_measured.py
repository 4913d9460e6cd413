"""What was measured beside what was predicted, of a program that runs on eight CPU devices."""

from typing import Any

import jax
import numpy as np
import pytest

from spmd.errors import ArgumentError
from spmd.explain.measured import EXPOSED, HIDDEN, IDLE, Measured, compare
from spmd.explain.page.page import render
from spmd.measure.labels import KINDS, Labels, label_of
from spmd.measure.profile import Run, Step


@pytest.fixture(scope="module")
def args(compiled: Any) -> tuple[Any, ...]:
    leaves = [np.ones(t.shape, np.float32) for t in compiled.stages.emitted.argument_types]
    given: tuple[Any, ...] = jax.tree.unflatten(compiled.in_tree, leaves)[0]
    return given


@pytest.fixture(scope="module")
def measured(compiled: Any, args: tuple[Any, ...]) -> Any:
    yield compiled.measure(*args, steps=3)
    compiled.measured = None  # the other tests' program is as it was


def test_kinds_add_up_to_the_step_and_to_the_prediction(compiled: Any, measured: Measured) -> None:
    assert len(measured.times) == 3
    assert min(measured.times) <= measured.seconds <= max(measured.times)
    assert measured.predicted == compiled.cost
    assert (measured.devices, measured.platform) == (8, "cpu")
    kinds = {part.name: part for part in measured.kinds}
    assert set(kinds) <= {*KINDS, EXPOSED, IDLE, HIDDEN}
    assert all(part.measured >= 0 and part.predicted >= 0 for part in measured.kinds)
    whole = sum(part.measured for part in measured.kinds if part.name != HIDDEN)
    assert whole == pytest.approx(measured.profiled)
    shown = [part.predicted for part in measured.kinds if part.name != HIDDEN]
    assert sum(shown) == pytest.approx(compiled.cost)
    assert sum(part.predicted for part in measured.layers) == pytest.approx(compiled.cost)
    comm = sum(part.predicted for part in measured.collectives)
    assert comm == pytest.approx(compiled.timeline.comm_seconds)


def test_every_collective_is_found_again(compiled: Any, measured: Measured) -> None:
    ops = [op for op in compiled.stages.optimized.program.walk() if op.collective]
    labels = [label_of(op, compiled.mesh) for op in ops]
    ours = {f"{label.collective} in {label.layer}" for label in labels}
    assert {part.name for part in measured.collectives if part.measured} == ours
    assert {part.name for part in measured.collectives if part.predicted} == ours


def test_reports_show_it(compiled: Any, measured: Measured) -> None:
    assert compiled.measured is measured
    text = str(measured)
    for part in (*measured.kinds, *measured.layers, *measured.collectives):
        assert part.name in text
    assert measured.title in compiled.summary()
    assert all(line in compiled.explain(prices=False) for line in text.splitlines() if line)
    assert measured.title in render(compiled._report())


def test_arguments_stay_and_no_steps_are_an_error(compiled: Any, args: tuple[Any, ...]) -> None:
    placed = jax.device_put(args, compiled.in_shardings)
    compiled.measure(*placed, steps=1)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    with pytest.raises(ArgumentError, match="0 steps"):
        compiled.measure(*args, steps=0)


def test_a_profile_without_devices_gives_the_time_alone(compiled: Any) -> None:
    topology, program = compiled.stages.plan.topology, compiled.stages.optimized.program
    run = Run((2.0, 4.0, 3.0), (Step(5.0, ()),))
    labels = Labels(compiled.as_text("hlo"), program, compiled.mesh)
    found = compare(run, labels, compiled.timeline, compiled.mesh, topology, "tpu")
    assert (found.seconds, found.devices, found.kinds, found.step) == (3.0, 0, (), ())
    assert str(found).startswith("3 s a step, the median of 3 (2 s to 4 s)")
    assert "share one machine" not in str(found)
