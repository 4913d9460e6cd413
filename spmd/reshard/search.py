"""The cheapest moves that answer a question: A* over shardings."""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import chain, combinations, permutations
from typing import NamedTuple

from spmd.mesh.sharding import Axes, common_prefix
from spmd.reshard.question import (
    EXACT_ATOMS,
    EXACT_DIGITS,
    Dims,
    PathCost,
    PricedQuestion,
    Question,
    moved,
)

# The steps that a search tries out of a sharding: every legal one, or those towards the goal.


class AtomMove(NamedTuple):
    """A step over digits `axes`, which changes the dims `at`, to the sharding `dims`, `partial`."""

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
        # All of the digits, and those of each size.
        sizes = sorted({problem.sizes[a] for a in pool})
        groups = [[a for a in stand_ins if problem.sizes[a] == size] for size in sizes]
        for alike in (stand_ins, *groups):
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
        """Returns counts of major digits to keep: as in common with the goal, or of its extent."""
        wanted, extent = self.problem.goal_extents[dim], self.problem.extent
        common = len(common_prefix(axes, self.problem.dst[dim]))
        return {k for k in range(len(axes)) if k == common or extent(axes[:k]) == wanted}

    def _reduced(self, owed: Axes) -> Iterable[Axes]:
        return (owed,)

    def arrangements(self, dims: Dims, partial: Axes) -> Iterable[Dims]:
        """Returns the dims that a collective-permute may lead to: they begin as in the goal.

        What is left is filled with digits that are there now, or that the goal has nowhere, if
        possible: from the first dim to the last, or from the last to the first.
        """
        # With digits of size 2, from [{a, b}, {c}] to [{c}, {a, b}]: dim 0 keeps its four pieces, c
        # and one more digit; dim 1 takes a. So b waits in dim 0, and an all-to-all is left.
        problem, sizes = self.problem, self.problem.sizes
        prefixes: list[Axes] = []
        spaces: list[int] = []  # the extent that each dim's prefix leaves to be filled
        for axes, goal in zip(dims, problem.dst, strict=True):
            space, prefix = problem.extent(axes), continuation((), goal, without(goal, partial))
            count = 0
            while count < len(prefix) and space % sizes[prefix[count]] == 0:
                space //= sizes[prefix[count]]
                count += 1
            prefixes.append(prefix[:count])
            spaces.append(space)
        found: dict[Dims, None] = {}
        for order in (range(len(dims)), range(len(dims))[::-1]):
            after, pool = list(prefixes), set(problem.digits).difference(partial, *prefixes)
            for dim in order:
                spare = sorted(
                    pool, key=lambda a: (a not in dims[dim], a in problem.goal_digits, a)
                )
                run = problem.dividing(spaces[dim], (), spare)
                after[dim] += run
                pool.difference_update(run)
            if list(map(problem.extent, after)) == list(map(problem.extent, dims)):
                found[tuple(after)] = None
        return found


def without(axes: Axes, gone: Iterable[int]) -> Axes:
    """Returns `axes` without the digits that are `gone`."""
    return tuple([a for a in axes if a not in gone])


def unused(atoms: Axes, dims: Dims, partial: Axes) -> Axes:
    """Returns the atoms (or digits) that neither split a dim nor are partial."""
    return without(atoms, {a for axes in dims for a in axes}.union(partial))


def continuation(axes: Axes, goal: Axes, pool: Axes) -> Axes:
    """Returns digits of `goal` behind its prefix `axes`, while in `pool`; () if it is no prefix."""
    start = end = len(axes)
    if goal[:start] != axes:
        return ()
    while end < len(goal) and goal[end] in pool:
        end += 1
    return goal[start:end]


# The search.

# The weights of the lower bound with which a directed search goes over shardings, one after
# another, and how many of them it expands at most: the first one finds some path, soon.
PHASES = ((100, None), (20, 300), (5, 300), (2, 300), (1.2, 100))
Answer = tuple[AtomMove, ...]  # moves from first to last


def is_small(question: Question) -> bool:
    """Whether a question has so few digits that every legal step can be tried."""
    is_joined = any(len(digit.sizes) > 1 for digit in question.digits)
    return len(question.digits) <= (EXACT_DIGITS if is_joined else EXACT_ATOMS)


@lru_cache(maxsize=1 << 14)
def cheapest(question: Question, bits: int) -> Answer | None:
    """Returns the moves that answer a `Question` on a value of so many bits; None if none do.

    No moves are cheaper if the question is small: every legal step is tried. Else only steps that
    lead towards the goal are, greedily first; then it is looked for what is cheaper.
    """
    problem, is_exact = PricedQuestion(question, bits), is_small(question)
    best, limit = None, PathCost(math.inf, 0, 0)
    search = _PathSearch(problem, Moves(problem) if is_exact else DirectedMoves(problem))
    for greed, budget in ((1, None),) if is_exact else PHASES:
        if (found := search.shortest(limit, greed, budget)) is not None:
            best, limit = found
    return best


Node = tuple[Dims, Axes]  # a sharding that a search has met: dims, and what is partial


class _PathSearch:
    def __init__(self, problem: PricedQuestion, moves: Moves) -> None:
        self.problem, self._moves = problem, moves
        self._bound = cache(problem.bound)
        self._edges = cache(self._edges_of)

    def _edges_of(self, dims: Dims, partial: Axes) -> list[tuple[PathCost, AtomMove]]:
        pieces = self.problem.pieces(dims)
        moves = self._moves.out_of(dims, partial, pieces)
        return [(self.problem.price(move.kind, move.axes, pieces), move) for move in moves]

    def shortest(
        self, limit: PathCost, greed: float, budget: int | None
    ) -> tuple[Answer, PathCost] | None:
        """Returns the best path by A*, and its cost; None if none costs less than the limit.

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
        start: Node = self.problem.src, self.problem.partial
        best: dict[Node, PathCost] = {start: PathCost(0, 0, 0)}
        came: dict[Node, tuple[Node, AtomMove]] = {}
        heap = [((0.0, 0, 0), (0, 0), best[start], start)]
        expanded = 0
        while heap and (budget is None or expanded < budget):
            _, _, spent, here = heapq.heappop(heap)
            if here == (self.problem.dst, ()):
                path: list[AtomMove] = []
                while here in came:
                    here, move = came[here]
                    path.append(move)
                return tuple(path[::-1]), spent
            if best[here] < spent:
                continue
            expanded += 1
            time, sent, count = spent
            permuted = here in came and came[here][1].kind == "collective_permute"
            for number, (more, move) in enumerate(self._edges(*here)):
                if permuted and move.kind == "collective_permute":
                    continue  # two that follow one another are one
                cost = PathCost(time + more[0], sent + more[1], count + 1)
                there = move.dims, move.partial
                if cost >= limit or (there in best and best[there] <= cost):
                    continue
                left = self._bound(*there)
                estimate = (cost[0] + greed * left[0], cost[1] + left[1], cost[2] + left[2])
                if estimate >= limit:
                    continue
                best[there], came[there] = cost, (here, move)
                turn = (-expanded, number)  # of equals the one found last, nearer to the goal
                heapq.heappush(heap, (estimate, turn, cost, there))
        return None
