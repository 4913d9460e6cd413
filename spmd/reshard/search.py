"""The cheapest moves that answer a question, for values of every size: A* over shardings.

Paths that are written down without a search are often the best; a search only looks for cheaper.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import chain, combinations, groupby, permutations
from typing import NamedTuple

from spmd.mesh.sharding import Axes, common_prefix
from spmd.reshard.question import (
    EXACT_ATOMS,
    EXACT_DIGITS,
    Dims,
    Line,
    PricedQuestion,
    Question,
    moved,
)

# ---------------------------------------------------------------------------------------------
# The steps that a search tries out of a sharding: every legal one, or those towards the goal.


class AtomMove(NamedTuple):
    """One step of a reshard in digits (atoms or runs of them), and the sharding it leads to."""

    kind: str
    dims: Dims
    partial: Axes
    axes: Axes
    at: tuple[int, ...]


def step(kind: str, dims: Dims, partial: Axes, run: Axes, changed: Mapping[int, Axes]) -> AtomMove:
    """Returns the step over the digits (atoms) of `run`; `changed`: dim -> its digits afterwards.

    It is a slice or a reduce-scatter if one dim gets them at its minor end, an all-gather if one
    loses them there, an all-to-all if they go from one to another; an all-reduce changes no dim.
    """
    after = tuple([changed.get(d, axes) for d, axes in enumerate(dims)])
    return AtomMove(kind, after, without(partial, run), run, tuple(changed))


def permute(problem: PricedQuestion, dims: Dims, partial: Axes, after: Dims) -> AtomMove:
    """Returns the collective-permute from `dims` to `after`, whose local shapes are equal."""
    return AtomMove("collective_permute", after, partial, moved(dims, after, problem.sizes), ())


class Moves:
    """Makes every legal step out of a sharding in digits (atoms or runs); a subclass fewer."""

    def __init__(self, problem: PricedQuestion) -> None:
        self.problem = problem
        self._layouts = cache(lambda *look: list(self._fill(*look)))

    def out_of(self, dims: Dims, partial: Axes, pieces: int) -> Iterator[AtomMove]:
        """Yields the steps that may come after a sharding that splits the value into `pieces`."""
        # Of paths that cost the same, the order of these decides.
        if idle := unused(self.problem.digits, dims, partial):
            yield from self._appends("slice", dims, partial, idle)
        # A gather may not leave a larger piece than the larger end has: the memory limit.
        room = pieces // self.problem.fewest_pieces
        for dim, axes in enumerate(dims) if room > 1 else ():
            for keep in self._gathered(dims, dim, room):
                if self.problem.extent(axes[keep:]) <= room:
                    yield step("all_gather", dims, partial, axes[keep:], {dim: axes[:keep]})
        for dim, axes in enumerate(dims):
            for other in range(len(dims)) if axes else ():
                for keep in self._exchanged(dims, dim, other) if other != dim else ():
                    longer = dims[other] + axes[keep:]
                    if self.problem.divides(other, longer):
                        changed = {dim: axes[:keep], other: longer}
                        yield step("all_to_all", dims, partial, axes[keep:], changed)
        if partial:
            for run in self._reduced(partial):
                yield step("all_reduce", dims, partial, run, {})
            yield from self._appends("reduce_scatter", dims, partial, partial)
        for after in self.arrangements(dims, partial):
            if after != dims:
                yield permute(self.problem, dims, partial, after)

    def _appends(self, kind: str, dims: Dims, partial: Axes, pool: Axes) -> Iterator[AtomMove]:
        for dim, axes in enumerate(dims):
            for run in self._runs(dims, dim, pool):
                if self.problem.divides(dim, axes + run):
                    yield step(kind, dims, partial, run, {dim: axes + run})

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
        """Returns the dims that a collective-permute may lead to, in as many pieces each as now."""
        extents = tuple([self.problem.extent(axes) for axes in dims])
        return self._layouts(extents, without(self.problem.digits, partial))

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
    """Makes just the steps that lead towards the goal, which is a question's `dst`.

    - A slice or a reduce-scatter appends the digits that the goal has next in this dim; or those
      that it has next in another dim, to go there together with the ones that are here; or, in
      place of them, any digits: as many as the goal's local shape asks for, and as many as fit.
    - A gather or an all-to-all takes the digits behind the prefix in common with the goal, or those
      beyond the goal's local shape. An all-to-all also takes what the other dim's goal has next.
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
        """Returns how many digits of a dim to keep: those that equal the goal's, or its extent."""
        wanted, extent = self.problem.goal_extents[dim], self.problem.extent
        common = len(common_prefix(axes, self.problem.dst[dim]))
        return {k for k in range(len(axes)) if k == common or extent(axes[:k]) == wanted}

    def _reduced(self, owed: Axes) -> Iterable[Axes]:
        stray = without(owed, self.problem.goal_digits)
        return (owed, stray) if stray and stray != owed else (owed,)

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """Returns the dims that a collective-permute may lead to: they begin as in the goal.

        What is left is filled with digits that the goal has in other dims, or only with others;
        from the first dim to the last, or from the last to the first.
        """
        # Trace, with digits of size 2, from [{a, b}, {c}, {}] to [{c}, {a}, {b}]. Dim 0 keeps its
        # four pieces: c fits, and a space of 2 is left. In dim 1 a fits, in dim 2 nothing does, so
        # b is missing. It waits in dim 0's space: from [{c, b}, {a}, {}] an all-to-all is enough.
        problem, sizes = self.problem, self.problem.sizes
        prefixes: list[Axes] = []
        missing: list[tuple[int, int]] = []  # (dim, a digit of its goal that does not fit yet)
        spaces: dict[int, int] = {}  # dim -> the extent that its prefix leaves to be filled
        for dim, (axes, goal) in enumerate(zip(dims, problem.dst, strict=True)):
            space, count = problem.extent(axes), 0
            while count < len(goal) and goal[count] not in partial:
                if space % sizes[goal[count]]:
                    break
                space //= sizes[goal[count]]
                count += 1
            prefixes.append(goal[:count])
            missing += [(dim, a) for a in goal[count:] if a not in partial]
            if space > 1:
                spaces[dim] = space

        def filled(left: dict[int, int], missing: list[tuple[int, int]]) -> Dims | None:
            """Returns the dims, with digits added to the prefixes; None if none fill them exactly.

            `left`: dim -> extent to be filled. `missing`: (dim, digit of its goal) to be put aside.
            """
            pool = set(problem.digits).difference(partial, *prefixes)
            waiting: dict[int, list[tuple[int, int]]] = {dim: [] for dim in left}
            for target, a in missing:
                for dim, space in left.items():
                    if dim != target and space % sizes[a] == 0:
                        left[dim] = space // sizes[a]
                        waiting[dim].append((target, a))
                        pool.remove(a)
                        break
            result = list(prefixes)
            for dim, space in left.items():
                spare = sorted(
                    pool, key=lambda a: (a not in dims[dim], a in problem.goal_digits, a)
                )
                run = problem.dividing(space, (), spare)
                if problem.extent(run) != space:
                    return None
                pool.difference_update(run)
                result[dim] += run
                # Neighbours with one target move together; the minor end leaves first.
                runs = [[a for _, a in run] for _, run in groupby(waiting[dim], lambda way: way[0])]
                result[dim] += tuple(a for run in reversed(runs) for a in run)
            return tuple(result)

        found = [
            filled(dict(order), waiting)
            for order in (spaces, dict(reversed(spaces.items())))
            for waiting in (missing, [])
        ]
        return dict.fromkeys(after for after in found if after is not None)


