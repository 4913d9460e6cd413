"""The steps that a search tries out of a sharding: every legal one, or those towards the goal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, combinations, groupby, permutations
from typing import NamedTuple

from spmd.mesh.sharding import Axes, common_prefix
from spmd.reshard.question import Dims, PricedQuestion, moved


class AtomMove(NamedTuple):
    """One step of a reshard, with a question's digits (runs of atoms), and where it leads."""

    kind: str
    dims: Dims
    partial: Axes
    axes: Axes
    at: tuple[int, ...]


def append(kind: str, dims: Dims, partial: Axes, dim: int, run: Axes) -> AtomMove:
    """Makes a slice or a reduce-scatter that appends digits to the minor end of a dim."""
    return AtomMove(kind, _put(dims, dim, dims[dim] + run), without(partial, run), run, (dim,))


def gather(dims: Dims, partial: Axes, dim: int, keep: int) -> AtomMove:
    """Makes an all-gather after which a dim keeps its `keep` most major digits."""
    axes = dims[dim]
    return AtomMove("all_gather", _put(dims, dim, axes[:keep]), partial, axes[keep:], (dim,))


def exchange(dims: Dims, partial: Axes, dim: int, keep: int, other: int) -> AtomMove:
    """Makes an all-to-all: what a dim has behind its first `keep` digits is appended to `other`."""
    run = dims[dim][keep:]
    after = _put(_put(dims, dim, dims[dim][:keep]), other, dims[other] + run)
    return AtomMove("all_to_all", after, partial, run, (dim, other))


def reduce(dims: Dims, partial: Axes, run: Axes) -> AtomMove:
    """Makes an all-reduce over some of the partial digits."""
    return AtomMove("all_reduce", dims, without(partial, run), run, ())


def permute(problem: PricedQuestion, dims: Dims, partial: Axes, after: Dims) -> AtomMove:
    """Makes a collective-permute to another sharding with the same local shape."""
    return AtomMove("collective_permute", after, partial, moved(dims, after, problem.sizes), ())


