"""Processes that really are several: the same losses as one, and an end together when one ends."""

import json
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import spmd
from spmd.launch import EXIT_HUNG, EXIT_PEER_LOST, EXIT_PREEMPTED
from spmd.scripts.jobs.local import free_port, with_device_count
from tests.forked import Forked
from tests.launch.programs import train
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    """How each process ended, and what it said."""

    codes: list[int]
    outputs: list[str]


def both(
    module: str, arguments: list[str], folder: Path, devices: int = 1, woken: int | None = None
) -> Outcome:
    """Runs a module as two processes, without our launcher: nobody but they themselves ends them.

    One that stopped itself is `woken` once the other has ended.
    """
    env = {
        "XLA_FLAGS": with_device_count(os.environ["XLA_FLAGS"], devices),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }
    started = [
        Forked(module, arguments, folder / f"{i}.log", {**env, "JAX_PROCESS_ID": str(i)})
        for i in range(2)
    ]
    try:
        if woken is not None:
            started[1 - woken].wait()
            started[woken].send_signal(signal.SIGCONT)
        codes = [each.wait() for each in started]
    finally:
        for each in started:
            each.kill()
    return Outcome(codes, [each.said for each in started])


@pytest.fixture(scope="module")
def expected(devices8) -> list[float]:
    """The losses of one process with four devices."""
    return train.losses(spmd.make_mesh(devices=jax.devices()[:4], data=2, model=2))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict:
    ended = both("tests.launch.programs.train", ["2"], tmp_path_factory.mktemp("logs"), devices=2)
    assert ended.codes == [0, 0], ended.outputs
    return json.loads(ended.outputs[0].splitlines()[-1])


def test_two_processes_lose_as_one_does(two_processes, expected):
    assert two_processes["processes"] == 2
    np.testing.assert_allclose(two_processes["losses"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("flag", "differ in --steps\n  actual: process 1: 20; process 0: 10\n"),
        (
            "program",
            r"in the program, compiling <lambda> for x\[8,8\]\n  at: .*/train.py:\d+\n  actual: "
            r"process 1: %cst = .* dense<3.0\S+> : .*; process 0: %cst = .* dense<2.0\S+> : .*\n",
        ),
        (
            "lowered",
            r"in one device's program.*  at: .*/train.py:.*process 1: .*<.0x00004040.>.*0: ",
        ),
        ("mark", r"and their marks.*process 1: argument x tensor<8x8xf32> .*model.*0: .*data"),
        ("shape", r"next\n  actual: process 1: compiling <lambda> for x\[6,8\]; .*0: .*x\[8,8\]\n"),
        ("mesh", "differ in mesh\n  actual: process 1: model=4; process 0: data=2, model=2\n"),
        ("option", "compiler option xla_backend_optimization_level\n  actual: process 1: 1; pro"),
        ("place", "what they do next\n  actual: process 1: loss; process 0: step\n"),
        ("same", "^nothing$"),
    ],
)
def test_names_the_process_and_what_differs(two_processes, kind: str, says: str):
    assert re.search(says, two_processes["mismatches"][kind], re.S), two_processes["mismatches"]


def test_one_process_plans_for_all(two_processes):
    """Two programs that threads compile in either order; then a plan and a planner that fail."""
    planning = two_processes["planning"]
    assert planning["counts"] == ["2", "0"]
    first, second = planning["short"]
    assert first == second and re.match(r"PlanError .* [1-9]\d*$", first, re.S), first
    first, second = planning["failed"]
    assert first.startswith("ZeroDivisionError")
    assert second.startswith("LaunchError process 0 failed at planning tanh for x[8,8]\n  actual: ")
    assert "this is what went wrong" in second


def test_a_users_own_module_that_differs_is_named(tmp_path: Path):
    """The program is the same, and so are versions; a module beside it is not."""
    address, started = f"localhost:{free_port()}", []
    for process in range(2):
        folder = tmp_path / str(process)
        folder.mkdir()
        (folder / "own_module.py").write_text(f"seed = {process}\n")
        program = (
            f"import own_module, spmd\nspmd.initialize({address!r}, 2, timeout_s={PATIENCE})\n"
        )
        (folder / "program.py").write_text(program)
        env = {"JAX_PROCESS_ID": str(process)}
        started.append(Forked(folder / "program.py", [], folder / "log", env))
    assert [each.wait() for each in started] == [1, 1]
    for each in started:
        assert "the processes of this job differ in sources of own_module (hash)" in each.said