def without(axes: Axes, gone: Iterable[int]) -> Axes:
    """Returns `axes` without the digits that are `gone`."""
    return tuple([a for a in axes if a not in gone])


def unused(atoms: Axes, dims: Dims, partial: Axes) -> Axes:
    """Returns the atoms (or digits) that neither split a dim nor are partial."""
    return without(atoms, {a for axes in dims for a in axes}.union(partial))


def continuation(axes: Axes, goal: Axes, pool: Axes) -> Axes:
    """Returns digits of `goal` behind its prefix `axes`, up to the first that is not in `pool`."""
    start = end = len(axes)
    if goal[:start] != axes:
        return ()
    while end < len(goal) and goal[end] in pool:
        end += 1
    return goal[start:end]


# ---------------------------------------------------------------------------------------------
# Paths that are written down without a search.


def direct_paths(problem: PricedQuestion, directed: DirectedMoves) -> Iterator[list[AtomMove]]:
    """Yields paths made without a search: slice, reduce, permute if needed, all-to-all, gather.

    There is one without a permute if that leads to the goal. Else several permute once the local
    shape has everything that the goal's has, into the arrangements that `directed` proposes. Over
    links of different speed each of them also goes link by link, and with the help of digits that
    are parked on a dim that neither end splits: pieces are smaller while they cross the slow links.
    """
    extents = tuple(problem.extent(axes) for axes in problem.src)
    if not problem.partial and extents == problem.goal_extents:
        yield [permute(problem, problem.src, (), problem.dst)]
    # Reductions and gathers may go over all links at once; or link by link; then digits over fast
    # links may be parked, or these and all that is partial.
    styles: list[tuple[bool, Axes]] = [(False, ())]
    if problem.slow:
        styles.append((True, ()))
        if any(not (a or b) for a, b in zip(problem.src, problem.dst, strict=True)):
            idle = unused(problem.digits, problem.src + problem.dst, ())
            fast = without(idle, problem.slow[0][2])
            both = (*fast, *(a for a in problem.partial if a in idle and a not in fast))
            styles += [(True, parked) for parked in dict.fromkeys((fast, both)) if parked]
    for style in styles:
        plain = _Builder(problem, *style)
        plain.append_all()
        paths = [plain.finished(plain.dims)]
        if paths[0] is None:
            paths = []
            for finer in (False, True) if problem.partial else (False,):
                shaped = _Builder(problem, *style)
                shaped.append_all(shape=True, finer=finer)
                shaped.reduce_rest()
                shaped.append_shape("slice")
                arrangements = directed.arrangements(shaped.dims, shaped.partial)
                paths += [shaped.finished(after) for after in arrangements]
        for path in paths:
            if path and all(problem.pieces(move.dims) >= problem.fewest_pieces for move in path):
                yield path


