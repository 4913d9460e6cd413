"""One reshard as a search problem: what a step costs, and what no path can undercut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from spmd.mesh.sharding import Axes
from spmd.planning.comm import latency_steps, wire_bytes
from spmd.planning.reshard_question import Digit, Dims, Question

FEMTO = 1e15
"""Costs are summed as whole femtoseconds: order cannot matter, and ties are ties."""


class Fabric:
    """The digits of a question, with what is asked of them again and again."""

    def __init__(self, digits: tuple[Digit, ...]) -> None:
        self.digits = digits
        self.sizes = tuple(math.prod(digit.sizes) for digit in digits)
        self.latencies = [digit.latency for digit in digits]
        self.paces = [1 / digit.bandwidth for digit in digits]
        self.best_latency = min(self.latencies, default=0.0)
        self.best_pace = min(self.paces, default=0.0)
        self.slow = self._slow_classes()
        self._extents: dict[Axes, int] = {}
        self._terms: dict[tuple[str, Axes], tuple[int, float, float]] = {}

    def _slow_classes(self) -> list[tuple[float, float, frozenset[int]]]:
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
        return sum(size - 1 for a in axes for size in self.digits[a].sizes)

    def cost(self, kind: str, axes: Axes, before: int, after: int) -> tuple[int, int]:
        """Femtoseconds (rounded up) and bytes of a collective on local buffers of so many bytes."""
        terms = self._terms.get((kind, axes))
        if terms is None:
            steps = latency_steps(kind, [size for a in axes for size in self.digits[a].sizes])
            latency = max(self.latencies[a] for a in axes) * steps
            pace = max(self.paces[a] for a in axes)
            terms = self._terms[kind, axes] = (self.extent(axes), latency, pace)
        sent = wire_bytes(kind, terms[0], before, after)
        return math.ceil((terms[1] + sent * terms[2]) * FEMTO), sent


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


@lru_cache(maxsize=1 << 10)
def fabric_of(digits: tuple[Digit, ...]) -> Fabric:
    """The `Fabric` of some digits, made once."""
    return Fabric(digits)


class Problem:
    """A question about a value of some size.

    Attributes:
      src, dst: digits of each dim, at first and in the end.
      partial: digits that are to be reduced.
      room: for each dim, what its size has in common with the number of devices.
      atoms: every digit; to the search they are atoms.
      bits: of the whole value.
      fewest_pieces: into how many pieces the value must at least be split: the memory limit.
    """

    def __init__(self, question: Question, bits: int) -> None:
        self.src, self.dst, self.partial = question.src, question.dst, question.partial
        self.room, self.bits = question.room, bits
        self.fabric = fabric_of(question.digits)
        self.extent = self.fabric.extent
        self.atoms = tuple(range(len(question.digits)))
        self.goal_extents = tuple(self.extent(axes) for axes in self.dst)
        self.goal_atoms = frozenset(a for axes in self.dst for a in axes)
        self.goal_pieces = math.prod(self.goal_extents)
        self.goal_bytes = self.local_bytes(self.goal_pieces)
        self.fewest_pieces = min(self.goal_pieces, self.pieces(self.src))
        self._devices = self.extent(self.atoms)
        self._tile_bytes = self._smallest_tile()
        self._facts: list[dict[Axes, _Facts]] = [{} for _ in self.dst]
        self._goal_places = places(self.dst, self.fabric.sizes)

    def _smallest_tile(self) -> float:
        """Bytes that one device holds if the value is reduced straight into the smallest tiles."""
        most = math.prod(self.room) * self.extent(self.partial)
        return self.bits / 8 / min(most, self._devices)

    def pieces(self, dims: Dims) -> int:
        """Into how many pieces the value is split."""
        extent = self.extent
        return math.prod([extent(axes) for axes in dims])

    def local_bytes(self, pieces: int) -> int:
        """Bytes of one device's piece when the value is split into `pieces`."""
        return -(-self.bits // (8 * pieces))

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

    def bound(self, dims: Dims, partial: Axes) -> tuple[int, int, int]:
        """Femtoseconds, bytes and collectives that no path from here to `dst` can undercut.

        Bytes: a device must receive what its final tile has beyond its present one; what is owed
        must be reduced, at best into the smallest tiles. Collectives: every dim that has to lose
        atoms takes one, so do the dims whose first differing atoms clash, so does a reduction.
        Rounds: at least the binary logarithm of the factor by which pieces must grow.
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
        ways = self.extent(partial) if partial else 1
        if partial:
            sent = int(self.goal_bytes + self._tile_bytes * (ways - 2))
        else:
            sent = self.goal_bytes - (0 if apart else self.local_bytes(common))
        launches = max(losing + clash + bool(partial), sent > 0)
        if not launches:
            return 0, 0, 0
        growth = pieces * ways / self.goal_pieces
        rounds = math.log2(growth) if growth > 1 else 0.0
        fabric = self.fabric
        rounds += fabric.rounds(partial)
        seconds = fabric.best_latency * (launches + max(launches, rounds))
        seconds += fabric.best_pace * sent
        if fabric.slow:
            seconds += self._slow_seconds(facts, partial)
        return int(seconds * FEMTO), sent, launches

    def _slow_seconds(self, facts: Sequence[_Facts], partial: Axes) -> float:
        """What slow links add, at least, to the time of the same bytes over the fastest ones.

        The devices with equal coordinates along the atoms that cross hold some of the elements that
        they need; the others have to come in over slow links, in equal shares.
        """
        value = self.bits / 8 / self._devices
        most = 0.0
        for number, (pace, latency, atoms) in enumerate(self.fabric.slow):
            crossings = [fact.crossings[number] for fact in facts]
            extent = math.prod([crossing.extent for crossing in crossings])
            terms = self.extent(tuple(a for a in partial if a in atoms))
            if extent == terms == 1:
                continue
            kept = math.prod([crossing.kept for crossing in crossings])
            luck = max((crossing.luck for crossing in crossings), default=1)  # a scalar has none
            sent = value * max(extent / kept - 1 / luck, terms - 1, 0)
            more = (pace - self.fabric.best_pace) * sent
            most = max(most, more + 2 * (latency - self.fabric.best_latency))
        return most

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

    def price(self, kind: str, axes: Axes, pieces: int) -> tuple[int, int, int]:
        """Femtoseconds and bytes of one step from so many pieces, and the pieces after it."""
        if kind == "slice":
            return 0, 0, pieces * self.extent(axes)
        after = pieces
        if kind == "all_gather":
            after = pieces // self.extent(axes)
        elif kind == "reduce_scatter":
            after = pieces * self.extent(axes)
        cost = self.fabric.cost(kind, axes, self.local_bytes(pieces), self.local_bytes(after))
        return (*cost, after)


def _apart(first: int, second: int, size: int) -> bool:
    """Whether digits of a size, below so many pieces of one dim, tell nothing of one another."""
    major, minor = min(first, second), max(first, second)
    return minor % (major * size) == 0


def moved(before: Dims, after: Dims, sizes: tuple[int, ...]) -> Axes:
    """Atoms whose place (dim, and extent of what is more major there) differs, ascending."""
    first, second = places(before, sizes), places(after, sizes)
    return tuple(sorted(a for a in first | second if first.get(a) != second.get(a)))


def places(dims: Dims, sizes: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """For each atom that splits a dim: the dim, and the extent of what is more major there."""
    found = {}
    for dim, axes in enumerate(dims):
        extent = 1
        for a in axes:
            found[a] = (dim, extent)
            extent *= sizes[a]
    return found