# One comes to grief.


def grieve(victim: int, how: str, folder: Path) -> Outcome:
    woken = victim if how == "stop" else None
    return both("tests.launch.programs.steps", [str(victim), how, str(folder)], folder, woken=woken)


@pytest.mark.parametrize(
    ("victim", "says"),
    [
        (1, r"error: process 0 of 2 stops: process 1 was lost: no sign of life for \d+ s"),
        (0, "error: process 1 of 2 stops: process 0 was lost: "),
    ],
)
def test_stops_when_another_is_killed(victim: int, says: str, tmp_path: Path):
    outcome = grieve(victim, "kill", tmp_path)
    assert outcome.codes[victim] == -9, outcome.outputs
    assert outcome.codes[1 - victim] == EXIT_PEER_LOST, outcome.outputs
    assert "step 2" in outcome.outputs[1 - victim]
    assert re.search(says, outcome.outputs[1 - victim].splitlines()[-1]), outcome.outputs


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_one_that_was_stopped_for_too_long_ends_like_the_others(victim: int, tmp_path: Path):
    """It is missed as if it had been killed. When it wakes up, it finds that the job is over."""
    outcome = grieve(victim, "stop", tmp_path)
    assert outcome.codes == [EXIT_PEER_LOST, EXIT_PEER_LOST], outcome.outputs
    lasts = [text.splitlines()[-1] for text in outcome.outputs]
    assert re.search(rf"process {victim}.* was lost: .*it was pid \d+ on ", lasts[1 - victim])
    assert f"error: process {victim} of 2 stops: " in lasts[victim]


@pytest.mark.parametrize(
    ("victim", "alone"), [(1, "compiling <lambda> for x[6]"), (0, "compiling mean for a[8]")]
)
def test_a_process_that_compiles_alone_is_told(victim: int, alone: str, tmp_path: Path):
    """Its last batch is smaller, or it evaluates alone: the other one waits in a collective."""
    outcome = grieve(victim, "compile", tmp_path)
    assert outcome.codes[victim] == 1, outcome.outputs
    assert outcome.codes[1 - victim] == EXIT_PEER_LOST, outcome.outputs
    runs = rf"process {1 - victim}: running <lambda> for x\[8\] at \S*steps.py:\d+ \(main\)"
    for text in outcome.outputs:
        assert "the processes of this job differ in what they do next" in text
        assert f"process {victim}: {alone}" in text and re.search(runs, text), text


def test_stops_when_another_exits_with_an_error(tmp_path: Path):
    outcome = grieve(0, "exit", tmp_path)
    assert outcome.codes == [1, EXIT_PEER_LOST], outcome.outputs
    last = outcome.outputs[1].splitlines()[-1]
    assert last == "error: process 1 of 2 stops: process 0 failed: error: no such file"


def test_all_stop_at_one_step_when_one_gets_sigterm(tmp_path: Path):
    outcome = grieve(1, "term", tmp_path)
    assert outcome.codes == [EXIT_PREEMPTED, EXIT_PREEMPTED], outcome.outputs
    steps = [re.findall(r"stopped before step (\d+)", text) for text in outcome.outputs]
    assert steps[0] == steps[1] and int(steps[0][0]) > 3, outcome.outputs


def test_a_watchdog_makes_all_write_their_stacks(tmp_path: Path):
    """Process 1 sleeps, process 0 waits for it in a collective: both hang, one file says why."""
    outcome = grieve(1, "hang", tmp_path)
    assert EXIT_HUNG in outcome.codes, outcome.outputs
    assert set(outcome.codes) <= {EXIT_HUNG, EXIT_PEER_LOST}, outcome.outputs
    texts = [(tmp_path / f"process-{process}.txt").read_text() for process in range(2)]
    for text in texts:
        assert "made no progress for" in text
        assert "step 2  step finished" in text
    assert "come_to_grief" in texts[1]
    assert "come_to_grief" not in texts[0]