class _Builder:
    """A path that is being written down: its moves so far, and the sharding to which they led."""

    def __init__(self, problem: PricedQuestion, in_turn: bool, helpers: Axes) -> None:
        self.problem, self.in_turn, self.helpers = problem, in_turn, helpers
        self.moves: list[AtomMove] = []
        self.dims, self.partial = problem.src, problem.partial

    def _add(self, move: AtomMove) -> None:
        self.moves.append(move)
        self.dims, self.partial = move.dims, move.partial

    def append_all(self, shape: bool = False, finer: bool = False) -> None:
        """Adds slices of dims by unused digits, then reduce-scatters by partial ones, to the path.

        With `shape` digits may stand in for others of the same size; with `finer` dims are split
        further wherever they divide.
        """
        for kind in ("slice", "reduce_scatter"):
            # Helpers go to dims that neither end splits.
            for dim, ends in enumerate(zip(self.problem.src, self.problem.dst, strict=True)):
                for alike in self._runs_in_turn(self.helpers) if not any(ends) else ():
                    pool, room = self._pool(kind), self.problem.room[dim]
                    pool = tuple([a for a in pool if a in alike])
                    self._append(kind, dim, self.problem.dividing(room, self.dims[dim], pool))
            for dim, goal in enumerate(self.problem.dst):
                self._append(kind, dim, continuation(self.dims[dim], goal, self._pool(kind)))
            if shape:
                self.append_shape(kind)
            for dim, room in enumerate(self.problem.room) if finer else ():
                run = self.problem.dividing(room, self.dims[dim], self._pool(kind))
                self._append(kind, dim, run)

    def append_shape(self, kind: str) -> None:
        """Adds steps that give every dim digits of the sizes that it lacks against its goal."""
        sizes = self.problem.sizes
        for dim, goal in enumerate(self.problem.dst):
            lacking = Counter(sizes[a] for a in goal)
            lacking.subtract(sizes[a] for a in self.dims[dim])
            run: Axes = ()
            for a in self._pool(kind):
                if lacking[sizes[a]] > 0:
                    lacking[sizes[a]] -= 1
                    run = (*run, a)
            self._append(kind, dim, run)

    def _append(self, kind: str, dim: int, run: Axes) -> None:
        if run:
            self._add(step(kind, self.dims, self.partial, run, {dim: self.dims[dim] + run}))

    def _pool(self, kind: str) -> Axes:
        """Returns the digits that a step may add to dims: unused ones for a slice, else partial."""
        if kind == "slice":
            return unused(self.problem.digits, self.dims, self.partial)
        return self.partial

    def _runs_in_turn(self, run: Axes) -> list[Axes]:
        """Returns a run of digits whole or, if `in_turn`, cut where the speed of links differs."""
        if not self.in_turn:
            return [run]
        return [tuple(part) for _, part in groupby(run, lambda a: self.problem.paces[a])]

    def reduce_rest(self) -> None:
        owed = tuple(sorted(self.partial, key=lambda a: self.problem.paces[a]))
        for run in self._runs_in_turn(owed) if owed else ():
            self._add(step("all_reduce", self.dims, self.partial, run, {}))

    def finished(self, after: Dims) -> list[AtomMove] | None:
        """Returns the path completed by a permute to `after`; None if it can't end in the goal."""
        whole = copy(self)
        whole.moves = list(self.moves)
        whole.reduce_rest()
        if after != whole.dims:
            whole._add(permute(self.problem, whole.dims, whole.partial, after))
        while found := whole._next_exchange():
            whole._add(found)
        # Gathers what goes beyond the goal: first over slow links, while pieces are small.
        paces, goal = self.problem.paces, self.problem.dst
        beyond = {dim: whole.dims[dim][len(goal[dim]) :] for dim in whole._straying()}
        for dim in sorted(beyond, key=lambda dim: -max(paces[a] for a in beyond[dim])):
            for run in reversed(self._runs_in_turn(beyond[dim])):
                kept = {dim: whole.dims[dim][: -len(run)]}
                whole._add(step("all_gather", whole.dims, whole.partial, run, kept))
        return whole.moves if whole.dims == self.problem.dst else None

    def _next_exchange(self) -> AtomMove | None:
        """Returns an all-to-all to a dim that needs the last digits of another next, or None."""
        dims, goal = self.dims, self.problem.dst
        for dim in self._straying():
            for keep in range(len(goal[dim]), len(dims[dim])):
                run = dims[dim][keep:]
                for other, wanted in enumerate(goal):
                    if other != dim and continuation(dims[other], wanted, run) == run:
                        changed = {dim: dims[dim][:keep], other: dims[other] + run}
                        return step("all_to_all", dims, self.partial, run, changed)
        return None

    def _straying(self) -> list[int]:
        """Returns the dims that have more digits, behind those that they have in the goal."""
        ends = enumerate(zip(self.dims, self.problem.dst, strict=True))
        return [d for d, (axes, goal) in ends if axes != goal == axes[: len(goal)]]


