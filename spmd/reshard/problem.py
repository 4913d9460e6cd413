"""One reshard as a search problem: what a step costs, and what no path can undercut.

Costs are lines: a time that does not depend on the value's size, and one for each unit of it. All
are whole numbers, so that order cannot matter, and ties are ties.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from spmd.mesh.sharding import Axes
from spmd.reshard.comm import latency_steps, wire_bytes
from spmd.reshard.question import Digit, Dims, Question

TICKS = 1e24
"""Ticks of the clock in a second: what a byte takes is a whole number of them, but for 1e-11."""


class Line(NamedTuple):
    """What something costs, depending on the size of the value.

    Attributes:
      fixed: ticks for a value of any size.
      growing: ticks for each unit of size.
      sent: bytes that each device sends, for each unit of size.
      steps: collectives and slices.
    """

    fixed: int
    growing: int
    sent: int
    steps: int


class Fabric:
    """The digits of a question, with what is asked of them again and again."""

    def __init__(self, digits: tuple[Digit, ...]) -> None:
        self.digits = digits
        self.sizes = tuple(math.prod(digit.sizes) for digit in digits)
        self.latencies = [round(digit.latency * TICKS) for digit in digits]
        self.paces = [round(TICKS / digit.bandwidth) for digit in digits]
        self.best_latency = min(self.latencies, default=0)
        self.best_pace = min(self.paces, default=0)
        self.flat = any(digit.flat for digit in digits)
        self.slow = self._slow_classes()
        self._extents: dict[Axes, int] = {}

    def _slow_classes(self) -> list[tuple[int, int, frozenset[int]]]:
        """For each pace above the best: it, the least latency at it or worse, and those digits."""
        classes = []
        for pace in sorted(set(self.paces) - {self.best_pace}):
            digits = frozenset(a for a, other in enumerate(self.paces) if other >= pace)
            classes.append((pace, min(self.latencies[a] for a in digits), digits))
        return classes

    def extent(self, axes: Axes) -> int:
        """Product of the sizes of some digits."""
        found = self._extents.get(axes)
        if found is None:
            found = self._extents[axes] = math.prod([self.sizes[a] for a in axes])
        return found

    def rounds(self, axes: Axes) -> int:
        """Rounds that a gather over some digits takes."""
        digits = [self.digits[a] for a in axes]
        return sum(size - 1 for digit in digits if not digit.flat for size in digit.sizes)

    def latency(self, kind: str, axes: Axes) -> int:
        """Ticks that a collective over some digits takes, however little it sends."""
        steps = 2
        if kind != "slice" and not all([self.digits[a].flat for a in axes]):
            steps = latency_steps(kind, [size for a in axes for size in self.digits[a].sizes])
        return max([self.latencies[a] for a in axes]) * steps

    def pace(self, axes: Axes) -> int:
        """Ticks that a byte takes over some digits."""
        return max([self.paces[a] for a in axes])


class _Facts(NamedTuple):
    """One dim against its goal.

    Attributes:
      extent: into how many pieces it is split.
      agreed: into how many pieces what both have in common is split.
      apart: whether the two differ before either ends.
      losing: whether it has to lose atoms.
      clash: whether it differs without having to lose any.
      crossings: for each class of slow atoms, what has to cross them (see `_Crossing`).
    """

    extent: int
    agreed: int
    apart: bool
    losing: bool
    clash: bool
    crossings: tuple[_Crossing, ...]


class _Crossing(NamedTuple):
    """Slow atoms of one dim that change place.

    Attributes:
      extent: their extent.
      kept: extent of those that the goal uses elsewhere.
      luck: the largest of those whose two places are independent digits.
    """

    extent: int
    kept: int
    luck: int


class Problem:
    """A question, with its costs and its lower bounds.

    Attributes:
      src, dst: digits of each dim, at first and in the end.
      partial: digits that are to be reduced.
      room: for each dim, what its size has in common with the number of devices.
      atoms: every digit; to the search they are atoms.
      fewest_pieces: into how many pieces the value must at least be split: the memory limit.
      unit: bytes of a value of size 1: so many that every collective sends whole bytes.
    """

    def __init__(self, question: Question) -> None:
        self.src, self.dst, self.partial = question.src, question.dst, question.partial
        self.room = question.room
        self.fabric = Fabric(question.digits)
        self.extent = self.fabric.extent
        self.atoms = tuple(range(len(question.digits)))
        self.goal_extents = tuple(self.extent(axes) for axes in self.dst)
        self.goal_atoms = frozenset(a for axes in self.dst for a in axes)
        self.goal_pieces = math.prod(self.goal_extents)
        self.fewest_pieces = min(self.goal_pieces, self.pieces(self.src))
        self._devices = self.extent(self.atoms)
        self.unit = self._devices**2
        self._tile = self._smallest_tile()
        self._facts: list[dict[Axes, _Facts]] = [{} for _ in self.dst]
        self._goal_places = places(self.dst, self.fabric.sizes)
        self._prices: dict[tuple[str, Axes, int], tuple[Line, int]] = {}

    def _smallest_tile(self) -> int:
        """Bytes that one device holds if the value is reduced straight into the smallest tiles."""
        most = math.prod(self.room) * self.extent(self.partial)
        return self.unit // min(most, self._devices)

    def moved(self, before: Dims, after: Dims) -> Axes:
        """Atoms that change place."""
        return moved(before, after, self.fabric.sizes)

    def pieces(self, dims: Dims) -> int:
        """Into how many pieces the value is split."""
        extent = self.extent
        return math.prod([extent(axes) for axes in dims])

    def divides(self, dim: int, axes: Axes) -> bool:
        """Whether a dim divides by some atoms."""
        return self.room[dim] % self.extent(axes) == 0

    def dividing(self, size: int, axes: Axes, pool: Iterable[int]) -> Axes:
        """As many atoms of `pool` to follow `axes` as `size` still divides by."""
        extent, run = self.extent(axes), []
        for a in pool:
            if size % (extent * self.fabric.sizes[a]) == 0:
                extent *= self.fabric.sizes[a]
                run.append(a)
        return tuple(run)

    def price(self, kind: str, axes: Axes, pieces: int) -> tuple[Line, int]:
        """What one step from so many pieces costs, and the pieces after it."""
        found = self._prices.get((kind, axes, pieces))
        if found is None:
            found = self._prices[kind, axes, pieces] = self._price(kind, axes, pieces)
        return found

    def _price(self, kind: str, axes: Axes, pieces: int) -> tuple[Line, int]:
        group, after = self.extent(axes), pieces
        if kind == "slice":
            return Line(0, 0, 0, 1), pieces * group
        if kind == "all_gather":
            after = pieces // group
        elif kind == "reduce_scatter":
            after = pieces * group
        sent = wire_bytes(kind, group, self.unit // pieces, self.unit // after)
        fabric = self.fabric
        return Line(fabric.latency(kind, axes), sent * fabric.pace(axes), sent, 1), after

    def bounds(self, dims: Dims, partial: Axes) -> list[Line]:
        """Lines that no path from here to `dst` can undercut.

        Bytes: a device must receive what its final tile has beyond its present one; what is owed
        must be reduced, at best into the smallest tiles. Collectives: every dim that has to lose
        atoms takes one, so do the dims whose first differing atoms clash, so does a reduction.
        Rounds: in each of them pieces at most double.
        """
        pieces = common = 1
        losing = 0
        clash = apart = False
        facts = [
            self._facts[dim].get(axes) or self._compare(dim, axes) for dim, axes in enumerate(dims)
        ]
        for fact in facts:
            pieces *= fact.extent
            common *= fact.agreed
            apart |= fact.apart
            losing += fact.losing
            clash |= fact.clash
        ways, sent = self.extent(partial), self.unit // self.goal_pieces
        if partial:
            sent += self._tile * (ways - 2)
        elif not apart:
            sent -= -(-self.unit // common)
        launches = max(losing + clash + bool(partial), int(sent > 0))
        if not launches:
            return []
        rounds = self.fabric.rounds(partial)
        if not self.fabric.flat:
            rounds += _doublings(pieces * ways / self.goal_pieces)
        fixed = self.fabric.best_latency * (launches + max(launches, rounds))
        line = Line(fixed, self.fabric.best_pace * sent, sent, launches)
        return self._with_slow_links(line, facts, partial) if self.fabric.slow else [line]

    def _with_slow_links(self, line: Line, facts: Sequence[_Facts], partial: Axes) -> list[Line]:
        """The bound with what slow links add, at least, to the time over the fastest ones.

        The devices with equal coordinates along the atoms that cross hold some of the elements that
        they need; the others have to come in over slow links, in equal shares.
        """
        fabric, tile, lines = self.fabric, self._devices, []
        for number, (pace, latency, atoms) in enumerate(fabric.slow):
            crossings = [fact.crossings[number] for fact in facts]
            extent = math.prod([crossing.extent for crossing in crossings])
            terms = self.extent(tuple([a for a in partial if a in atoms]))
            if extent == terms == 1:
                continue
            kept = math.prod([crossing.kept for crossing in crossings])
            luck = max([crossing.luck for crossing in crossings], default=1)  # a scalar has none
            sent = max(tile * (extent * luck - kept) // (kept * luck), tile * (terms - 1), 0)
            fixed = line.fixed + 2 * (latency - fabric.best_latency)
            growing = line.growing + (pace - fabric.best_pace) * sent
            lines.append(line._replace(fixed=fixed, growing=growing))
        return lines or [line]

    def _compare(self, dim: int, axes: Axes) -> _Facts:
        goal, wanted = self.dst[dim], self.goal_extents[dim]
        extent = self.extent(axes)
        shorter = min(len(axes), len(goal))
        apart = axes[:shorter] != goal[:shorter]
        losing = wanted % extent != 0
        crossings = tuple(self._crossing(dim, axes, slow) for *_, slow in self.fabric.slow)
        facts = _Facts(extent, max(extent, wanted), apart, losing, apart and not losing, crossings)
        self._facts[dim][axes] = facts
        return facts

    def _crossing(self, dim: int, axes: Axes, slow: frozenset[int]) -> _Crossing:
        sizes, extent, kept, luck = self.fabric.sizes, 1, 1, 1
        for a, place in places((axes,), sizes).items():
            goal = self._goal_places.get(a)
            if a not in slow or goal == (dim, place[1]):
                continue
            extent *= sizes[a]
            if goal is not None:
                kept *= sizes[a]
                if goal[0] != dim or _apart(place[1], goal[1], sizes[a]):
                    luck = max(luck, sizes[a])
        return _Crossing(extent, kept, luck)


def _doublings(growth: float) -> int:
    """Rounds that a gather by such a factor takes at least: in each, pieces double."""
    mantissa, exponent = math.frexp(growth)
    return max(exponent - (mantissa == 0.5), 0)


def _apart(first: int, second: int, size: int) -> bool:
    """Whether digits of a size, below so many pieces of one dim, tell nothing of one another."""
    major, minor = min(first, second), max(first, second)
    return minor % (major * size) == 0


def moved(before: Dims, after: Dims, sizes: tuple[int, ...]) -> Axes:
    """Atoms whose place (dim, and extent of what is more major there) differs, ascending."""
    first, second = places(before, sizes), places(after, sizes)
    return tuple(sorted(a for a in first | second if first.get(a) != second.get(a)))


@lru_cache(maxsize=1 << 14)
def places(dims: Dims, sizes: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """For each atom that splits a dim: the dim, and the extent of what is more major there."""
    found = {}
    for dim, axes in enumerate(dims):
        extent = 1
        for a in axes:
            found[a] = (dim, extent)
            extent *= sizes[a]
    return found
