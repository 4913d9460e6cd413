"""Graphs of all shardings of a value over whole axes: numpy finds the cost of all reshards at once.

The shardings that a plan weighs split dims over whole axes. There are few enough of these to write
all of them down, and every step that leads from one to another: then a table of what all reshards
take is a few operations on arrays.

A *unit* is an axis, or the part of one with equal links; of a mesh of few atoms, an atom. A *node*
is a sharding in whole units. A *move* is a step (a collective or slice) from one node to another.
"""

import heapq
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain, groupby, permutations, product
from typing import Any

import numpy as np

from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.mesh.topology import Topology
from spmd.reshard.comm import KINDS, terms_of, wire_bytes
from spmd.reshard.search import EXACT_ATOMS, Answer, Dims, Moves, Names, atom_digits

# Larger graphs are not made; nor larger ones of single atoms, whose paths can be searched for.
MOST_NODES, MOST_EXACT = 4500, 1000

Array = np.ndarray[Any, np.dtype[Any]]


class Atlas:
    """A graph: nodes are a rank's shardings over whole `units` (runs of atoms), edges steps."""

    def __init__(self, units: tuple[Axes, ...], rank: int, mesh: Mesh, topology: Topology) -> None:
        self.units, names = units, Names(units, (), ())  # atoms of each unit
        every = Moves.among([[mesh.atom_sizes[a] for a in unit] for unit in units], rank, mesh.size)
        problem = every.problem
        # Every order of some digits on every dim, and some of the others partial.
        states: list[tuple[Dims, Axes]] = []
        for places in product(range(rank + 2), repeat=len(units)):
            there = [tuple([a for a in problem.digits if places[a] == p]) for p in range(rank + 2)]
            states += [(dims, there[rank]) for dims in product(*map(permutations, there[:rank]))]
        # Dims in atoms, and partial atoms -> number of the node.
        self.nodes = {
            (tuple(map(names.atoms, dims)), tuple(sorted(names.atoms(partial)))): i
            for i, (dims, partial) in enumerate(states)
        }
        extents = [[problem.extent(axes) for axes in dims] for dims, _ in states]
        # Of each node and dim, into how many pieces it is split; of each node, the whole value.
        self.extents = np.array(extents, dtype=np.int64).reshape(len(states), rank)
        self.pieces = self.extents.prod(1)
        self.piece_list: list[int] = self.pieces.tolist()
        number = {state: i for i, state in enumerate(states)}
        out = [list(every.out_of(*state, mesh.size)) for state in states]
        # Every step, in the order of the nodes that they start from.
        self.moves = list(chain(*out))
        self.source = np.repeat(np.arange(len(states)), list(map(len, out)))
        target = [number[move.dims, move.partial] for move in self.moves]
        self.target = np.array(target, dtype=np.int64)
        self.by_target = np.argsort(self.target, kind="stable")  # moves, ordered by their targets
        # Many moves are of one kind and among the same units.
        looks: dict[tuple[str, Axes], int] = {}
        look = [looks.setdefault((m.kind, tuple(sorted(m.axes))), len(looks)) for m in self.moves]
        terms = []
        for kind, axes in looks:
            atoms = names.atoms(axes)
            run, group, *seconds = terms_of(kind, atoms, mesh, topology)
            terms.append((KINDS.index(run), group, sum(1 << a for a in atoms), *seconds))
        columns = np.array(terms or [(0,) * 5]).T[:, look]
        self.atoms = columns[2].astype(np.int64)  # bits of the atoms along which devices exchange
        # Of each move, seconds however small the value is, and for each byte.
        self.latency, self.pace = columns[3:]
        # What decides how many bytes a move sends: its kind as it is run (an index of `KINDS`), how
        # many devices exchange with one another, pieces before and after; and of each move its row.
        pieces = self.pieces[[self.source, self.target]]
        sends = np.concatenate([columns[:2].astype(np.int64), pieces])
        self.sends, self.send = np.unique(sends.T, axis=0, return_inverse=True)


