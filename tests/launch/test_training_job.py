"""`scripts/train_llama.py` as several processes: one's losses; killed, and restarted to the bit."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spmd.scripts.jobs.local import with_device_count
from tests.waiting import PATIENCE, wait_until
from tools.resume_test import TEXT, compare, losses, write_text

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY = 16, 4
KILL_AFTER = 2 * SAVE_EVERY + 1
"""Saving begins when the save before has ended: there is a checkpoint."""

HEARTBEAT_S = 5


def train(folder: Path, data: int) -> list[str]:
    """A run of a tiny model that saves often. Every process first writes down who it is."""
    flags = [
        "--model=tiny", "--layers=1", f"--mesh=data={data}", "--seq_len=16", "--global_batch=8",
        f"--data={folder.parent / TEXT}", f"--steps={STEPS}", "--log_every=1", "--eval_batches=0",
        "--sample_tokens=0", f"--save_every={SAVE_EVERY}", f"--run_dir={folder}", "--resume",
        f"--heartbeat_timeout={HEARTBEAT_S}",
    ]  # fmt: skip
    note = f'echo $$ >{folder}.pid$JAX_PROCESS_ID.$SPMD_RESTART; exec "$@"'
    return ["sh", "-c", note, "sh", sys.executable, "scripts/train_llama.py", *flags]


def launched(processes: int, command: list[str], *flags: str) -> list[str]:
    """Four devices or two, in so many processes."""
    each = ["--processes", str(processes), "--devices_per_process", "1", "--platform", "cpu"]
    return [sys.executable, "-m", "scripts.launch_job", "local", *each, *flags, "--", *command]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One cache of compiled programs for all runs."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


class Job:
    """A command that runs in the background; its output is in a file."""

    def __init__(self, command: list[str], env: dict[str, str], folder: Path, name: str) -> None:
        self.folder, self.log = folder, folder.with_name(f"{folder.name}.{name}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> int:
        try:
            return self.process.wait(timeout=PATIENCE)
        finally:
            self.process.kill()

    def losses_after(self, step: int) -> dict[int, float]:
        """What the metrics say once they have come to a step; the run goes on."""
        metrics = self.folder / "metrics.jsonl"

        def found() -> dict[int, float]:
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            whole = [json.loads(line) for line in lines if line.endswith("\n") and '"loss"' in line]
            return {record["step"]: record["loss"] for record in whole}

        def is_there() -> bool:
            return max(found(), default=0) >= step or self.process.poll() is not None

        wait_until(is_there, lambda: self.said)
        assert max(found(), default=0) >= step, self.said
        return found()

    def kill(self, process: int) -> None:
        """SIGKILL to one process of the first attempt."""
        pid = Path(f"{self.folder}.pid{process}.0").read_text()
        os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path):
    """Starts jobs that do not outlive the test."""
    write_text(tmp_path)
    jobs: list[Job] = []

    def start(command: list[str], folder: Path, name: str, **env: str) -> Job:
        jobs.append(Job(command, environment | env, folder, name))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.terminate()
        job.end()


def start_alone(start, folder: Path, data: int) -> Job:
    """The same mesh in one process."""
    flags = with_device_count(os.environ["XLA_FLAGS"], data)
    return start(
        train(folder, data), folder, "alone", XLA_FLAGS=flags, JAX_PROCESS_ID="", SPMD_RESTART=""
    )


def check_same_curve(ours: dict[int, float], alone: dict[int, float]) -> None:
    assert list(ours) == list(alone) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(ours.values()), list(alone.values()), rtol=2e-5)


@pytest.mark.heavy
def test_a_killed_job_restarts_and_takes_the_same_steps(start, tmp_path: Path):
    """Steps taken a second time are the same to the bit."""
    command = train(tmp_path / "two", 2)
    job = start(launched(2, command, "--max_restarts=1"), tmp_path / "two", "job")
    before = job.losses_after(KILL_AFTER)
    job.kill(1)
    assert job.end() == 0, job.said
    says = "launch: process 1 failed: killed by SIGKILL (exit code 137); the others get SIGTERM"
    assert says in job.said
    assert "launch: restart 1 of 1" in job.said
    assert "Traceback" not in job.said
    (resumed,) = map(int, re.findall(r"resuming after step (\d+)", job.said))
    after = losses(tmp_path / "two")
    again = [step for step in before if step > resumed]
    assert again and all(after[step] == before[step] for step in again)
    assert list(after) == list(range(1, STEPS + 1))
    assert job.said.count("partitioned and compiled in") == 2  # one process speaks, each time


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("processes", "victim", "restarted_by"),
    [(2, 0, "hand"), (2, 1, "hand"), (2, 0, "launcher"), (4, 3, "launcher"), (4, 0, "hand")],
)
def test_resumed_it_ends_as_if_left_alone(
    processes: int, victim: int, restarted_by: str, start, tmp_path: Path
):
    """Parameters, optimizer state and losses to the bit, whoever is killed and who starts again."""
    undisturbed = start(
        launched(processes, train(tmp_path / "undisturbed", processes)),
        tmp_path / "undisturbed",
        "job",
    )
    assert undisturbed.end() == 0, undisturbed.said
    command = train(tmp_path / "killed", processes)
    flags = ["--max_restarts=1"] if restarted_by == "launcher" else []
    job = start(launched(processes, command, *flags), tmp_path / "killed", "job")
    job.losses_after(KILL_AFTER)
    job.kill(victim)
    if restarted_by == "hand":
        assert job.end() == 128 + signal.SIGKILL, job.said
        job = start(launched(processes, command), tmp_path / "killed", "again")
    assert job.end() == 0, job.said
    assert "resuming after step" in job.said
    compare(tmp_path / "undisturbed", tmp_path / "killed", STEPS)
    alone = start_alone(start, tmp_path / "alone", processes)
    assert alone.end() == 0, alone.said
    check_same_curve(losses(tmp_path / "killed"), losses(tmp_path / "alone"))
