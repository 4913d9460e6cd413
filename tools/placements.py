"""Whether marks make plans faster: random programs, each planned free and with random marks.

A program has at most ten ops over two axes; its results are open, and half of its arguments. It is
planned without further marks, and with all specs of its results and of what is between, or with
--draws random ones. No plan with marks should be predicted to be faster than the one without:
those that are by more than 1% are printed with the program and the marks, in the order of seeds.
Each program has a process of its own, and is the same whenever its seed and --draws are: a run that
was ended goes on with --first.

Example:
    tools/run placements --programs 300 --draws 200 --processes 32
    tools/run placements --first 120 --programs 180 --draws 200
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes take all cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from spmd.cli.flags import Parser, positive
from tools.drawn import Explored, explored

TOLERANCE = 1.01


class Done(NamedTuple):
    """What came of a seed: what was found in how many seconds of the processor, or why not."""

    seed: int
    found: Explored | None = None
    seconds: float = 0.0
    error: str = ""

    @property
    def is_beaten(self) -> bool:
        """Whether some marks are faster than none."""
        return self.found is not None and self.found.ratio > TOLERANCE


def explore(seed: int, draws: int) -> Done:
    """Tries one program, in this process."""
    start = time.process_time()
    found = explored(seed, draws)
    return Done(seed, found, time.process_time() - start)


def in_own_process(seed: int, draws: int) -> Done:
    """The same in a process that ends with it; whatever goes wrong is the seed's outcome."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(explore, seed, draws).result()
    except Exception as error:
        return Done(seed, error=f"{type(error).__name__}: {error}".splitlines()[0])


def report(done: Done) -> str:
    """What is said of a seed whose plan was beaten, or that failed."""
    if done.found is None:
        return f"seed {done.seed}: {done.error}"
    found = done.found
    times = f"{found.free * 1e6:.1f} us, {found.fastest * 1e6:.1f} us with these marks"
    text = found.program.text(found.marks).replace("\n", "\n    ")
    return f"seed {done.seed}: {found.ratio:.3f} ({times})\n    {text}"


def summary(every: Sequence[Done]) -> str:
    """How many programs and draws there were, and how many plans were beaten."""
    found = [done.found for done in every if done.found is not None]
    draws = sum(one.draws for one in found)
    beaten = sum(done.is_beaten for done in every)
    worst = max((one.ratio for one in found), default=1.0)
    each = sum(done.seconds for done in every) / max(1, draws + len(found))
    line = f"{len(found)} programs, {draws} draws: {beaten} beaten by more than 1%, "
    line += f"worst {worst:.3f}; {each:.2f} s of the processor a plan"
    failed = len(every) - len(found)
    return line + (f"; {failed} failed" if failed else "")


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run placements", __doc__)
    add = parser.add_argument
    add("--programs", type=positive, default=30, help="how many programs")
    add("--draws", type=positive, default=30, help="random marks of each, at most")
    add("--first", type=int, default=0, help="seed of the first program; the next follow it")
    add("--processes", type=positive, default=os.cpu_count() or 1, help="processes at a time")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plans that were beaten, and a summary; returns the exit status."""
    given = make_parser().parse_args(arguments)
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    seeds = range(given.first, given.first + given.programs)
    every: list[Done] = []
    pool = ThreadPoolExecutor(given.processes)
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            tasks = [pool.submit(in_own_process, seed, given.draws) for seed in seeds]
            for task in bar.track(tasks):
                every.append(task.result())
                if every[-1].is_beaten or every[-1].error:
                    print(report(every[-1]), flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    print(summary(every))
    return int(any(done.is_beaten or done.error for done in every))


if __name__ == "__main__":
    sys.exit(main())
