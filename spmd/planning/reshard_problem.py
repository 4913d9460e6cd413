"""One reshard as a search problem: legality, what a step costs, and what no path can undercut."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from spmd.errors import LegalityError
from spmd.ir.types import TensorType, dtype_bits
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, format_sharding, local_shape
from spmd.mesh.topology import Link, Topology
from spmd.planning.comm import latency_steps, wire_bytes

FEMTO = 1e15
"""Costs are summed as whole femtoseconds: order cannot matter, and ties are ties."""

Dims = tuple[Axes, ...]


class Fabric:
    """A mesh and its links, with what is asked of them again and again."""

    def __init__(self, mesh: Mesh, topology: Topology) -> None:
        self.mesh = mesh
        self.topology = topology
        self.sizes = mesh.atom_sizes
        links = [_searched(link, topology) for link in topology.atom_links(mesh)]
        self.latencies = [link.latency for link in links]
        self.paces = [1 / link.bandwidth for link in links]
        self.flat = bool(topology.chip.measured)
        self.best_latency = min(self.latencies, default=0.0)
        self.best_pace = min(self.paces, default=0.0)
        self.slow = self._slow_classes()
        self._extents: dict[Axes, int] = {}
        self._terms: dict[tuple[str, Axes], tuple[int, float, float]] = {}

    def _slow_classes(self) -> list[tuple[float, float, frozenset[int]]]:
        """For each pace above the best: it, the least latency at it or worse, and those atoms."""
        classes = []
        for pace in sorted(set(self.paces) - {self.best_pace}):
            atoms = frozenset(a for a, other in enumerate(self.paces) if other >= pace)
            classes.append((pace, min(self.latencies[a] for a in atoms), atoms))
        return classes

    def extent(self, axes: Axes) -> int:
        """Product of the sizes of some atoms."""
        found = self._extents.get(axes)
        if found is None:
            found = self._extents[axes] = math.prod([self.sizes[a] for a in axes])
        return found

    def cost(self, kind: str, axes: Axes, before: int, after: int) -> tuple[int, int]:
        """Femtoseconds (rounded up) and bytes of a collective on local buffers of so many bytes."""
        terms = self._terms.get((kind, axes))
        if terms is None:
            steps = 2 if self.flat else latency_steps(kind, [self.sizes[a] for a in axes])
            latency = max(self.latencies[a] for a in axes) * steps
            pace = max(self.paces[a] for a in axes)
            terms = self._terms[kind, axes] = (self.extent(axes), latency, pace)
        sent = wire_bytes(kind, terms[0], before, after)
        return math.ceil((terms[1] + sent * terms[2]) * FEMTO), sent


def _searched(link: Link, topology: Topology) -> Link:
    """The link that a search reckons with: one pace for all kinds, or no bound is worth its name.

    Where kinds of collectives were measured one by one, that is about what they took, and as much
    for few devices as for many (two steps each): so the search finds the fewest bytes in the fewest
    collectives, and only the path that it found is priced by kind.
    """
    measured = topology.chip.measured
    if link != topology.chip.ici or not measured:
        return link
    latency = statistics.median(m.latency for m in measured)
    return Link(statistics.median(m.bandwidth for m in measured), latency / 2)


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


@lru_cache(maxsize=64)
def fabric_of(mesh: Mesh, topology: Topology) -> Fabric:
    """The `Fabric` of a mesh, made once."""
    return Fabric(mesh, topology)


class Problem:
    """A pair of shardings of one type.

    Attributes:
      shape: global shape; a dim that does not divide is padded to equal pieces.
      frozen: the dims that do not divide, which no step touches.
      atoms: the atoms that steps may touch.
      bits: of the whole value, as if it had the type's, unless it is said to have others.
      fewest_pieces: into how many pieces the value must at least be split: the memory limit.
    """

    def __init__(
        self,
        src: Sharding,
        dst: Sharding,
        type_: TensorType,
        fabric: Fabric,
        barred: Axes = (),
        bits: int | None = None,
    ) -> None:
        self.src, self.dst, self.type, self.fabric = src, dst, type_, fabric
        self.barred = barred
        self.extent = fabric.extent
        self._check()
        self.goal_extents = tuple(self.extent(axes) for axes in dst.dims)
        self.frozen = self._frozen_dims()
        pieces = local_shape(type_.shape, src, fabric.mesh)
        self.shape = tuple(self.extent(a) * n for a, n in zip(src.dims, pieces, strict=True))
        held = {a for dim in self.frozen for a in src.dims[dim]}.union(dst.partial, barred)
        self.atoms = tuple(a for a in range(len(fabric.sizes)) if a not in held)
        self.goal_atoms = frozenset(a for axes in dst.dims for a in axes)
        self.bits = math.prod(self.shape) * dtype_bits(type_.dtype) if bits is None else bits
        self.goal_pieces = math.prod(self.goal_extents)
        self.goal_bytes = self.local_bytes(self.goal_pieces)
        self.fewest_pieces = min(self.goal_pieces, self.pieces(src.dims))
        self._tile_bytes = self._smallest_tile()
        self._facts: list[dict[Axes, _Facts]] = [{} for _ in dst.dims]
        self._goal_places = places(dst.dims, fabric.sizes)
        self._devices = fabric.mesh.size // self.extent(dst.partial)

    def _check(self) -> None:
        src, dst, rank = self.src, self.dst, len(self.type.shape)
        for sharding in (src, dst):
            atoms = [a for axes in sharding.dims for a in axes] + list(sharding.partial)
            if len(sharding.dims) != rank or len(set(atoms)) != len(atoms):
                self._refuse("use every atom at most once and give every dim its atoms")
        if not set(dst.partial) <= set(src.partial) or (dst.partial and dst.kind != src.kind):
            self._refuse("leave partial only what is partial already")

    def _frozen_dims(self) -> frozenset[int]:
        extents = [self.extent(axes) for axes in self.src.dims]
        ends = zip(self.type.shape, extents, self.goal_extents, strict=True)
        frozen = frozenset(dim for dim, (n, a, b) in enumerate(ends) if n % a or n % b)
        if any(self.src.dims[dim] != self.dst.dims[dim] for dim in frozen):
            self._refuse("pad dims that don't divide before resharding them")
        return frozen

    def _refuse(self, fix: str) -> None:
        raise LegalityError(
            f"no reshard of {self.type} leads from one sharding to the other",
            actual=format_sharding(self.src, self.fabric.mesh),
            required=format_sharding(self.dst, self.fabric.mesh),
            fix=fix,
        )

    def _smallest_tile(self) -> float:
        """Bytes that one device holds if the value is reduced straight into the smallest tiles."""
        everything = math.prod(self.fabric.sizes[a] for a in self.atoms)
        most = math.prod(
            self.goal_extents[dim] if dim in self.frozen else math.gcd(size, everything**2)
            for dim, size in enumerate(self.shape)
        )
        held = math.prod(self.goal_extents[dim] for dim in self.frozen)
        owed = self.extent(self.owed(self.src.partial))
        return self.bits / 8 / min(most * owed, everything * held)

    def owed(self, partial: Axes) -> Axes:
        """Partial atoms that are still to be reduced."""
        kept = self.dst.partial
        return tuple(a for a in partial if a not in kept) if kept else partial

    def pieces(self, dims: Dims) -> int:
        """Into how many pieces the value is split."""
        extent = self.extent
        return math.prod([extent(axes) for axes in dims])

    def local_bytes(self, pieces: int) -> int:
        """Bytes of one device's piece when the value is split into `pieces`."""
        return -(-self.bits // (8 * pieces))

    def divides(self, dim: int, axes: Axes) -> bool:
        """Whether a dim divides by some atoms."""
        return self.shape[dim] % self.extent(axes) == 0

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
        owed = self.owed(partial)
        ways = self.extent(owed) if owed else 1
        if owed:
            sent = int(self.goal_bytes + self._tile_bytes * (ways - 2))
        else:
            sent = self.goal_bytes - (0 if apart else self.local_bytes(common))
        launches = max(losing + clash + bool(owed), sent > 0)
        if not launches:
            return 0, 0, 0
        growth = pieces * ways / self.goal_pieces
        rounds = math.log2(growth) if growth > 1 else 0.0
        fabric = self.fabric
        for a in owed:
            rounds += fabric.sizes[a] - 1
        rounds = launches if fabric.flat else max(launches, rounds)
        seconds = fabric.best_latency * (launches + rounds)
        seconds += fabric.best_pace * sent
        if fabric.slow:
            seconds += self._slow_seconds(facts, owed)
        return int(seconds * FEMTO), sent, launches

    def _slow_seconds(self, facts: Sequence[_Facts], owed: Axes) -> float:
        """What slow links add, at least, to the time of the same bytes over the fastest ones.

        The devices with equal coordinates along the atoms that cross hold some of the elements that
        they need; the others have to come in over slow links, in equal shares.
        """
        value = self.bits / 8 / self._devices
        most = 0.0
        for number, (pace, latency, atoms) in enumerate(self.fabric.slow):
            crossings = [fact.crossings[number] for fact in facts]
            extent = math.prod([crossing.extent for crossing in crossings])
            terms = self.extent(tuple(a for a in owed if a in atoms))
            if extent == terms == 1:
                continue
            kept = math.prod([crossing.kept for crossing in crossings])
            luck = max((crossing.luck for crossing in crossings), default=1)  # a scalar has none
            sent = value * max(extent / kept - 1 / luck, terms - 1, 0)
            more = (pace - self.fabric.best_pace) * sent
            most = max(most, more + 2 * (latency - self.fabric.best_latency))
        return most

    def _compare(self, dim: int, axes: Axes) -> _Facts:
        goal, wanted = self.dst.dims[dim], self.goal_extents[dim]
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
                if goal[0] != dim or len(set(sizes)) == 1:
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
