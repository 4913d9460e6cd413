"""What two checkouts made of the same programs, as tables: pure functions of what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from benchmarks.tables import row_line

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
