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
import math
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser
from tools.resume_test import TEXT, write_text
from tools.serving_kills import PATIENCE, Launched, add_flags, kills_of

PHASES = ("start", "step", "save")
STEPS, SAVE_EVERY = 60, 10
MOST = 20.0  # seconds within which a job should take its next step


class Job(Launched):
    """A training job of two processes."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.run = folder / "run"
        super().__init__(
            folder,
            ["--processes=2", "--devices_per_process=1", "--max_restarts=1"],
            ["spmd.scripts.train_llama", "--model=tiny", "--layers=1", "--mesh=data=2",
             "--seq_len=16", "--global_batch=4", f"--data={cache.parent / TEXT}",
             f"--steps={STEPS}", "--log_every=1", "--eval_batches=0", "--sample_tokens=0",
             f"--save_every={SAVE_EVERY}", f"--run_dir={self.run}", "--resume=auto"],
            JAX_COMPILATION_CACHE_DIR=str(cache),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )  # fmt: skip

    def steps(self) -> list[int]:
        """The steps that it has finished, in the order in which that was written."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record["step"] for record in found if "loss" in record]

    def reached(self, phase: str, process: int) -> object:
        """Whether a process is there, and in a phase."""
        if not Path(f"{self._pids}.{process}.0").exists():
            return False
        if phase == "start":
            return True
        if phase == "step":
            return max(self.steps(), default=0) > SAVE_EVERY
        return len(self.steps()) > SAVE_EVERY and any(
            self.run.glob("checkpoints/*.orbax-checkpoint-tmp*")
        )


def kill(folder: Path, cache: Path, phase: str, victim: int) -> float:
    """Seconds from a kill to the next step; RuntimeError if the job does not go on to its end."""
    with Job(folder, cache) as job:
        job.wait_until(lambda: job.reached(phase, victim))
        if phase == "start":
            time.sleep(2.0)  # it imports, meets the other one, or compiles
        job.signal(victim, signal.SIGKILL)
        killed = time.monotonic()
        job.wait_until(lambda: "restart 1 of 1" in job.log)
        before = len(job.steps())
        job.wait_until(lambda: len(job.steps()) != before)
        seconds = time.monotonic() - killed
        if code := job.process.wait(PATIENCE):
            raise RuntimeError(f"exit code {code}\n{job.log}")
    return seconds


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run training_kills", __doc__)
    add_flags(parser, PHASES)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, and print."""
    given = make_parser().parse_args(arguments)
    took: list[float] = []
    print_head(("phase", "killed", "next step after, s"))
    with tempfile.TemporaryDirectory() as made:
        write_text(Path(made))
        for phase, victim, own in kills_of(given, range(2), Path(made)):
            try:
                took.append(kill(own, Path(made, "cache"), phase, victim))
            except RuntimeError as error:
                took.append(math.inf)
                print(error, file=sys.stderr)
            print_line([phase, str(victim), f"{took[-1]:.1f}"])
    went_on, soon = (sum(seconds < most for seconds in took) for most in (math.inf, MOST))
    print(f"{went_on} of {len(took)} went on to their end, {soon} within {MOST:g} s")
    sys.exit(0 if went_on == len(took) else 1)