# ---------------------------------------------------------------------------------------------
# The search.

# The directed search's phases: weight of the lower bound, and shardings to expand at most.
PHASES = ((2, 20), (1.2, 20))
LAST_GREED = 5  # the weight when no path is known at all: then any path will do
Cost = tuple[float, int, int]  # time, bytes, steps, at one size
Answer = tuple[AtomMove, ...]  # moves from first to last


class Size(NamedTuple):
    """The size of a value as a fraction: `growing / fixed` units.

    `Size(2, 3)` is 1.5 units. `cost` multiplies times by `fixed`, so that they are whole numbers:
    compare only costs at one size.
    """

    fixed: int
    growing: int

    def cost(self, line: Line) -> Cost:
        """Returns (time, bytes, steps) of a cost line at this size."""
        return self.fixed * line.fixed + self.growing * line.growing, line.sent, line.steps


NO_LIMIT: Cost = (math.inf, 0, 0)


@lru_cache(maxsize=1 << 14)
def direct_answers(question: Question) -> tuple[Answer, ...]:
    """Returns the paths for a `Question` (a reshard) that are written down without a search."""
    return tuple(dict.fromkeys(PathSearch(question).direct))


def is_small(question: Question) -> bool:
    """Whether a question has so few digits that every legal step can be tried."""
    return len(question.digits) <= (EXACT_DIGITS if is_joined(question) else EXACT_ATOMS)


