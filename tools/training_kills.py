"""Kills processes of a training job in every phase, and prints how soon the next step is taken.

Two processes of this machine train a tiny Llama under the launcher, which starts them again. One of
them gets SIGKILL while they start, in a step or during a save. The table has the seconds from the
kill to the next finished step; status 1 if a job did not take all of its steps.

Examples:
    tools/run training_kills
    tools/run training_kills --kills 30 --phases step,save
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

from spmd.cli.flags import Parser, words
from tools.resume_test import TEXT, write_text
from tools.serving_kills import NOTE, PATIENCE
from tools.soak import ROOT

PHASES = ("start", "step", "save")
STEPS, SAVE_EVERY = 60, 10
MOST = 20.0  # seconds within which a job should take its next step


class Job:
    """A training job of two processes, under the launcher."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.run, self.pids = folder / "run", folder / "pid"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [
            sys.executable, "-m", "scripts.launch_job", "local", "--platform", "cpu",
            "--processes", "2", "--devices_per_process", "1", "--max_restarts", "1", "--",
            "sh", "-c", NOTE, str(self.pids), sys.executable, "scripts/train_llama.py",
            "--model=tiny", "--layers=1", "--mesh=data=2", "--seq_len=16", "--global_batch=4",
            f"--data={cache.parent / TEXT}", f"--steps={STEPS}", "--log_every=1",
            "--eval_batches=0", "--sample_tokens=0", f"--save_every={SAVE_EVERY}",
            f"--run_dir={self.run}", "--resume=auto",
        ]  # fmt: skip
        self.log = folder / "log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, cwd=ROOT
            )

    def steps(self) -> list[int]:
        """The steps that it has finished, in the order in which that was written."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record["step"] for record in found if "loss" in record]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Waits for a condition, or the job's end."""
        end = time.monotonic() + PATIENCE
        while not condition() and self.process.poll() is None:
            if time.monotonic() > end:
                raise RuntimeError(f"it did not happen:\n{self.log.read_text()}")
            time.sleep(0.005)

    def reached(self, phase: str) -> object:
        """Whether it is in a phase."""
        if phase == "start":
            return True
        if phase == "step":
            return max(self.steps(), default=0) > SAVE_EVERY
        return len(self.steps()) > SAVE_EVERY and any(
            self.run.glob("checkpoints/*.orbax-checkpoint-tmp*")
        )


def kill(folder: Path, cache: Path, phase: str, victim: int) -> tuple[float | None, int]:
    """Returns the seconds from a kill to the next step, if there is one, and the exit code."""
    job = Job(folder, cache)
    job.wait_until(lambda: job.reached(phase) and Path(f"{job.pids}.{victim}.0").exists())
    if phase == "start":
        time.sleep(2.0)  # it imports, meets the other one, or compiles
    os.kill(int(Path(f"{job.pids}.{victim}.0").read_text()), signal.SIGKILL)
    killed = time.monotonic()
    job.wait_until(lambda: "restart 1 of 1" in job.log.read_text())
    before = len(job.steps())
    job.wait_until(lambda: len(job.steps()) != before)
    seconds = time.monotonic() - killed
    code = job.process.wait(PATIENCE)
    return seconds if code == 0 else None, code


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run training_kills", __doc__)
    add = parser.add_argument
    add("--phases", type=words, default=PHASES, help="when a process is killed")
    add("--kills", type=int, help="how many (default: each process once in each phase)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, and print."""
    given = make_parser().parse_args(arguments)
    kinds = [(phase, victim) for phase in given.phases for victim in range(2)]
    kills = len(kinds) if given.kills is None else given.kills
    wrong = late = 0
    print("| phase | killed | next step after, s |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as made:
        write_text(Path(made))
        for number, (phase, victim) in enumerate(islice(cycle(kinds), kills)):
            own = Path(made, str(number))
            own.mkdir()
            seconds, code = kill(own, Path(made, "cache"), phase, victim)
            shown = "-" if seconds is None else f"{seconds:.1f}"
            print(f"| {phase} | {victim} | {shown} |", flush=True)
            late += seconds is None or seconds > MOST
            if seconds is None:
                wrong += 1
                print(f"exit code {code}\n{(own / 'log').read_text()}", file=sys.stderr)
    print(f"{kills - wrong} of {kills} went on to their end, {kills - late} within {MOST:g} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