class Moves:
    """Every legal step out of a sharding in digits (runs of atoms); a subclass may try fewer.

    Which ones, methods say that a subclass may replace. The order of moves decides between paths
    that cost the same.
    """

    def __init__(self, problem: PricedQuestion) -> None:
        self.problem = problem
        self._layouts: dict[tuple[tuple[int, ...], Axes], list[Dims]] = {}

    def out_of(self, dims: Dims, partial: Axes, pieces: int) -> Iterator[AtomMove]:
        """Yields the moves out of a sharding that splits the value into so many pieces."""
        idle = unused(self.problem.digits, dims, partial)
        if idle:
            yield from self._appends("slice", dims, partial, idle)
        # A gather may not leave a larger piece than the larger end has: the memory limit.
        room = pieces // self.problem.fewest_pieces
        for dim, axes in enumerate(dims) if room > 1 else ():
            for keep in self._gathered(dims, dim, room):
                if self.problem.extent(axes[keep:]) <= room:
                    yield gather(dims, partial, dim, keep)
        for dim, axes in enumerate(dims):
            for other in range(len(dims)) if axes else ():
                for keep in self._exchanged(dims, dim, other) if other != dim else ():
                    if self.problem.divides(other, dims[other] + axes[keep:]):
                        yield exchange(dims, partial, dim, keep, other)
        if partial:
            for run in self._reduced(partial):
                yield reduce(dims, partial, run)
            yield from self._appends("reduce_scatter", dims, partial, partial)
        for after in self.arrangements(dims, partial):
            if after != dims:
                yield permute(self.problem, dims, partial, after)

    def _appends(self, kind: str, dims: Dims, partial: Axes, pool: Axes) -> Iterator[AtomMove]:
        for dim in range(len(dims)):
            for run in self._runs(dims, dim, pool):
                if self.problem.divides(dim, dims[dim] + run):
                    yield append(kind, dims, partial, dim, run)

    def _runs(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        # Runs of digits out of `pool` that a step may append to a dim if they divide it.
        return chain(*[permutations(pool, count) for count in range(1, len(pool) + 1)])

    def _gathered(self, dims: Dims, dim: int, room: int) -> Iterable[int]:
        # How many major digits an all-gather may keep; pieces may grow `room` times.
        return range(len(dims[dim]))

    def _exchanged(self, dims: Dims, dim: int, other: int) -> Iterable[int]:
        # How many major digits of a dim may stay when the rest goes to dim `other`.
        return range(len(dims[dim]))

    def _reduced(self, owed: Axes) -> Iterable[Axes]:
        # The sets of partial digits that one all-reduce may reduce.
        return chain(*[combinations(owed, count) for count in range(len(owed), 0, -1)])

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """Returns where a permute may lead: equal local shapes, split by digits not partial."""
        key = tuple([self.problem.extent(axes) for axes in dims]), partial
        if key not in self._layouts:
            self._layouts[key] = list(self._fill(key[0], without(self.problem.digits, partial)))
        return self._layouts[key]

    def _fill(self, extents: tuple[int, ...], pool: Axes) -> Iterator[Dims]:
        # Dims of these extents that are split by digits out of `pool`, in any order.
        if not extents:
            yield ()
        elif extents[0] == 1:
            for rest in self._fill(extents[1:], pool):
                yield ((), *rest)
        else:
            for a in pool:
                left, over = divmod(extents[0], self.problem.sizes[a])
                others = without(pool, (a,))
                for found in () if over else self._fill((left, *extents[1:]), others):
                    yield ((a, *found[0]), *found[1:])


class DirectedMoves(Moves):
    """Moves towards the goal, with stand-ins where any digit would do.

    - A slice or a reduce-scatter appends the digits that the goal has next in this dim; or those
      that it has next in another dim, to go there together with the ones that are here; or, in
      place of them, any digits: as many as the goal's local shape asks for, and as many as fit.
    - A gather or an all-to-all takes what lies behind the prefix in common with the goal, or what
      is beyond the goal's local shape. An all-to-all also takes what the other dim's goal has next.
    - A permute leads to the longest prefixes of the goal that the local shape allows, the rest
      filled with digits that then go to the dim that misses them, or that are gathered.
    """

    def _runs(self, dims: Dims, dim: int, pool: Axes) -> Iterator[Axes]:
        problem, axes = self.problem, dims[dim]
        found = [continuation(axes, problem.dst[dim], pool)]
        for other, goal in enumerate(problem.dst):
            if other != dim and goal[: len(dims[other])] == dims[other]:
                found += [
                    continuation(dims[other] + axes[k:], goal, pool) for k in range(len(axes))
                ]
        stand_ins = sorted(pool, key=lambda a: (a in problem.goal_digits, a))
        # All of the digits and, where they differ in size, those of each size.
        sizes = problem.sizes
        different = sorted({sizes[a] for a in pool})
        groups = [[a for a in stand_ins if sizes[a] == size] for size in different]
        for alike in (stand_ins, *(groups if len(different) > 1 else ())):
            for size in (problem.goal_extents[dim], problem.room[dim]):
                found.append(problem.dividing(size, axes, alike))
        return filter(None, dict.fromkeys(found))

    def _gathered(self, dims: Dims, dim: int, room: int) -> Iterable[int]:
        axes, paces, extent = dims[dim], self.problem.paces, self.problem.extent
        keeps = self._beyond_goal(axes, dim)
        keeps.update([k for k in range(len(axes)) if extent(axes[k:]) <= room][:1])
        keeps.update(k for k in range(1, len(axes)) if paces[axes[k - 1]] != paces[axes[k]])
        return sorted(keeps)

    def _exchanged(self, dims: Dims, dim: int, other: int) -> Iterable[int]:
        axes, target, goal = dims[dim], dims[other], self.problem.dst[other]
        keeps = self._beyond_goal(axes, dim)
        extent, wanted = self.problem.extent, self.problem.goal_extents[other]
        space = wanted // extent(target) if wanted % extent(target) == 0 else 1
        for keep in range(len(axes)):
            joined = target + axes[keep:]
            if extent(axes[keep:]) == space or goal[: len(joined)] == joined:
                keeps.add(keep)
        return sorted(keeps)

    def _beyond_goal(self, axes: Axes, dim: int) -> set[int]:
        """Returns how many digits begin as the goal does, and how many reach the goal's extent."""
        wanted, extent = self.problem.goal_extents[dim], self.problem.extent
        common = len(common_prefix(axes, self.problem.dst[dim]))
        return {k for k in range(len(axes)) if k == common or extent(axes[:k]) == wanted}

    def _reduced(self, owed: Axes) -> Iterable[Axes]:
        stray = without(owed, self.problem.goal_digits)
        return (owed, stray) if stray and stray != owed else (owed,)

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """Returns where a permute may lead: dims that begin as the goal, filled in up to four ways.

        Digits that the goal asks for elsewhere wait in the spaces, or do not; the spaces are filled
        from the first dim to the last, or from the last to the first.
        """
        # Trace, with digits of size 2, from [{a, b}, {c}, {}] to [{c}, {a}, {b}]. Dim 0 keeps its
        # four pieces: c fits, and a space of 2 is left. In dim 1 a fits, in dim 2 nothing does, so
        # b is missing. It waits in dim 0's space: from [{c, b}, {a}, {}] an all-to-all is enough.
        sizes = self.problem.sizes
        prefixes: list[Axes] = []
        missing: list[tuple[int, int]] = []  # (dim, a digit of its goal that does not fit yet)
        spaces: dict[int, int] = {}  # dim -> the extent that its prefix leaves to be filled
        for dim, (axes, goal) in enumerate(zip(dims, self.problem.dst, strict=True)):
            space, count = self.problem.extent(axes), 0
            while count < len(goal) and goal[count] not in partial:
                if space % sizes[goal[count]]:
                    break
                space //= sizes[goal[count]]
                count += 1
            prefixes.append(goal[:count])
            missing += [(dim, a) for a in goal[count:] if a not in partial]
            if space > 1:
                spaces[dim] = space
        pool = set(self.problem.digits).difference(partial, *prefixes)
        found = [
            self._filled(dims, prefixes, waiting, dict(order), set(pool))
            for order in (spaces, dict(reversed(spaces.items())))
            for waiting in (missing, [])
        ]
        return dict.fromkeys(after for after in found if after is not None)

    def _filled(
        self,
        dims: Dims,
        prefixes: list[Axes],
        missing: list[tuple[int, int]],
        spaces: dict[int, int],
        pool: set[int],
    ) -> Dims | None:
        """Returns the goal's `prefixes` filled up to their extents; None if no digits do that.

        They are filled with digits to be gathered later, then with those that other dims miss.
        """
        sizes, goal_digits = self.problem.sizes, self.problem.goal_digits
        waiting: dict[int, list[tuple[int, int]]] = {dim: [] for dim in spaces}
        for target, a in missing:
            for dim, space in spaces.items():
                if dim != target and space % sizes[a] == 0:
                    spaces[dim] = space // sizes[a]
                    waiting[dim].append((target, a))
                    pool.remove(a)
                    break
        result = list(prefixes)
        for dim, space in spaces.items():
            spare = sorted(pool, key=lambda a: (a not in dims[dim], a in goal_digits, a))
            run = self.problem.dividing(space, (), spare)
            if self.problem.extent(run) != space:
                return None
            pool.difference_update(run)
            result[dim] += run
            # Neighbours with one target move together; the minor end leaves first.
            runs = [[a for _, a in run] for _, run in groupby(waiting[dim], lambda way: way[0])]
            result[dim] += tuple(a for run in reversed(runs) for a in run)
        return tuple(result)


def _put(dims: Dims, dim: int, axes: Axes) -> Dims:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def without(axes: Axes, gone: Iterable[int]) -> Axes:
    """Returns `axes` without the digits that are `gone`."""
    return tuple([a for a in axes if a not in gone])


def unused(atoms: Axes, dims: Dims, partial: Axes) -> Axes:
    """Returns the digits that neither split a dim nor are partial."""
    return without(atoms, {a for axes in dims for a in axes}.union(partial))


def continuation(axes: Axes, goal: Axes, pool: Axes) -> Axes:
    """Returns the next digits of `goal` after its prefix `axes`, as long as they are in `pool`."""
    start = end = len(axes)
    if goal[:start] != axes:
        return ()
    while end < len(goal) and goal[end] in pool:
        end += 1
    return goal[start:end]
