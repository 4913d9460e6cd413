"""`reshard`: the cheapest collectives that take a value from one sharding to another.

A shortest path over shardings, weighted by predicted seconds, none of whose buffers exceeds the
larger of the two ends. Rink et al. 2021, "Memory-efficient array redistribution through portable
collective communication", show that such a path always exists when axes are cut into primes; here
the reductions of partial values and the links of the machine are part of the same search.

    [{data}, {model}]  ->  [{model}, {}]

    slice                 nothing moves: a tile is cut further
    all_gather            the minor atoms of one dim are dropped
    all_to_all            the minor atoms of one dim move to the minor end of another
    collective_permute    tiles keep their shape and change place
    reduce_scatter        partial atoms become the minor atoms of a dim
    all_reduce            partial atoms vanish
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations, permutations
from typing import NamedTuple

from spmd.errors import LegalityError
from spmd.ir.types import TensorType, dtype_bits
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, format_sharding, local_shape
from spmd.mesh.topology import Topology
from spmd.planning.comm import collective_seconds, latency_steps, wire_bytes


class Step(NamedTuple):
    """One collective, or one slice.

    Attributes:
      kind: one of `comm.KINDS`.
      before: sharding that it starts from.
      after: sharding that it leads to.
      axes: atoms along which devices exchange (or that a slice cuts by), in group order, major to
        minor.
      dims: slice, all_gather, reduce_scatter: `(dim,)`; all_to_all: `(dim that the axes leave and
        that is concatenated, dim that they go to and that is split)`; otherwise `()`.
    """

    kind: str
    before: Sharding
    after: Sharding
    axes: Axes
    dims: tuple[int, ...]


class Path(NamedTuple):
    """Steps in order, with their predicted seconds and the bytes that each device sends."""

    steps: tuple[Step, ...]
    seconds: float
    bytes: int


@lru_cache(maxsize=1 << 16)
def reshard(
    src: Sharding, dst: Sharding, type_: TensorType, mesh: Mesh, topology: Topology
) -> Path:
    """The cheapest path from one sharding of a value to another.

    Fewest predicted seconds; then fewest bytes, then fewest steps. Exact on meshes of up to
    `_EXACT_ATOMS` atoms; on larger ones, a search over the moves that lead towards `dst`.

    Args:
      src: sharding that the value has.
      dst: sharding that is wanted. It may stay partial over some of `src`'s partial atoms.
      type_: global type. A dim that does not divide by its atoms must have the same atoms in `src`
        and `dst`; it stays as it is.
      mesh: the mesh of both shardings.
      topology: the links.

    Returns:
      A `Path`, empty when `src == dst`.

    Raises:
      LegalityError: a sharding that is not legal, or a full value that is to become partial.

    Example:
      >>> mesh = Mesh(None, (4, 2), ("data", "model"))
      >>> src, dst = (parse_sharding(text, mesh) for text in ("[{data}, {}]", "[{}, {data}]"))
      >>> [step.kind for step in reshard(src, dst, type_, mesh, Topology("h200:8")).steps]
      ['all_to_all']
    """
    if src == dst:
        return Path((), 0.0, 0)
    problem = _Problem(src, dst, type_, _fabric(mesh, topology))
    return problem.solve()


def permute_pairs(before: Sharding, after: Sharding, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """Who sends to whom in a collective-permute: (source, target) for every device, by target.

    Devices are positions in the flattened mesh. A device that already holds what it needs keeps it;
    replicas share out the rest in order, within the groups of the atoms that change place.
    """
    axes = _moved(before, after, mesh.atom_sizes)
    fixed = [a for a in range(len(mesh.atoms)) if a not in axes]

    def wanted(position: int, sharding: Sharding) -> tuple[int, ...]:
        tile = [mesh.coordinate(position, axes) for axes in sharding.dims]
        return (*tile, *(mesh.coordinate(position, [a]) for a in fixed))

    holders: dict[tuple[int, ...], list[int]] = {}
    for position in range(mesh.size):
        holders.setdefault(wanted(position, before), []).append(position)
    source: dict[int, int] = {}
    for position in range(mesh.size):
        if wanted(position, before) == wanted(position, after):
            source[position] = position
            holders[wanted(position, before)].remove(position)
    for position in range(mesh.size):
        if position not in source:
            source[position] = holders[wanted(position, after)].pop(0)
    return tuple((source[target], target) for target in range(mesh.size))


def _moved(before: Sharding, after: Sharding, sizes: tuple[int, ...]) -> Axes:
    """Atoms whose place (dim and extent of what is more major there) differs, ascending."""
    places = []
    for sharding in (before, after):
        place: dict[int, tuple[int, int]] = {}
        for dim, axes in enumerate(sharding.dims):
            extent = 1
            for a in axes:
                place[a] = (dim, extent)
                extent *= sizes[a]
        places.append(place)
    first, second = places
    return tuple(sorted(a for a in {*first, *second} if first.get(a) != second.get(a)))


# ---------------------------------------------------------------------------------------------
# The problem: sizes, costs and the lower bound.

_EXACT_ATOMS = 3
"""With this many atoms or fewer every legal move is tried, so that the path is exactly optimal."""

_BUDGET = 400
"""Shardings that the directed search expands before it settles for less than optimal."""

_FEMTO = 1e15
"""Costs are summed as whole femtoseconds: order cannot matter, and ties are ties."""

Dims = tuple[Axes, ...]
Cost = tuple[int, int, int]
"""Femtoseconds, bytes, steps."""


class _Fabric:
    """A mesh and its links, with what is asked of them again and again."""

    def __init__(self, mesh: Mesh, topology: Topology) -> None:
        links = topology.atom_links(mesh)
        self.mesh = mesh
        self.topology = topology
        self.sizes = mesh.atom_sizes
        self.links = links
        self.best_latency = min((link.latency for link in links), default=0.0)
        self.best_pace = min((1 / link.bandwidth for link in links), default=0.0)
        self._extents: dict[Axes, int] = {}
        self._terms: dict[tuple[str, Axes], tuple[int, float, float]] = {}

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
            latency = max(self.links[a].latency for a in axes)
            steps = latency_steps(kind, [self.sizes[a] for a in axes])
            pace = max(1 / self.links[a].bandwidth for a in axes)
            terms = self._terms[kind, axes] = (self.extent(axes), latency * steps, pace)
        sent = wire_bytes(kind, terms[0], before, after)
        return math.ceil((terms[1] + sent * terms[2]) * _FEMTO), sent


@lru_cache(maxsize=64)
def _fabric(mesh: Mesh, topology: Topology) -> _Fabric:
    return _Fabric(mesh, topology)


class _Problem:
    """One pair of shardings of one type: legality, costs and a lower bound for the search."""

    def __init__(self, src: Sharding, dst: Sharding, type_: TensorType, fabric: _Fabric) -> None:
        self.src, self.dst, self.type, self.fabric = src, dst, type_, fabric
        extent = fabric.extent
        self.goal_extents = tuple(extent(axes) for axes in dst.dims)
        self.frozen = self._frozen_dims()
        self.shape = tuple(
            extent(axes) * piece
            for axes, piece in zip(
                src.dims, local_shape(type_.shape, src, fabric.mesh), strict=True
            )
        )
        held = {a for dim in self.frozen for a in src.dims[dim]} | set(dst.partial)
        self.atoms = tuple(a for a in range(len(fabric.sizes)) if a not in held)
        self.goal_atoms = frozenset(a for axes in dst.dims for a in axes)
        self.bits = math.prod(self.shape) * dtype_bits(type_.dtype)
        self.goal_extent = math.prod(self.goal_extents)
        self.least_extent = min(self.goal_extent, math.prod(extent(axes) for axes in src.dims))
        self.goal_bytes = self.local_bytes(self.goal_extent)
        self.tile_bytes = self._smallest_term()

    def _frozen_dims(self) -> frozenset[int]:
        """Dims that do not divide, which must agree; and the checks of both ends."""
        src, dst, shape = self.src, self.dst, self.type.shape
        used = [a for axes in dst.dims for a in axes] + list(dst.partial)
        fits = len(src.dims) == len(dst.dims) == len(shape) and len(set(used)) == len(used)
        fits = fits and set(dst.partial) <= set(src.partial)
        fits = fits and (not dst.partial or dst.kind == src.kind)
        frozen = frozenset(
            dim
            for dim, size in enumerate(shape)
            if fits
            and (size % self.goal_extents[dim] or size % self.fabric.extent(src.dims[dim]))
        )
        if not fits or any(src.dims[dim] != dst.dims[dim] for dim in frozen):
            mesh = self.fabric.mesh
            raise LegalityError(
                f"no reshard of {self.type} leads from one sharding to the other",
                actual=format_sharding(src, mesh),
                required=format_sharding(dst, mesh),
                fix="pad dims that don't divide, and leave partial only what is partial",
            )
        return frozen

    def _smallest_term(self) -> float:
        """Bytes of the smallest tile that one device can hold once everything is reduced."""
        sizes = self.fabric.sizes
        everything = math.prod(sizes[a] for a in self.atoms)
        pieces = 1
        for dim, size in enumerate(self.shape):
            pieces *= (
                self.goal_extents[dim] if dim in self.frozen else math.gcd(size, everything**2)
            )
        held = math.prod(self.goal_extents[dim] for dim in self.frozen)
        owed = self.fabric.extent(self.owed(self.src.partial))
        return self.bits / 8 / min(pieces * owed, everything * held)

    def owed(self, partial: Axes) -> Axes:
        """Partial atoms that are still to be reduced."""
        kept = self.dst.partial
        return tuple(a for a in partial if a not in kept) if kept else partial

    def local_bytes(self, extent: int) -> int:
        """Bytes of one device's piece when the dims are split into `extent` pieces in all."""
        return -(-self.bits // (8 * extent))

    def extent(self, dims: Dims) -> int:
        """Into how many pieces the value is split."""
        extent = self.fabric.extent
        return math.prod([extent(axes) for axes in dims])

    def divides(self, dim: int, axes: Axes) -> bool:
        """Whether a dim divides by some atoms."""
        return self.shape[dim] % self.fabric.extent(axes) == 0

    def bound(self, dims: Dims, partial: Axes) -> tuple[int, int]:
        """Femtoseconds and bytes that no path from here to `dst` can undercut.

        Bytes: a device must receive what its final tile has beyond its present one; what is owed
        must be reduced, at best scattered over all devices. Messages: every dim that has to lose
        atoms takes a collective of its own, a dim whose first differing atoms clash takes one, and
        so does a reduction; rounds are at least the binary logarithm of what has to be gathered.
        """
        extent = self.fabric.extent
        total = union = 1
        launches = 0
        clash = apart = False
        for axes, goal, goal_extent in zip(dims, self.dst.dims, self.goal_extents, strict=True):
            if axes == goal:
                total *= goal_extent
                union *= goal_extent
                continue
            pieces = extent(axes)
            total *= pieces
            union *= max(pieces, goal_extent)
            common = min(len(axes), len(goal))
            differ = axes[:common] != goal[:common]
            apart |= differ
            if goal_extent % pieces:
                launches += 1
            elif differ:
                clash = True
        owed = self.owed(partial)
        ways = extent(owed)
        if owed:
            sent = int(self.goal_bytes + self.tile_bytes * (ways - 2))
        else:
            sent = self.goal_bytes - (0 if apart else self.local_bytes(union))
        launches = max(launches + clash + bool(owed), int(sent > 0))
        if not launches:
            return 0, 0
        growth = total * ways / self.goal_extent
        rounds = sum([self.fabric.sizes[a] - 1 for a in owed])
        rounds += math.log2(growth) if growth > 1 else 0
        fabric = self.fabric
        seconds = fabric.best_latency * (launches + max(launches, rounds))
        return int((seconds + fabric.best_pace * sent) * _FEMTO), sent

    def price(self, move: _Move, dims: Dims) -> tuple[int, int]:
        """Femtoseconds and bytes of one move that starts from `dims`."""
        if move.kind == "slice":
            return 0, 0
        before = self.local_bytes(self.extent(dims))
        after = self.local_bytes(self.extent(move.dims))
        return self.fabric.cost(move.kind, move.axes, before, after)

    def solve(self) -> Path:
        """Straight there if that is provably best, else by search."""
        floor = self.bound(self.src.dims, self.src.partial)
        straight = self._straight_path()
        if straight is not None and self._is_tight(straight, floor):
            return self._path(straight)
        found = _search(self, _Directed(self), straight, _BUDGET)
        if len(self.fabric.sizes) <= _EXACT_ATOMS and not (
            found is not None and self._is_tight(found, floor)
        ):
            found = _search(self, _Exhaustive(self), found, None)
        if found is None:
            found = _search(self, _Directed(self), None, None, greed=4)
        if found is None:
            raise LegalityError(
                f"no path of collectives found for {self.type}",
                actual=format_sharding(self.src, self.fabric.mesh),
                required=format_sharding(self.dst, self.fabric.mesh),
            )
        return self._path(found)

    def _straight_path(self) -> list[_Move] | None:
        moves = _straight(self)
        if moves and min(self.extent(move.dims) for move in moves) >= self.least_extent:
            return moves
        return None

    def total(self, moves: Iterable[_Move]) -> Cost:
        """Cost of several moves in a row, from `src`."""
        time = sent = count = 0
        dims = self.src.dims
        for move in moves:
            step_time, step_sent = self.price(move, dims)
            time, sent, count = time + step_time, sent + step_sent, count + 1
            dims = move.dims
        return time, sent, count

    def _is_tight(self, moves: list[_Move], floor: tuple[int, int]) -> bool:
        time, sent, count = self.total(moves)
        return time - floor[0] <= 2 * count and sent <= floor[1]

    def _path(self, moves: list[_Move]) -> Path:
        """Moves as steps, with the cost model's own figures."""
        steps: list[Step] = []
        here, seconds, sent = self.src, 0.0, 0
        mesh, topology = self.fabric.mesh, self.fabric.topology
        for move in moves:
            there = Sharding(move.dims, move.partial, self.src.kind if move.partial else "")
            before = self.local_bytes(self.extent(here.dims))
            after = self.local_bytes(self.extent(there.dims))
            seconds += collective_seconds(move.kind, move.axes, before, after, mesh, topology)
            sent += wire_bytes(move.kind, mesh.extent(move.axes), before, after)
            steps.append(Step(move.kind, here, there, move.axes, move.at))
            here = there
        return Path(tuple(steps), seconds, sent)


# ---------------------------------------------------------------------------------------------
# Moves.


class _Move(NamedTuple):
    """A step while it is searched for: where it leads, and how."""

    kind: str
    dims: Dims
    partial: Axes
    axes: Axes
    at: tuple[int, ...]


def _put(dims: Dims, dim: int, axes: Axes) -> Dims:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _without(axes: Axes, gone: Axes) -> Axes:
    return tuple(a for a in axes if a not in gone)


def _continuation(axes: Axes, goal: Axes, pool: Iterable[int]) -> Axes:
    """The next atoms of `goal` after its prefix `axes`, as long as they are in `pool`."""
    size = len(axes)
    if goal[:size] != axes:
        return ()
    end = size
    while end < len(goal) and goal[end] in pool:
        end += 1
    return goal[size:end]


class _Moves:
    """The moves out of a sharding; subclasses say which appended runs and permutes are tried."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.free_dims = [d for d in range(len(problem.shape)) if d not in problem.frozen]

    def runs(self, dims: Dims, dim: int, pool: Axes) -> Iterable[Axes]:
        """Runs out of `pool` to append to a dim."""
        raise NotImplementedError

    def reduced(self, owed: Axes) -> Iterable[Axes]:
        """Sets of owed atoms to all-reduce at once."""
        raise NotImplementedError

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """Targets of a permute: dims with the same local shape."""
        raise NotImplementedError

    def out_of(self, dims: Dims, partial: Axes, last: str) -> Iterator[_Move]:
        """Every move that is tried from here; no two permutes follow one another."""
        yield from self._slices(dims, partial)
        yield from self._drops(dims, partial)
        yield from self._reductions(dims, partial)
        if last != "collective_permute":
            yield from self._permutes(dims, partial)

    def _slices(self, dims: Dims, partial: Axes) -> Iterator[_Move]:
        taken = {a for axes in dims for a in axes}.union(partial)
        pool = tuple(a for a in self.problem.atoms if a not in taken)
        for dim in self.free_dims if pool else ():
            for run in self.runs(dims, dim, pool):
                yield _Move("slice", _put(dims, dim, dims[dim] + run), partial, run, (dim,))

    def _drops(self, dims: Dims, partial: Axes) -> Iterator[_Move]:
        """All-gathers and all-to-alls of every trailing run of every dim."""
        problem = self.problem
        room = problem.extent(dims) // problem.least_extent
        for dim in self.free_dims:
            axes = dims[dim]
            for keep in range(len(axes)):
                run = axes[keep:]
                rest = _put(dims, dim, axes[:keep])
                if problem.fabric.extent(run) <= room:
                    yield _Move("all_gather", rest, partial, run, (dim,))
                for other in self.free_dims:
                    if other != dim and problem.divides(other, dims[other] + run):
                        after = _put(rest, other, dims[other] + run)
                        yield _Move("all_to_all", after, partial, run, (dim, other))

    def _reductions(self, dims: Dims, partial: Axes) -> Iterator[_Move]:
        owed = self.problem.owed(partial)
        if not owed:
            return
        for gone in self.reduced(owed):
            yield _Move("all_reduce", dims, _without(partial, gone), gone, ())
        for dim in self.free_dims:
            for run in self.runs(dims, dim, owed):
                after = _put(dims, dim, dims[dim] + run)
                yield _Move("reduce_scatter", after, _without(partial, run), run, (dim,))

    def _permutes(self, dims: Dims, partial: Axes) -> Iterator[_Move]:
        sizes = self.problem.fabric.sizes
        before = Sharding(dims)
        for after in self.arrangements(dims, partial):
            if after != dims:
                axes = _moved(before, Sharding(after), sizes)
                yield _Move("collective_permute", after, partial, axes, ())


class _Exhaustive(_Moves):
    """Every legal move: for small meshes."""

    def runs(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        for count in range(1, len(pool) + 1):
            for run in permutations(pool, count):
                if self.problem.divides(dim, dims[dim] + run):
                    yield run

    def reduced(self, owed: Axes) -> Iterator[Axes]:
        for count in range(len(owed), 0, -1):
            yield from combinations(owed, count)

    def arrangements(self, dims: Dims, partial: Axes) -> Iterator[Dims]:
        extents = [self.problem.fabric.extent(axes) for axes in dims]
        pool = _without(self.problem.atoms, partial)
        return self._fill(dims, extents, 0, pool)

    def _fill(self, dims: Dims, extents: list[int], dim: int, pool: Axes) -> Iterator[Dims]:
        if dim == len(dims):
            yield ()
            return
        if dim in self.problem.frozen:
            choices: Iterable[Axes] = (dims[dim],)
        else:
            choices = self._exactly(extents[dim], pool)
        for axes in choices:
            for rest in self._fill(dims, extents, dim + 1, _without(pool, axes)):
                yield (axes, *rest)

    def _exactly(self, extent: int, pool: Axes) -> Iterator[Axes]:
        """Ordered selections out of `pool` whose sizes multiply to `extent`."""
        if extent == 1:
            yield ()
            return
        for a in pool:
            size = self.problem.fabric.sizes[a]
            if extent % size == 0:
                for rest in self._exactly(extent // size, _without(pool, (a,))):
                    yield (a, *rest)


class _Directed(_Moves):
    """Moves towards the goal, with stand-ins where any atom would do: for every mesh.

    - Appended runs: the next atoms of the goal; else atoms that the goal does not use, in order.
    - Permutes: into the longest prefixes of the goal that the local shape allows, the rest filled
      with atoms that then go by all-to-all to the dim that misses them, or are gathered.
    """

    def runs(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        wanted = _continuation(dims[dim], self.problem.dst.dims[dim], pool)
        tried: set[Axes] = set()
        spare = sorted(pool, key=lambda a: (a in self.problem.goal_atoms, a))
        choices = [wanted, self._dividing(dims, dim, spare)]
        sizes = self.problem.fabric.sizes
        primes = sorted({sizes[a] for a in pool})
        if len(primes) > 1:
            for prime in primes:
                alike = [a for a in spare if sizes[a] == prime]
                choices.append(self._dividing(dims, dim, alike))
        for choice in choices:
            for count in range(len(choice), 0, -1):
                run = choice[:count]
                if run not in tried and self.problem.divides(dim, dims[dim] + run):
                    tried.add(run)
                    yield run

    def _dividing(self, dims: Dims, dim: int, pool: Iterable[int]) -> Axes:
        run: Axes = ()
        for a in pool:
            if self.problem.divides(dim, (*dims[dim], *run, a)):
                run = (*run, a)
        return run

    def reduced(self, owed: Axes) -> Iterator[Axes]:
        yield owed
        stray = tuple(a for a in owed if a not in self.problem.goal_atoms)
        if stray and stray != owed:
            yield stray

    def arrangements(self, dims: Dims, partial: Axes) -> Iterator[Dims]:
        prefixes, missing, spaces = self._prefixes(dims, partial)
        pool = [a for a in self.problem.atoms if a not in partial]
        seen: set[Dims] = set()
        for order in (spaces, dict(reversed(spaces.items()))):
            for movers in (missing, []):
                after = self._filled(dims, prefixes, movers, dict(order), pool)
                if after is not None and after not in seen:
                    seen.add(after)
                    yield after

    def _prefixes(
        self, dims: Dims, partial: Axes
    ) -> tuple[list[Axes], list[tuple[int, int]], dict[int, int]]:
        """Longest possible prefixes of the goal; atoms missing after them; extents left to fill."""
        sizes, extent = self.problem.fabric.sizes, self.problem.fabric.extent
        prefixes: list[Axes] = []
        missing: list[tuple[int, int]] = []
        spaces: dict[int, int] = {}
        for dim, (axes, goal) in enumerate(zip(dims, self.problem.dst.dims, strict=True)):
            space, count = extent(axes), 0
            while count < len(goal) and space % sizes[goal[count]] == 0:
                if goal[count] in partial:
                    break
                space //= sizes[goal[count]]
                count += 1
            prefixes.append(goal[:count])
            missing += [(dim, a) for a in goal[count:] if a not in partial]
            if space > 1:
                spaces[dim] = space
        return prefixes, missing, spaces

    def _filled(
        self,
        dims: Dims,
        prefixes: list[Axes],
        movers: list[tuple[int, int]],
        spaces: dict[int, int],
        pool: list[int],
    ) -> Dims | None:
        """The prefixes, then atoms that will be gathered, then those that will move on."""
        sizes = self.problem.fabric.sizes
        leaving: dict[int, list[tuple[int, Axes]]] = {dim: [] for dim in spaces}
        used = {a for axes in prefixes for a in axes}
        for target, a in movers:
            for dim, space in spaces.items():
                if dim != target and space % sizes[a] == 0:
                    spaces[dim] = space // sizes[a]
                    _extend_run(leaving[dim], target, a)
                    used.add(a)
                    break
        result = list(prefixes)
        for dim, space in spaces.items():
            spare = [a for a in pool if a not in used]
            spare.sort(key=lambda a: (a not in dims[dim], a in self.problem.goal_atoms, a))
            for a in spare:
                if space % sizes[a] == 0:
                    space //= sizes[a]
                    result[dim] = (*result[dim], a)
                    used.add(a)
            if space > 1:
                return None
        for dim, runs in leaving.items():
            for _, run in reversed(runs):
                result[dim] += run
        return tuple(result)


def _extend_run(runs: list[tuple[int, Axes]], target: int, a: int) -> None:
    """Adds an atom that goes to dim `target`: atoms for the same dim in a row move together."""
    if runs and runs[-1][0] == target:
        runs[-1] = (target, (*runs[-1][1], a))
    else:
        runs.append((target, (a,)))


def _straight(problem: _Problem) -> list[_Move] | None:
    """Slices, reductions, at most one permute, all-to-alls and gathers, each where it fits at once.

    None when that does not lead to the goal.
    """
    moves: list[_Move] = []
    dims, partial, goal = problem.src.dims, problem.src.partial, problem.dst.dims

    def go(move: _Move) -> None:
        nonlocal dims, partial
        moves.append(move)
        dims, partial = move.dims, move.partial

    def append(kind: str, dim: int, run: Axes) -> None:
        left = _without(partial, run)
        go(_Move(kind, _put(dims, dim, dims[dim] + run), left, run, (dim,)))

    for dim in range(len(goal)):
        taken = {a for axes in dims for a in axes}.union(partial)
        unused = [a for a in problem.atoms if a not in taken]
        if run := _continuation(dims[dim], goal[dim], unused):
            append("slice", dim, run)
    for dim in range(len(goal)):
        if run := _continuation(dims[dim], goal[dim], problem.owed(partial)):
            append("reduce_scatter", dim, run)
    if owed := problem.owed(partial):
        go(_Move("all_reduce", dims, _without(partial, owed), owed, ()))
    extents = tuple(problem.fabric.extent(axes) for axes in dims)
    if extents == problem.goal_extents and dims != goal:
        axes = _moved(Sharding(dims), problem.dst, problem.fabric.sizes)
        go(_Move("collective_permute", goal, partial, axes, ()))
    for kind in ("all_to_all", "all_gather"):
        for dim, target in enumerate(goal):
            run = dims[dim][len(target) :]
            if not run or dims[dim][: len(target)] != target:
                continue
            rest = _put(dims, dim, target)
            if kind == "all_gather":
                go(_Move(kind, rest, partial, run, (dim,)))
                continue
            for other in range(len(goal)):
                if other != dim and dims[other] + run == goal[other]:
                    go(_Move(kind, _put(rest, other, goal[other]), partial, run, (dim, other)))
                    break
    return moves if dims == goal else None


# ---------------------------------------------------------------------------------------------
# Search.


def _search(
    problem: _Problem,
    moves: _Moves,
    known: list[_Move] | None,
    budget: int | None,
    greed: int = 1,
) -> list[_Move] | None:
    """A* from `src` to `dst`: the best path, or `known` when nothing better is found.

    Args:
      problem: what is searched.
      moves: which moves are tried.
      known: a path that is to be undercut.
      budget: shardings to expand at most.
      greed: weight of the lower bound; above 1, fast but no longer optimal.
    """
    limit = problem.total(known) if known else None
    goal = (problem.dst.dims, problem.dst.partial)
    start = (problem.src.dims, problem.src.partial)
    best: dict[tuple[Dims, Axes], Cost] = {start: (0, 0, 0)}
    came: dict[tuple[Dims, Axes], tuple[tuple[Dims, Axes], _Move]] = {}
    done: set[tuple[Dims, Axes]] = set()
    heap: list[tuple[Cost, int, tuple[Dims, Axes]]] = [((0, 0, 0), 0, start)]
    pushed = 0
    while heap and (budget is None or len(done) < budget):
        _, _, here = heapq.heappop(heap)
        if here == goal:
            return _unwind(came, here)
        if here in done:
            continue
        done.add(here)
        time, sent, count = best[here]
        last = came[here][1].kind if here in came else ""
        for move in moves.out_of(*here, last):
            there = (move.dims, move.partial)
            if there in done:
                continue
            step_time, step_sent = problem.price(move, here[0])
            cost = (time + step_time, sent + step_sent, count + 1)
            if there in best and best[there] <= cost:
                continue
            left_time, left_sent = problem.bound(*there)
            estimate = (cost[0] + greed * left_time, cost[1] + left_sent, cost[2])
            if limit is not None and estimate >= limit:
                continue
            best[there] = cost
            came[there] = (here, move)
            pushed += 1
            heapq.heappush(heap, (estimate, pushed, there))
    return known


def _unwind(
    came: dict[tuple[Dims, Axes], tuple[tuple[Dims, Axes], _Move]], here: tuple[Dims, Axes]
) -> list[_Move]:
    moves: list[_Move] = []
    while here in came:
        here, move = came[here]
        moves.append(move)
    return moves[::-1]
