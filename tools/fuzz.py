"""The long fuzz: many cases from many seeds, failures shrunk and written to files of their own.

A worker process runs the cases, so that one that aborts or hangs is a failure like any other.

Example:
    tools/run fuzz --minutes 10 --seed 7 --out /tmp/failures
"""

import contextlib
import dataclasses
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import hypothesis
import hypothesis.errors

from spmd.cli.flags import Parser, Switch
from tools.fuzzing.cases import Case, source
from tools.fuzzing.check import FAILED, UNSUPPORTED, Outcome, run
from tools.fuzzing.programs import Settings, cases

BATCH = 25
HANGS_AFTER = 240.0
SHRUNK_PER_CAUSE = 3

Tally = Counter[tuple[str, str]]
"""(Status, key) of an outcome -> how many cases had it."""

# The worker.


@dataclasses.dataclass
class Worker:
    """Runs batches of cases until the time is up; tells the parent what runs, and what came of it.

    A message is (seed of the batch, the case that runs now as a file, what is to be counted).
    """

    parent: Connection
    out: Path
    seed: int
    end: float
    uneven: bool
    tally: Tally = dataclasses.field(default_factory=Counter)
    failed: tuple[Case, Outcome] | None = None  # what is being shrunk, the smallest so far

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
        text = source(case, "The process ended in the middle of this case.")
        self.parent.send((self.seed, text, []))
        outcome = run(case)
        what = outcome.status, outcome.key
        self.parent.send((self.seed, "", [what] if self.failed is None else []))
        if self.failed is None:
            self.tally[what] += 1
            is_new = outcome.status == FAILED and self.tally[what] <= SHRUNK_PER_CAUSE
        else:
            is_new = outcome.key == self.failed[1].key
        if is_new:
            self.failed = case, outcome
            raise AssertionError(outcome.key)

    def report(self, small: Case, outcome: Outcome) -> None:
        """Writes down a case that failed."""
        message = outcome.message.replace('"""', "'''").replace("\\", "\\\\")
        keep(self.out, source(small, f"Found by tools/fuzz.\n\n{message}\n"), message)

    def progress(self) -> str:
        """How many cases had which outcome, and the time left."""
        left = max(0, int(self.end - time.time()))
        counts = ", ".join(f"{n} {status}" for status, n in by_status(self.tally).items())
        return f"fuzz: seed {self.seed}: {counts}; {left // 60}:{left % 60:02} left"


def by_status(tally: Tally) -> dict[str, int]:
    """How many cases had which outcome."""
    statuses = sorted({status for status, _ in tally})
    return {name: sum(n for (status, _), n in tally.items() if status == name) for name in statuses}


# The parent.


def supervise(out: Path, seed: int, minutes: float, uneven: bool) -> Tally:
    """Runs workers one after the other, the next one where the last one died."""
    total: Tally = Counter()
    end = time.time() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    while time.time() < end:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=Worker(theirs, out, seed, end, uneven).run)
        worker.start()
        theirs.close()
        running, problem = "", "hangs"
        try:
            while ours.poll(HANGS_AFTER):
                seed, running, counted = ours.recv()
                total.update(counted)
            worker.kill()
            worker.join()
        except EOFError:
            worker.join()
            problem = f"exit status {worker.exitcode}" if worker.exitcode else ""
        seed += 1
        if problem:
            total[FAILED, problem] += 1
        if problem and running:
            keep(out, running, problem)
    return total


def keep(out: Path, text: str, message: str) -> None:
    """Writes a file for a case that failed, and says so."""
    path = out / f"failure_{len(list(out.glob('failure_*.py')))}.py"
    path.write_text(text)
    print(f"fuzz: {path}: {message.partition(chr(10))[0]}", flush=True)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run fuzz", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long to run")
    add("--seed", type=int, default=0, help="seed of the first batch of cases")
    add("--out", default="fuzz_failures", help="directory for the reproducers")
    add("--uneven_marks", action=Switch, help="also mark dims with axes that don't divide")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Explores with the flags of the command line."""
    given = make_parser().parse_args(arguments)
    out = Path(given.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    tally = supervise(out, given.seed, given.minutes, given.uneven_marks)
    outcomes = by_status(tally)
    print(f"fuzz: {tally.total()} cases: {outcomes}")
    for (status, cause), n in tally.most_common():
        if status in (FAILED, UNSUPPORTED):
            print(f"  {status} {n} times: {cause}")
    if FAILED in outcomes:
        sys.exit(f"error: {outcomes[FAILED]} cases failed; reproducers are in {out}")
