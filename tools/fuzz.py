"""The long fuzz: many cases from many seeds, failures shrunk and written to files of their own.

A worker process runs the cases, so that one that aborts or hangs is a failure like any other.

Example:
    tools/run fuzz --minutes 10 --seed 7 --out /tmp/failures
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import hypothesis.errors

from benchmarks.environment import xla_flags
from spmd.cli.flags import Parser, Switch
from tools.fuzzing.cases import Case, source
from tools.fuzzing.check import FAILED, UNSUPPORTED, Outcome, run
from tools.fuzzing.programs import Settings, cases

BATCH = 25
HANGS_AFTER = 240.0
SHRUNK_PER_CAUSE = 3
ROOT = Path(__file__).parent.parent

Tally = Counter[tuple[str, str]]
"""(Status, key) of an outcome -> how many cases had it."""

# ---------------------------------------------------------------------------------------------
# The worker.


class Worker:
    """Runs batches of cases until the time is up; keeps the tally in a file."""

    def __init__(self, out: Path, seed: int, end: float, uneven: bool) -> None:
        self.out = out
        self.seed = seed
        self.end = end
        self.uneven = uneven
        self.tally: Tally = Counter()
        self.failed: tuple[Case, Outcome] | None = None  # what is being shrunk, the smallest so far

    def run(self) -> None:
        """Explores until the time is over, batch by batch."""
        while time.time() < self.end:
            self.batch()
            self.seed += 1
            print(self.progress(), flush=True)

    def batch(self) -> None:
        """One batch of examples from hypothesis, which ends with one that fails, made small."""

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=BATCH,
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(cases(Settings(most_lines=16, uneven_marks=self.uneven)))
        def explore(case: Case) -> None:
            if self.failed is not None or time.time() < self.end:
                self.one(case)

        self.failed = None
        with contextlib.suppress(AssertionError, hypothesis.errors.Flaky):
            explore()
        if self.failed is not None:
            self.report(*self.failed)

    def one(self, case: Case) -> None:
        """Runs one case and counts what came of it; AssertionError if it is to be shrunk."""
        running = self.out / "running.py"
        running.write_text(source(case, "The process ended in the middle of this case."))
        outcome = run(case)
        running.unlink()
        if self.failed is None:
            what = outcome.status, outcome.key
            self.tally[what] += 1
            rows = [[*what, count] for what, count in self.tally.items()]
            (self.out / "tally.json").write_text(json.dumps([self.seed, rows]))
            is_new = outcome.status == FAILED and self.tally[what] <= SHRUNK_PER_CAUSE
        else:
            is_new = outcome.key == self.failed[1].key
        if is_new:
            self.failed = case, outcome
            raise AssertionError(outcome.key)

    def report(self, small: Case, outcome: Outcome) -> None:
        """Writes down a case that failed."""
        message = outcome.message.replace('"""', "'''").replace("\\", "\\\\")
        number = len(list(self.out.glob("failure_*.py")))
        path = self.out / f"failure_{number}.py"
        path.write_text(source(small, f"Found by tools/fuzz.\n\n{message}\n"))
        print(f"fuzz: {path}: {message.partition(chr(10))[0]}", flush=True)

    def progress(self) -> str:
        """How many cases had which outcome, and the time left."""
        left = max(0, int(self.end - time.time()))
        counts = ", ".join(f"{n} {status}" for status, n in by_status(self.tally).items())
        return f"fuzz: seed {self.seed}: {counts}; {left // 60}:{left % 60:02} left"


def by_status(tally: Tally) -> dict[str, int]:
    """How many cases had which outcome."""
    statuses = sorted({status for status, _ in tally})
    return {name: sum(n for (status, _), n in tally.items() if status == name) for name in statuses}


# ---------------------------------------------------------------------------------------------
# The parent.


def supervise(out: Path, seed: int, minutes: float, uneven: bool) -> Tally:
    """Runs workers one after the other, the next one where the last one died."""
    total: Tally = Counter()
    end = time.time() + 60 * minutes
    while time.time() < end:
        left = (end - time.time()) / 60
        worker = subprocess.Popen(
            [sys.executable, "-m", "benchmarks", "tools.fuzz", "--worker", f"--out={out}",
             f"--seed={seed}", f"--minutes={left}",
             "--uneven_marks" if uneven else "--nouneven_marks"],
            cwd=ROOT, env=_environment(),
        )  # fmt: skip
        problem = _wait(worker, out / "running.py")
        reached, tally = _tally(out)
        total += tally
        seed = max(seed, reached) + 1
        if problem:
            total[FAILED, problem] += 1
            _keep_running(out, problem)
    return total


def _environment() -> dict[str, str]:
    flags = xla_flags(os.environ.get("XLA_FLAGS", ""))
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def _wait(worker: subprocess.Popen[bytes], running: Path) -> str:
    """How a worker went wrong: its exit status, or that it hung; an empty string if it did not."""
    while worker.poll() is None:
        time.sleep(0.5)
        try:
            hangs = time.time() - running.stat().st_mtime > HANGS_AFTER
        except FileNotFoundError:
            continue
        if hangs:
            worker.kill()
            worker.wait()
            return "hangs"
    return f"exit status {worker.returncode}" if worker.returncode else ""


def _tally(out: Path) -> tuple[int, Tally]:
    """What a worker has written: its last seed, and its tally."""
    path = out / "tally.json"
    if not path.exists():
        return 0, Counter()
    seed, rows = json.loads(path.read_text())
    path.unlink()
    return seed, Counter({(status, key): count for status, key, count in rows})


def _keep_running(out: Path, problem: str) -> None:
    running = out / "running.py"
    if running.exists():
        number = len(list(out.glob("failure_*.py")))
        running.rename(out / f"failure_{number}.py")
        print(f"fuzz: {out / f'failure_{number}.py'}: {problem}", flush=True)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run fuzz", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long to run")
    add("--seed", type=int, default=0, help="seed of the first batch of cases")
    add("--out", default="fuzz_failures", help="directory for the reproducers")
    add("--uneven_marks", action=Switch, help="also mark dims with axes that don't divide")
    add("--worker", action=Switch, help="run cases in this process (the script's own use)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Explores with the flags of the command line."""
    given = make_parser().parse_args(arguments)
    out = Path(given.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    if given.worker:
        Worker(out, given.seed, time.time() + 60 * given.minutes, given.uneven_marks).run()
        return
    tally = supervise(out, given.seed, given.minutes, given.uneven_marks)
    outcomes = by_status(tally)
    print(f"fuzz: {tally.total()} cases: {outcomes}")
    for (status, cause), n in tally.most_common():
        if status in (FAILED, UNSUPPORTED):
            print(f"  {status} {n} times: {cause}")
    if FAILED in outcomes:
        sys.exit(f"error: {outcomes[FAILED]} cases failed; reproducers are in {out}")
