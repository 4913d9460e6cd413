"""All legal shardings of a tensor, all steps between them, and Dijkstra: the slow exact answer."""

import heapq
import math
from collections.abc import Iterator
from itertools import combinations, permutations

from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, is_legal, local_shape
from spmd.mesh.topology import Topology
from spmd.reshard.comm import collective_seconds, wire_bytes

Edge = tuple[int, float, int, str]
"""Target, seconds, bytes, kind."""


def ordered_subsets(pool: Axes, least: int = 0) -> Iterator[Axes]:
    for count in range(least, len(pool) + 1):
        yield from permutations(pool, count)


def all_shardings(type_: TensorType, mesh: Mesh, partial: bool = True) -> list[Sharding]:
    """Every legal sharding, partial ones (of kind add) among them if wanted."""
    atoms = tuple(range(len(mesh.atoms)))

    def dims(rank: int, pool: Axes) -> Iterator[tuple[Axes, ...]]:
        if rank == 0:
            yield ()
            return
        for axes in ordered_subsets(pool):
            for rest in dims(rank - 1, tuple(a for a in pool if a not in axes)):
                yield (axes, *rest)

    found = []
    for count in range(len(atoms) + 1 if partial else 1):
        for owed in combinations(atoms, count):
            for tiling in dims(type_.rank, tuple(a for a in atoms if a not in owed)):
                found.append(Sharding(tiling).with_partial(owed, "add"))
    return [s for s in found if is_legal(s, type_.shape, mesh)]


class Oracle:
    """The whole graph of one tensor type on one mesh."""

    def __init__(self, type_: TensorType, mesh: Mesh, topology: Topology, partial: bool = True):
        self.type, self.mesh, self.topology = type_, mesh, topology
        self.nodes = all_shardings(type_, mesh, partial)
        self.index = {sharding: i for i, sharding in enumerate(self.nodes)}
        self.local = [local_shape(type_.shape, s, mesh) for s in self.nodes]
        self.bytes = [TensorType(shape, type_.dtype).bytes for shape in self.local]
        self.edges = [list(self._edges(i)) for i in range(len(self.nodes))]
        self._distances: dict[tuple[int, int], list[tuple[float, int]]] = {}

    def distance(self, src: Sharding, dst: Sharding) -> tuple[float, int]:
        """Seconds and bytes of the cheapest path whose buffers fit in the larger end."""
        i, j = self.index[src], self.index[dst]
        limit = max(self.bytes[i], self.bytes[j])
        if (i, limit) not in self._distances:
            self._distances[i, limit] = self._dijkstra(i, limit)
        return self._distances[i, limit][j]

    def _dijkstra(self, start: int, limit: int) -> list[tuple[float, int]]:
        best = [(math.inf, 0)] * len(self.nodes)
        best[start] = (0.0, 0)
        heap = [(0.0, 0, start)]
        while heap:
            seconds, sent, i = heapq.heappop(heap)
            if (seconds, sent) > best[i]:
                continue
            for j, time, more, _ in self.edges[i]:
                cost = (seconds + time, sent + more)
                if self.bytes[j] <= limit and cost < best[j]:
                    best[j] = cost
                    heapq.heappush(heap, (*cost, j))
        return best

    def _edges(self, i: int) -> Iterator[Edge]:
        for kind, after, axes in self._steps(self.nodes[i]):
            j = self.index.get(after)
            if j is not None:
                before, there = self.bytes[i], self.bytes[j]
                seconds = collective_seconds(kind, axes, before, there, self.mesh, self.topology)
                yield j, seconds, wire_bytes(kind, self.mesh.extent(axes), before, there), kind

    def _steps(self, here: Sharding) -> Iterator[tuple[str, Sharding, Axes]]:
        atoms = range(len(self.mesh.atoms))
        unused = tuple(a for a in atoms if a not in here.used)
        for dim, axes in enumerate(here.dims):
            for run in ordered_subsets(unused, 1):
                yield "slice", self._with(here, {dim: axes + run}), run
            for keep in range(len(axes)):
                run = axes[keep:]
                yield "all_gather", self._with(here, {dim: axes[:keep]}), run
                for other, more in enumerate(here.dims):
                    if other != dim:
                        moved = {dim: axes[:keep], other: more + run}
                        yield "all_to_all", self._with(here, moved), run
            for run in ordered_subsets(here.partial, 1):
                yield "reduce_scatter", self._with(here, {dim: axes + run}, run), run
        for count in range(1, len(here.partial) + 1):
            for gone in combinations(here.partial, count):
                yield "all_reduce", self._with(here, {}, gone), gone
        yield from self._permutes(here)

    def _permutes(self, here: Sharding) -> Iterator[tuple[str, Sharding, Axes]]:
        shape = self.local[self.index[here]]
        for j, after in enumerate(self.nodes):
            if self.local[j] == shape and after.partial == here.partial and after != here:
                places = enumerate(zip(self._places(here), self._places(after), strict=True))
                yield "collective_permute", after, tuple(a for a, (x, y) in places if x != y)

    def _places(self, sharding: Sharding) -> list[tuple[int, int] | None]:
        """For each atom: the dim that it splits and the extent of what is more major there."""
        found: list[tuple[int, int] | None] = [None] * len(self.mesh.atoms)
        for dim, axes in enumerate(sharding.dims):
            for k, a in enumerate(axes):
                found[a] = (dim, self.mesh.extent(axes[:k]))
        return found

    def _with(self, here: Sharding, dims: dict[int, Axes], gone: Axes = ()) -> Sharding:
        tiling = tuple(dims.get(dim, axes) for dim, axes in enumerate(here.dims))
        left = [a for a in here.partial if a not in gone]
        return Sharding(tiling).with_partial(left, here.kind)