@lru_cache(maxsize=64)
def atlas(mesh: Mesh, topology: Topology, rank: int) -> Atlas | None:
    """Returns the graph of shardings of values of a rank; None if it would have too many nodes."""
    looks = atom_digits(mesh, topology)
    is_small = len(looks) <= EXACT_ATOMS
    units: list[Axes] = []
    for axis in mesh.axis_atoms.values():
        units += [tuple(run) for _, run in groupby(axis, None if is_small else looks.__getitem__)]
    nodes = sum(
        math.comb(len(units), k) * math.perm(max(k + rank - 1, 0), k) * 2 ** (len(units) - k)
        for k in range(len(units) + 1)
    )
    if nodes > (MOST_EXACT if is_small else MOST_NODES):
        return None
    return Atlas(tuple(units), rank, mesh, topology)


class Distances:
    """The costs of all reshards of values of one size: shortest paths in an `Atlas`.

    For each dim, `room` is the greatest common divisor of its size and the number of devices;
    `bits` is the size of the value; no step may use atoms that are `held`. Times are whole ticks,
    so that a sum is the same in whatever order it is added up.
    """

    def __init__(self, atlas: Atlas, room: tuple[int, ...], bits: int, held: Axes) -> None:
        self._atlas = atlas
        dims = tuple([d for d, common in enumerate(room) if common > 1])
        self.names = Names(atlas.units, dims, ((),) * len(room))  # of digits and dims of moves
        common = np.array([room[d] for d in dims], dtype=np.int64)
        self._legal = (common % atlas.extents == 0).all(1)
        legal = self._legal[atlas.source] & self._legal[atlas.target]
        usable = legal & (atlas.atoms & sum(1 << a for a in held) == 0)
        prices = [
            wire_bytes(KINDS[kind], group, -(-bits // (8 * before)), -(-bits // (8 * after)))
            for kind, group, before, after in atlas.sends.tolist()
        ]
        self._sent = np.array(prices, dtype=np.int64)[atlas.send]
        seconds = np.where(usable, atlas.latency + self._sent * atlas.pace, 0)
        self._tick = 2.0 ** (math.frexp(64 * float(seconds.max(initial=1e-9)))[1] - 53)
        self._ticks = np.rint(seconds / self._tick)
        self._usable = np.flatnonzero(usable)
        nodes = np.arange(len(atlas.pieces) + 1)
        self._first = np.searchsorted(atlas.source[self._usable], nodes).tolist()
        self._to = atlas.by_target[usable[atlas.by_target]]
        self._rows: dict[int, Array] = {}
        self.node = cache(self._node)
        self._left = cache(self._ticks_to)
        self._moves_from = cache(self._moves_out_of)

    def _node(self, sharding: Sharding) -> int | None:
        # None if it does not divide the value, or splits a unit.
        dims = tuple([sharding.dims[d] for d in self.names.dims])
        node = self._atlas.nodes.get((dims, sharding.partial))
        whole = node is not None and self._legal[node]
        return node if whole and sum(map(bool, dims)) == sum(map(bool, sharding.dims)) else None

    def table(self, sources: Sequence[int]) -> Array:
        """Returns the seconds from some nodes (rows) to all nodes (columns), or infinity."""
        self.learn(sources)
        return np.array([self._rows[s] for s in sources]) * self._tick

    def learn(self, sources: Sequence[int]) -> None:
        """Finds and keeps the costs of reshards from some nodes (by number) to all others."""
        # Sizes of pieces are let in one by one, the smallest pieces first: a way is in no larger
        # pieces than the larger of its ends. When that has just been let in, and all ways are
        # followed, the distance of two ends is known.
        new = [s for s in dict.fromkeys(sources) if s not in self._rows]
        if not new:
            return
        pieces, moves = self._atlas.pieces, self._to
        source, target = self._atlas.source[moves], self._atlas.target[moves]
        ticks, fewest = self._ticks[moves], np.minimum(pieces[source], pieces[target])
        for start in range(0, len(new), 128):
            some = np.array(new[start : start + 128])
            near = np.full((len(pieces), len(some)), math.inf)
            near[some, np.arange(len(some))] = 0
            found = near.copy()
            for level in np.unique(pieces)[::-1]:
                columns = np.flatnonzero(pieces[some] >= level)
                if not columns.size:
                    continue
                part, let_in = near[:, columns], fewest >= level
                _follow(
                    part, source[let_in], target[let_in], ticks[let_in], fewest[let_in] == level
                )
                near[:, columns] = part
                done = np.ix_(pieces >= level, pieces[some] == level)
                found[done] = near[done]
                found[pieces == level] = near[pieces == level]
            self._rows.update(zip(some.tolist(), map(np.ascontiguousarray, found.T), strict=True))

    def path(self, src: Sharding, dst: Sharding) -> tuple[Answer, float, int] | None:
        """Returns (cheapest moves, seconds, bytes a device sends); None if the graph has none."""
        start, goal = self.node(src), self.node(dst)
        if start is None or goal is None:
            return None
        # A* that knows what is left: only nodes of cheapest paths are looked at, for the one among
        # them that sends the fewest bytes, and of these in the fewest steps.
        pieces = self._atlas.piece_list
        least = min(pieces[start], pieces[goal])
        left = self._left(goal, least)
        best: dict[int, tuple[float, int, int]] = {start: (0.0, 0, 0)}
        came: dict[int, tuple[int, int]] = {}
        heap = [((0.0, 0, 0), best[start], start)]
        while heap:
            _, cost, here = heapq.heappop(heap)
            if here == goal:
                moves = []
                while here != start:
                    here, number = came[here]
                    moves.append(self._atlas.moves[number])
                return tuple(moves[::-1]), cost[0] * self._tick, cost[1]
            time, sent, steps = cost
            for ticks, more, there, number in self._moves_from(here):
                if pieces[there] >= least and left[there] < math.inf:
                    total = (time + ticks, sent + more, steps + 1)
                    if there not in best or total < best[there]:
                        best[there], came[there] = total, (here, number)
                        heapq.heappush(heap, ((total[0] + left[there], *total[1:]), total, there))
        return None

    def _ticks_to(self, goal: int, least: int) -> list[float]:
        """Returns each node's ticks to `goal` by nodes that have `least` or more pieces."""
        atlas, moves = self._atlas, self._usable
        near = np.full((len(atlas.pieces), 1), math.inf)
        near[goal] = 0
        fits = atlas.pieces >= least
        moves = moves[fits[atlas.source[moves]] & fits[atlas.target[moves]]]
        every = np.ones(len(moves), dtype=bool)
        _follow(near, atlas.target[moves], atlas.source[moves], self._ticks[moves], every)
        found: list[float] = near[:, 0].tolist()
        return found

    def _moves_out_of(self, node: int) -> list[tuple[float, int, int, int]]:
        """Returns (ticks, bytes sent, target node, move's number) of usable moves out of a node."""
        at = self._usable[self._first[node] : self._first[node + 1]]
        columns = (self._ticks[at], self._sent[at], self._atlas.target[at], at)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _follow(near: Array, source: Array, target: Array, ticks: Array, look: Array) -> None:
    """Lowers distances in `near` along moves until none gets shorter, as Bellman and Ford do.

    `near` has for each node (rows) its ticks from some others (columns). A move leads from `source`
    to `target`, by which moves are sorted, in some `ticks`; those to `look` at are followed at
    first, later those out of nodes whose ticks have become fewer.
    """
    reached = np.asarray(np.isfinite(near).any(axis=1))
    at = np.flatnonzero(look & reached[source])
    while at.size:
        ends = target[at]
        starts = np.flatnonzero(np.diff(ends, prepend=-1))
        ends = ends[starts]
        best = np.minimum.reduceat(near[source[at]] + ticks[at, None], starts, axis=0)
        nearer = (best < near[ends]).any(1)
        ends = ends[nearer]
        near[ends] = np.minimum(near[ends], best[nearer])
        fresh = np.zeros(len(near), dtype=bool)
        fresh[ends] = True
        at = np.flatnonzero(fresh[source])


@lru_cache(maxsize=128)
def distances(
    room: tuple[int, ...], bits: int, held: Axes, mesh: Mesh, topology: Topology
) -> Distances | None:
    """Returns the `Distances` of values of a `room` and `bits`; None if the atlas is too large."""
    found = atlas(mesh, topology, sum(common > 1 for common in room))
    return None if found is None else Distances(found, room, bits, held)
