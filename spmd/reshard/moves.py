"""The steps that a reshard tries out of a sharding: all of them, or those towards the goal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

from spmd.mesh.sharding import Axes
from spmd.reshard.problem import Problem
from spmd.reshard.question import Dims


class Move(NamedTuple):
    """A step while it is searched for: the sharding that it leads to, and as in `Step`."""

    kind: str
    dims: Dims
    partial: Axes
    axes: Axes
    at: tuple[int, ...]


class Moves:
    """The moves out of a sharding; subclasses say which runs of atoms and permutes are tried."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.every_dim = range(len(problem.room))

    def _runs(self, dims: Dims, dim: int, pool: Axes) -> Iterable[Axes]:
        """Runs out of `pool` to append to a dim."""
        raise NotImplementedError

    def _gathered(self, dims: Dims, dim: int, room: int) -> Iterable[int]:
        """How many major atoms of a dim an all-gather keeps; it may grow by a factor of `room`."""
        raise NotImplementedError

    def _exchanged(self, dims: Dims, dim: int, other: int) -> Iterable[int]:
        """How many major atoms of a dim stay when the rest goes to dim `other`."""
        raise NotImplementedError

    def _reduced(self, owed: Axes) -> Iterable[Axes]:
        """Sets of owed atoms to all-reduce at once."""
        raise NotImplementedError

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """Targets of a permute: dims with the same local shape."""
        raise NotImplementedError

    def out_of(self, dims: Dims, partial: Axes, pieces: int) -> Iterator[Move]:
        """Every move that is tried from here."""
        yield from self._slices(dims, partial)
        yield from self._gathers(dims, partial, pieces // self.problem.fewest_pieces)
        yield from self._exchanges(dims, partial)
        yield from self._reductions(dims, partial)
        yield from self._permutes(dims, partial)

    def _slices(self, dims: Dims, partial: Axes) -> Iterator[Move]:
        pool = unused(self.problem.atoms, dims, partial)
        for dim in self.every_dim if pool else ():
            for run in self._runs(dims, dim, pool):
                yield Move("slice", put(dims, dim, dims[dim] + run), partial, run, (dim,))

    def _gathers(self, dims: Dims, partial: Axes, room: int) -> Iterator[Move]:
        for dim in self.every_dim if room > 1 else ():
            for keep in self._gathered(dims, dim, room):
                run = dims[dim][keep:]
                if self.problem.extent(run) <= room:
                    after = put(dims, dim, dims[dim][:keep])
                    yield Move("all_gather", after, partial, run, (dim,))

    def _exchanges(self, dims: Dims, partial: Axes) -> Iterator[Move]:
        for dim in self.every_dim:
            for other in self.every_dim if dims[dim] else ():
                if other == dim:
                    continue
                for keep in self._exchanged(dims, dim, other):
                    run = dims[dim][keep:]
                    if self.problem.divides(other, dims[other] + run):
                        after = put(put(dims, dim, dims[dim][:keep]), other, dims[other] + run)
                        yield Move("all_to_all", after, partial, run, (dim, other))

    def _reductions(self, dims: Dims, partial: Axes) -> Iterator[Move]:
        if not partial:
            return
        for gone in self._reduced(partial):
            yield Move("all_reduce", dims, without(partial, gone), gone, ())
        for dim in self.every_dim:
            for run in self._runs(dims, dim, partial):
                after = put(dims, dim, dims[dim] + run)
                yield Move("reduce_scatter", after, without(partial, run), run, (dim,))

    def _permutes(self, dims: Dims, partial: Axes) -> Iterator[Move]:
        for after in self.arrangements(dims, partial):
            if after != dims:
                axes = self.problem.moved(dims, after)
                yield Move("collective_permute", after, partial, axes, ())


class ExhaustiveMoves(Moves):
    """Every legal move."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._layouts: dict[tuple[tuple[int, ...], Axes], list[Dims]] = {}

    def _runs(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        for count in range(1, len(pool) + 1):
            for run in permutations(pool, count):
                if self.problem.divides(dim, dims[dim] + run):
                    yield run

    def _gathered(self, dims: Dims, dim: int, room: int) -> Iterable[int]:
        return range(len(dims[dim]))

    def _exchanged(self, dims: Dims, dim: int, other: int) -> Iterable[int]:
        return range(len(dims[dim]))

    def _reduced(self, owed: Axes) -> Iterator[Axes]:
        for count in range(len(owed), 0, -1):
            yield from combinations(owed, count)

    def arrangements(self, dims: Dims, partial: Axes) -> list[Dims]:
        """Every way to lay free atoms out in the same local shape."""
        extents = tuple([self.problem.extent(axes) for axes in dims])
        found = self._layouts.get((extents, partial))
        if found is None:
            found = list(self._fill(extents, without(self.problem.atoms, partial)))
            self._layouts[extents, partial] = found
        return found

    def _fill(self, extents: tuple[int, ...], pool: Axes) -> Iterator[Dims]:
        if not extents:
            yield ()
            return
        for axes in self._exactly(extents[0], pool):
            for rest in self._fill(extents[1:], without(pool, axes)):
                yield (axes, *rest)

    def _exactly(self, extent: int, pool: Axes) -> Iterator[Axes]:
        """Ordered selections out of `pool` whose sizes multiply to `extent`."""
        if extent == 1:
            yield ()
            return
        for a in pool:
            size = self.problem.fabric.sizes[a]
            if extent % size == 0:
                for rest in self._exactly(extent // size, without(pool, (a,))):
                    yield (a, *rest)


class DirectedMoves(Moves):
    """Moves towards the goal, with stand-ins where any atom would do.

    - Appended are the next atoms of the goal (or of another dim's, to move there together), or
      stand-ins: as many as go towards the goal's local shape, and as many as there are.
    - Dropped or exchanged are the atoms behind the prefix in common with the goal, those beyond the
      goal's local shape, and those that the other dim's goal asks for next.
    - A permute leads to the longest prefixes of the goal that the local shape allows, the rest
      filled with atoms that then go to the dim that misses them, or that are gathered.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._cuts: list[dict[Axes, tuple[int, ...]]] = [{} for _ in problem.room]

    def _runs(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        problem = self.problem
        found = [continuation(dims[dim], problem.dst[dim], pool)]
        found += self._followers(dims, dim, pool)
        stand_ins = sorted(pool, key=lambda a: (a in problem.goal_atoms, a))
        for alike in self._by_size(stand_ins):
            found.append(self.problem.dividing(problem.goal_extents[dim], dims[dim], alike))
            found.append(self.problem.dividing(problem.room[dim], dims[dim], alike))
        for run in dict.fromkeys(found):
            if run and problem.divides(dim, dims[dim] + run):
                yield run

    def _followers(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        """What comes next in the goal of another dim that this one's minor atoms can move to."""
        for other, goal in enumerate(self.problem.dst):
            if other != dim and goal[: len(dims[other])] == dims[other]:
                for keep in range(len(dims[dim])):
                    yield continuation(dims[other] + dims[dim][keep:], goal, pool)

    def _by_size(self, pool: Sequence[int]) -> list[Sequence[int]]:
        sizes = self.problem.fabric.sizes
        different = sorted({sizes[a] for a in pool})
        if len(different) < 2:
            return [pool]
        return [pool, *([a for a in pool if sizes[a] == size] for size in different)]

    def _gathered(self, dims: Dims, dim: int, room: int) -> Iterable[int]:
        axes, paces = dims[dim], self.problem.fabric.paces
        keeps = set(self._beyond_goal(axes, dim))
        extent = self.problem.extent
        keeps.update([k for k in range(len(axes)) if extent(axes[k:]) <= room][:1])
        keeps.update(k for k in range(1, len(axes)) if paces[axes[k - 1]] != paces[axes[k]])
        return sorted(keeps)

    def _exchanged(self, dims: Dims, dim: int, other: int) -> Iterable[int]:
        axes, target, goal = dims[dim], dims[other], self.problem.dst[other]
        keeps = set(self._beyond_goal(axes, dim))
        extent, wanted = self.problem.extent, self.problem.goal_extents[other]
        space = wanted // extent(target) if wanted % extent(target) == 0 else 1
        known = goal[: len(target)] == target
        for keep in range(len(axes)):
            run = axes[keep:]
            if extent(run) == space or (known and goal[len(target) :][: len(run)] == run):
                keeps.add(keep)
        return sorted(keeps)

    def _beyond_goal(self, axes: Axes, dim: int) -> tuple[int, ...]:
        """Where the prefix in common with the goal ends, and where the goal's extent is reached."""
        found = self._cuts[dim].get(axes)
        if found is None:
            found = self._cuts[dim][axes] = self._find_cuts(axes, dim)
        return found

    def _find_cuts(self, axes: Axes, dim: int) -> tuple[int, ...]:
        goal, wanted = self.problem.dst[dim], self.problem.goal_extents[dim]
        common = 0
        while common < min(len(axes), len(goal)) and axes[common] == goal[common]:
            common += 1
        extent = self.problem.extent
        return tuple(k for k in range(len(axes)) if k == common or extent(axes[:k]) == wanted)

    def _reduced(self, owed: Axes) -> Iterator[Axes]:
        yield owed
        stray = tuple(a for a in owed if a not in self.problem.goal_atoms)
        if stray and stray != owed:
            yield stray

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """The goal's prefixes, filled up in up to four ways."""
        prefixes, missing, spaces = self._prefixes(dims, partial)
        pool = [a for a in self.problem.atoms if a not in partial]
        orders = [spaces] if len(spaces) < 2 else [spaces, dict(reversed(spaces.items()))]
        found = [
            self._filled(dims, prefixes, leaving, dict(order), pool)
            for order in orders
            for leaving in ([missing, []] if missing and spaces else [[]])
        ]
        return dict.fromkeys(after for after in found if after is not None)

    def _prefixes(
        self, dims: Dims, partial: Axes
    ) -> tuple[list[Axes], list[tuple[int, int]], dict[int, int]]:
        """Longest prefixes of the goal that fit; (dim, atom) missing behind; extents to fill."""
        sizes = self.problem.fabric.sizes
        prefixes: list[Axes] = []
        missing: list[tuple[int, int]] = []
        spaces: dict[int, int] = {}
        for dim, (axes, goal) in enumerate(zip(dims, self.problem.dst, strict=True)):
            space, count = self.problem.extent(axes), 0
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
        missing: list[tuple[int, int]],
        spaces: dict[int, int],
        pool: list[int],
    ) -> Dims | None:
        """The prefixes, then atoms that will be gathered, then those that will move on."""
        sizes = self.problem.fabric.sizes
        leaving: dict[int, list[tuple[int, Axes]]] = {dim: [] for dim in spaces}
        left = set(pool).difference(*prefixes)
        for target, a in missing:
            for dim, space in spaces.items():
                if dim != target and space % sizes[a] == 0:
                    spaces[dim] = space // sizes[a]
                    _extend(leaving[dim], target, a)
                    left.remove(a)
                    break
        result = list(prefixes)
        for dim, space in spaces.items():
            here, goal_atoms = dims[dim], self.problem.goal_atoms
            spare = sorted(left, key=lambda a: (a not in here, a in goal_atoms, a))
            run = self.problem.dividing(space, (), spare)
            if self.problem.extent(run) != space:
                return None
            left.difference_update(run)
            result[dim] += run
        for dim, runs in leaving.items():
            result[dim] += tuple(a for _, run in reversed(runs) for a in run)
        return tuple(result)


def put(dims: Dims, dim: int, axes: Axes) -> Dims:
    """`dims` with the atoms of one dim replaced."""
    return (*dims[:dim], axes, *dims[dim + 1 :])


def without(axes: Axes, gone: Axes) -> Axes:
    """`axes` less some atoms."""
    return tuple([a for a in axes if a not in gone])


def unused(atoms: Axes, dims: Dims, partial: Axes) -> Axes:
    """The atoms that neither split a dim nor are partial."""
    taken = {a for axes in dims for a in axes}.union(partial)
    return tuple(a for a in atoms if a not in taken)


def continuation(axes: Axes, goal: Axes, pool: Axes) -> Axes:
    """The next atoms of `goal` after its prefix `axes`, as long as they are in `pool`."""
    start = end = len(axes)
    if goal[:start] != axes:
        return ()
    while end < len(goal) and goal[end] in pool:
        end += 1
    return goal[start:end]


def _extend(runs: list[tuple[int, Axes]], target: int, a: int) -> None:
    """Adds an atom that goes to dim `target`: neighbours with the same target move together."""
    if runs and runs[-1][0] == target:
        runs[-1] = (target, (*runs[-1][1], a))
    else:
        runs.append((target, (a,)))