def is_joined(question: Question) -> bool:
    """Whether some digit of a question stands for several atoms."""
    return any(len(digit.sizes) > 1 for digit in question.digits)


@lru_cache(maxsize=1 << 14)
def answers(question: Question) -> tuple[Answer, ...]:
    """Returns the best paths for a `Question` (a reshard), for small values first; () if none.

    A path's cost is a line, and the least cost a concave function of the size, made of straight
    pieces. Where the best paths of two sizes differ there is a size between at which these two cost
    the same: either both are best there, or a third one is. Where no path is known to be the best
    one, only one size between is looked at.
    """
    # Trace, of three paths with costs fixed + growing * size: gathering in one step 1 + 10 s, in
    # two cheaper ones 3 + 4 s, and an exchange 8 + 3 s. The best for the smallest value is the
    # first, for the largest the last. They meet at size 1; a search there finds the second path
    # (7 < 11), so both halves are looked at again: 1 + 10 s meets 3 + 4 s at 1/3, where nothing
    # undercuts them, and 3 + 4 s meets 8 + 3 s at 5, where nothing does either. All three are kept.
    search = PathSearch(question)
    last = search.best(Size(1, 1 << 60), ())
    first = search.best(Size(1, 0), () if last is None else (last,))
    if first is None or last is None:
        return ()
    return tuple(dict.fromkeys((*_between(search, first, last), last)))


