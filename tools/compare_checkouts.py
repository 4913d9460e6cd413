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
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.environment import xla_flags
from spmd.cli.flags import Parser, positive
from tools.checkout_table import (
    Measured,
    Pair,
    fastest,
    last_line,
    plan_lines,
    stage_lines,
    verdict,
)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.__exit__(kind, error, trace)  # closes its input, at which it ends

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
            say(f"[{number}/{len(names)}] {name}: {verdict(pairs[-1])}")
    return pairs


def measure_pair(name: str, base: Side, new: Side, repeat: int) -> Pair:
    """One program, lowered by both in turns; who is first changes from turn to turn."""
    runs: dict[Side, list[Measured]] = {base: [], new: []}
    for turn in range(repeat):
        for side in (base, new) if turn % 2 == 0 else (new, base):
            runs[side].append(side.measure(name))
    return Pair(name, fastest(runs[base]), fastest(runs[new]))


def say(line: str) -> None:
    """A line about progress."""
    print(line, file=sys.stderr, flush=True)


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
