"""`scripts/train_llama.py` as several processes: one's losses; killed, and restarted to the bit."""

import os
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
    return [sys.executable, "-m", "spmd.scripts.launch_job", "local", *each, *flags, "--", *command]


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

    def wait_for(self, step: int) -> None:
        """Until the metrics have come to a step; the run goes on."""
        metrics = self.folder / "metrics.jsonl"

        def is_there() -> bool:
            return metrics.exists() and f'"step": {step},' in metrics.read_text()

        wait_until(lambda: is_there() or self.process.poll() is not None, lambda: self.said)
        assert is_there(), self.said

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


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("processes", "victim", "restarted_by"),
    [(2, 0, "hand"), (2, 1, "hand"), (2, 0, "launcher"), (4, 3, "launcher"), (4, 0, "hand")],
)
def test_resumed_it_ends_as_if_left_alone(
    processes: int, victim: int, restarted_by: str, start, tmp_path: Path
):
    """Parameters, optimizer state and losses to the bit, whoever is killed and who starts again."""
    whole = tmp_path / "undisturbed"
    undisturbed = start(launched(processes, train(whole, processes)), whole, "job")
    assert undisturbed.end() == 0, undisturbed.said
    command = train(tmp_path / "killed", processes)
    flags = ["--max_restarts=1"] if restarted_by == "launcher" else []
    job = start(launched(processes, command, *flags), tmp_path / "killed", "job")
    job.wait_for(KILL_AFTER)
    job.kill(victim)
    if restarted_by == "hand":
        assert job.end() == 128 + signal.SIGKILL, job.said
        job = start(launched(processes, command), tmp_path / "killed", "again")
    assert job.end() == 0, job.said
    assert "resuming after step" in job.said
    if restarted_by == "launcher":
        killed = f"launch: process {victim} failed: killed by SIGKILL (exit code 137); the others"
        assert f"{killed} get SIGTERM" in job.said
        assert "launch: restart 1 of 1" in job.said and "Traceback" not in job.said
        assert job.said.count("partitioned and compiled in") == 2  # one process speaks, each time
    compare(whole, tmp_path / "killed", STEPS)
    # The same mesh in one process.
    alone = start(
        train(tmp_path / "alone", processes),
        tmp_path / "alone",
        "alone",
        XLA_FLAGS=with_device_count(os.environ["XLA_FLAGS"], processes),
        JAX_PROCESS_ID="",
        SPMD_RESTART="",
    )
    assert alone.end() == 0, alone.said
    ours, expected = losses(tmp_path / "killed"), losses(tmp_path / "alone")
    assert list(ours) == list(expected) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(ours.values()), list(expected.values()), rtol=2e-5)
