"""Compares the plans and the compile times of two checkouts: of one before and one after a change.

Each checkout's `spmd` lowers the programs of the new checkout's benchmarks (the catalog, and Llama
training steps) in a process of its own. The tables show the programs of which any stage's text,
predicted seconds or bytes sent differ, and the seconds of each stage: the sum of each program's
fastest run; the two checkouts take turns. The exit status is 1 if a plan became dearer.

A refactor that should change nothing says `N programs, N equal, 0 cheaper, 0 dearer`.

Example:
    tools/run compare_checkouts /tmp/before
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.environment import xla_flags
from benchmarks.tables import row_line
from spmd.cli.flags import Parser, positive

HERE = Path(__file__).resolve().parent.parent

PROGRAM = """
import sys
import spmd  # from the checkout that PYTHONPATH names
checkout, programs = sys.argv[1:]
sys.path[0] = programs  # all else from here, models too
spmd.__path__.insert(0, programs)
from tools.checkout_plans import main
main(checkout, programs)
"""


Verdict = Literal["equal", "cheaper", "dearer", "as dear"]

TOLERANCE = 1e-9
"""Relative: sums of the same costs in another order are the same cost."""


class Measured(NamedTuple):
    """One program as one checkout lowers it."""

    texts: Mapping[str, str] = {}  # stage -> hash of the program's text after it
    plan: float = math.inf  # seconds of one run, each part's added up
    # predicted seconds of one run, what overlaps counting once: what the planner makes small
    run: float = math.inf
    bytes: int = 0  # that one device sends in one run
    stages: Mapping[str, float] = {}  # stage -> seconds that it took
    error: str = ""  # why it could not be lowered; all else is then empty

    @property
    def result(self) -> Measured:
        """All but the time it took."""
        return self._replace(stages={})

    @property
    def cost(self) -> tuple[float, float, float]:
        """What decides which of two is cheaper: later parts, where earlier ones are the same."""
        return self.run, self.plan, self.bytes


class Pair(NamedTuple):
    """One program as both checkouts lower it."""

    name: str
    base: Measured
    new: Measured


def fastest(runs: Sequence[Measured]) -> Measured:
    """One of several runs of the same program, with each stage's shortest time.

    Runs that come to different results are an error of the program's.
    """
    first = runs[0]
    if any(run.result != first.result for run in runs):
        return Measured(error="lowered twice, it has two results")
    return first._replace(stages={n: min(run.stages[n] for run in runs) for n in first.stages})


def verdict(pair: Pair) -> Verdict:
    """Whether the new plan is the old one, and if not, which of them costs less.

    What cannot be lowered is dearer than anything, and never counts as equal.

    >>> verdict(Pair("p", Measured({}, 2.0, 2.0, 8), Measured({}, 3.0, 1.0, 9)))
    'cheaper'
    """
    base, new = pair.base, pair.new
    if base.result == new.result and not base.error:
        return "equal"
    for before, after in zip(base.cost, new.cost, strict=True):
        if not math.isclose(before, after, rel_tol=TOLERANCE):
            return "cheaper" if after < before else "dearer"
    return "as dear"


def differing(pair: Pair) -> str:
    """The stages whose texts differ, or what went wrong."""
    if errors := [m.error for m in (pair.base, pair.new) if m.error]:
        return "; ".join(errors)
    return ", ".join(s for s, text in pair.base.texts.items() if pair.new.texts.get(s) != text)


def plan_lines(pairs: Iterable[Pair]) -> Iterator[str]:
    """A table of the programs that differ; nothing where none does."""
    rows = [(pair, verdict(pair)) for pair in pairs]
    if all(found == "equal" for _, found in rows):
        return
    titles = ("program", "texts that differ", "run, s", "parts, s", "bytes", "new is")
    yield from (row_line(titles), row_line("---" for _ in titles))
    for pair, found in rows:
        if found != "equal":
            yield row_line((pair.name, differing(pair), *cost_cells(pair), found))


def cost_cells(pair: Pair) -> Iterator[str]:
    """Each part of the cost, before and after."""
    for before, after in zip(pair.base.cost, pair.new.cost, strict=True):
        yield f"{before:.6g}" if before == after else f"{before:.6g} -> {after:.6g}"


def stage_lines(pairs: Sequence[Pair]) -> Iterator[str]:
    """A table of the seconds that each stage took, summed over the programs."""
    base, new = (total(side) for side in zip(*((p.base, p.new) for p in pairs), strict=True))
    titles = ("stage", "base, s", "new, s", "new/base")
    yield from (row_line(titles), row_line("---" for _ in titles))
    for stage in {**base, **new}:
        yield seconds_line(stage, base[stage], new[stage])
    yield seconds_line("all", base.total(), new.total())


def total(side: Iterable[Measured]) -> Counter[str]:
    """Seconds of each stage, all programs together."""
    seconds: Counter[str] = Counter()
    for measured in side:
        seconds.update(measured.stages)
    return seconds


def seconds_line(stage: str, base: float, new: float) -> str:
    """One line of the table of seconds."""
    ratio = f"{new / base:.2f}" if base else "-"
    return row_line((stage, f"{base:.3f}", f"{new:.3f}", ratio))


def last_line(pairs: Iterable[Pair]) -> str:
    """How many programs there are, and what became of them."""
    count = Counter(verdict(pair) for pair in pairs)
    line = f"{count.total()} programs, {count['equal']} equal"
    line += f", {count['cheaper']} cheaper, {count['dearer']} dearer"
    return line + (f", {count['as dear']} others as dear" if count["as dear"] else "")


class Side:
    """A process that lowers programs with the `spmd` of one checkout."""

    def __init__(self, checkout: Path, programs: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
        environment["XLA_FLAGS"] = xla_flags(os.environ.get("XLA_FLAGS", ""))
        self.checkout = checkout
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(checkout), str(programs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.process.__exit__(*raised)  # closes its input, at which it ends

    def names(self) -> list[str]:
        """The programs that it knows: to be asked first, and once."""
        return [str(name) for name in self._answer()]

    def measure(self, name: str) -> Measured:
        """Lowers a program."""
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return Measured(**self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the process of {self.checkout} ended: its error is above")
        return json.loads(line)


def compare(base: Path, new: Path, only: str, repeat: int) -> list[Pair]:
    """Every program as both checkouts lower it, in turns, so that both see the same noise.

    Raises:
      RuntimeError: a checkout's process ended.
    """
    with Side(base, new) as old, Side(new, new) as young:
        names = [name for name in old.names() if re.search(only, name)]
        assert young.names()
        pairs = []
        for number, name in enumerate(names, 1):
            pairs.append(measure_pair(name, old, young, repeat))
            said = f"[{number}/{len(names)}] {name}: {verdict(pairs[-1])}"
            print(said, file=sys.stderr, flush=True)
    return pairs


def measure_pair(name: str, base: Side, new: Side, repeat: int) -> Pair:
    """One program, lowered by both in turns; who is first changes from turn to turn."""
    runs: dict[Side, list[Measured]] = {base: [], new: []}
    for turn in range(repeat):
        for side in (base, new) if turn % 2 == 0 else (new, base):
            runs[side].append(side.measure(name))
    return Pair(name, fastest(runs[base]), fastest(runs[new]))


def checkout_of(path: str) -> Path:
    """The checkout at a path.

    Raises:
      argparse.ArgumentTypeError: there is none.
    """
    checkout = Path(path).resolve()
    if not (checkout / "spmd" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{path!r} is no checkout: it has no spmd/__init__.py")
    return checkout


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run compare_checkouts", __doc__)
    add = parser.add_argument
    add("base", type=checkout_of, help="the checkout before the change")
    add(
        "new", type=checkout_of, nargs="?", default=HERE, help="after it (default: this repository)"
    )
    add("--only", default="", help="programs whose name this regular expression finds")
    add("--repeat", type=positive, default=3, help="runs of each program; the fastest counts")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    pairs = compare(given.base, given.new, given.only, given.repeat)
    if not pairs:
        parser.error(f"no program's name holds {given.only!r}")
    for line in (*plan_lines(pairs), "", *stage_lines(pairs), "", last_line(pairs)):
        print(line)
    return int(any(verdict(pair) == "dearer" for pair in pairs))