def _between(search: PathSearch, first: Answer, last: Answer) -> Iterator[Answer]:
    """Yields the best paths from the size of `first` to that of `last`, which is left out."""
    a, b = search.line(first), search.line(last)
    if a.growing <= b.growing:
        yield from () if b.fixed <= a.fixed else (first,)
        return
    if b.fixed <= a.fixed:
        return
    common = math.gcd(a.growing - b.growing, b.fixed - a.fixed)
    size = Size((a.growing - b.growing) // common, (b.fixed - a.fixed) // common)
    middle = search.best(size, (first, last))
    assert middle is not None
    if size.cost(search.line(middle))[0] >= size.cost(a)[0]:
        yield first
        return
    if not search.exact:
        yield from (first, middle)
        return
    yield from _between(search, first, middle)
    yield from _between(search, middle, last)


@dataclass(eq=False)
class _Node:
    """A sharding that a search has met, with what holds for all sizes: bounds and moves."""

    search: PathSearch
    dims: Dims
    partial: Axes
    pieces: int

    @cached_property
    def bounds(self) -> list[Line]:
        """Lower bounds of the cost from here to the goal, as lines over the value's size."""
        return self.search.problem.bounds(self.dims, self.partial)

    @cached_property
    def edges(self) -> list[tuple[Line, AtomMove, _Node]]:
        """(cost, move, node that it leads to) of each move out of this sharding."""
        edges, search = [], self.search
        for move in search.moves.out_of(self.dims, self.partial, self.pieces):
            line, pieces = search.problem.price(move.kind, move.axes, self.pieces)
            edges.append((line, move, search.node(move.dims, move.partial, pieces)))
        return edges


class PathSearch:
    """Searches for the best paths for one `Question` (a reshard), for values of several sizes."""

    def __init__(self, question: Question) -> None:
        problem = self.problem = PricedQuestion(question)
        directed = DirectedMoves(problem)
        self.direct = [tuple(path) for path in direct_paths(problem, directed)]
        self._tries_all = is_small(question)
        self.exact = self._tries_all and not is_joined(question)  # every step, atom by atom
        self.moves = Moves(problem) if self._tries_all else directed
        # A sharding has one node: it is always in so many pieces.
        self.node = cache(lambda *sharding: _Node(self, *sharding))
        self._start = self.node(problem.src, problem.partial, problem.pieces(problem.src))
        self._goal = self.node(problem.dst, (), problem.goal_pieces)

    def best(self, size: Size, found: Sequence[Answer]) -> Answer | None:
        """Returns the best path for a size: one written down, or what a search finds if better.

        `found` are paths that are known already: a search looks only for what is cheaper.
        """
        paths = [*found, *self.direct]
        known = min(paths, key=lambda path: size.cost(self.line(path)), default=None)
        limit = NO_LIMIT if known is None else size.cost(self.line(known))
        if limit[:2] <= self._least(self._start, size)[:2]:
            return known
        if self._tries_all:
            return self._shortest(size, limit) or known
        for greed, budget in PHASES:
            better = self._shortest(size, limit, budget, greed)
            if better is not None:
                known, limit = better, size.cost(self.line(better))
        return known or self._shortest(size, NO_LIMIT, None, LAST_GREED)

    def line(self, path: Answer) -> Line:
        """Returns the cost of a path as a line over the size of the value."""
        pieces, lines = self._start.pieces, []
        for move in path:
            line, pieces = self.problem.price(move.kind, move.axes, pieces)
            lines.append(line)
        return Line(*map(sum, zip(*lines, strict=True))) if lines else Line(0, 0, 0, 0)

    def _least(self, node: _Node, size: Size) -> Cost:
        """Returns a lower bound of the cost from a sharding to the goal, for values of a size."""
        if not node.bounds:
            return 0, 0, 0
        fixed, growing = size
        time = max([fixed * line[0] + growing * line[1] for line in node.bounds])
        _, _, sent, steps = node.bounds[0]
        return time, sent, steps

    def _shortest(
        self, size: Size, limit: Cost, budget: int | None = None, greed: float = 1
    ) -> Answer | None:
        """Returns the best path from start to goal by A*; None if none costs less than the limit.

        At most `budget` shardings are expanded. With more `greed`, the weight of the lower bound,
        than 1 the search is faster, and no longer optimal.
        """
        # A sharding's estimate is what the way to it cost, plus what no way on from it undercuts.
        # The cheapest estimate is expanded first, so when that is the goal no other way is cheaper
        # (but for the greed). A sharding may be met again on a cheaper way: then the entry that it
        # already has in the heap is out of date, and is skipped.
        #
        # Trace, in bytes sent, of 16 bytes from [{x}, {y}] to [{}, {x}] on a 2 x 2 mesh:
        #   gather y:            4 to [{x}, {}],    4 more at least, estimate 8
        #   move x behind y:     2 to [{}, {y, x}], 8 more at least, estimate 10
        #   gather x:            4 to [{}, {y}],    8 more at least, estimate 12
        # The first is expanded: an all-to-all leads on to the goal, for 8 in all. That is the
        # cheapest estimate there is, so the other two are never looked at again.
        fixed, growing = size
        best: dict[_Node, Cost] = {self._start: (0, 0, 0)}
        least = cache(lambda node: self._least(node, size))
        came: dict[_Node, tuple[_Node, AtomMove]] = {}
        heap = [((0.0, 0, 0), (0, 0), best[self._start], self._start)]
        expanded = 0
        while heap and (budget is None or expanded < budget):
            _, _, spent, here = heapq.heappop(heap)
            if here is self._goal:
                path: list[AtomMove] = []
                while here in came:
                    here, move = came[here]
                    path.append(move)
                return tuple(path[::-1])
            if best[here] < spent:
                continue
            expanded += 1
            time, sent, count = spent
            permuted = here in came and came[here][1].kind == "collective_permute"
            for number, (line, move, there) in enumerate(here.edges):
                if permuted and move.kind == "collective_permute":
                    continue  # two that follow one another are one
                cost = (time + fixed * line[0] + growing * line[1], sent + line[2], count + 1)
                if cost >= limit or (there in best and best[there] <= cost):
                    continue
                left = least(there)
                estimate = (cost[0] + greed * left[0], cost[1] + left[1], cost[2] + left[2])
                if estimate >= limit:
                    continue
                best[there] = cost
                came[there] = (here, move)
                turn = (-expanded, number)  # of equals the one found last, nearer to the goal
                heapq.heappush(heap, (estimate, turn, cost, there))
        return None
