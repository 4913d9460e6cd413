"""Paths that are written down without a search: often the best ones, else something to undercut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from itertools import groupby

from spmd.mesh.sharding import Axes
from spmd.reshard.moves import (
    DirectedMoves,
    Move,
    append,
    continuation,
    exchange,
    gather,
    permute,
    reduce,
    unused,
    without,
)
from spmd.reshard.problem import Problem
from spmd.reshard.question import Dims


def direct_paths(problem: Problem, directed: DirectedMoves) -> Iterator[list[Move]]:
    """Slice and reduce what the goal asks for, permute if need be, exchange, gather.

    One path without a permute where that leads to the goal. Else several that permute once the
    local shape has everything that the goal's has, into the arrangements that `directed` proposes.
    Over links of different speed each of them also link by link, and with the help of digits that
    are parked on a dim that neither end splits: pieces are smaller while they cross the slow links.
    """
    extents = tuple(problem.extent(axes) for axes in problem.src)
    if not problem.partial and extents == problem.goal_extents:
        yield [permute(problem, problem.src, (), problem.dst)]
    for style in _styles(problem):
        plain = _Builder(problem, style)
        plain.append_all()
        paths = [plain.finished(plain.dims)]
        if paths[0] is None:
            paths = []
            for finer in (False, True) if problem.partial else (False,):
                shaped = _Builder(problem, style)
                shaped.append_all(shape=True, finer=finer)
                shaped.reduce_rest()
                shaped.append_shape("slice")
                arrangements = directed.arrangements(shaped.dims, shaped.partial)
                paths += [shaped.finished(after) for after in arrangements]
        for path in paths:
            if path and all(problem.pieces(move.dims) >= problem.fewest_pieces for move in path):
                yield path


_Style = tuple[bool, Axes]
"""Whether reductions and gathers go link by link, and the digits to park."""


def _styles(problem: Problem) -> Iterator[_Style]:
    """All links at once; in turn; with what is fast parked; and all that is partial as well."""
    yield False, ()
    if not problem.slow:
        return
    yield True, ()
    if any(not (a or b) for a, b in zip(problem.src, problem.dst, strict=True)):
        idle = unused(problem.digits, problem.src + problem.dst, ())
        fast = without(idle, problem.slow[0][2])
        both = (*fast, *(a for a in problem.partial if a in idle and a not in fast))
        yield from ((True, parked) for parked in dict.fromkeys((fast, both)) if parked)


class _Builder:
    """A path that is being written down: its moves so far, and where they have led."""

    def __init__(self, problem: Problem, style: _Style) -> None:
        self.problem = problem
        self.in_turn, self.helpers = style
        self.moves: list[Move] = []
        self.dims, self.partial = problem.src, problem.partial

    def _add(self, move: Move) -> None:
        self.moves.append(move)
        self.dims, self.partial = move.dims, move.partial

    def append_all(self, shape: bool = False, finer: bool = False) -> None:
        """Slices by what is idle, then reduce-scatters what is partial.

        Args:
          shape: whether digits may stand in for others of the same size.
          finer: whether dims are split further wherever they divide.
        """
        for kind in ("slice", "reduce_scatter"):
            self._park(kind)
            for dim, goal in enumerate(self.problem.dst):
                self._append(kind, dim, continuation(self.dims[dim], goal, self._pool(kind)))
            if shape:
                self.append_shape(kind)
            for dim, room in enumerate(self.problem.room) if finer else ():
                run = self.problem.dividing(room, self.dims[dim], self._pool(kind))
                self._append(kind, dim, run)

    def append_shape(self, kind: str) -> None:
        """Appends to every dim digits of the sizes that it lacks against its goal."""
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

    def _park(self, kind: str) -> None:
        """Appends helpers to dims that neither end splits."""
        problem = self.problem
        for dim, (axes, goal) in enumerate(zip(problem.src, problem.dst, strict=True)):
            for alike in self._runs_in_turn(self.helpers) if not (axes or goal) else ():
                pool = [a for a in self._pool(kind) if a in alike]
                self._append(kind, dim, problem.dividing(problem.room[dim], self.dims[dim], pool))

    def _append(self, kind: str, dim: int, run: Axes) -> None:
        if run:
            self._add(append(kind, self.dims, self.partial, dim, run))

    def _pool(self, kind: str) -> Axes:
        """The digits that a slice or a reduce-scatter can append."""
        if kind == "slice":
            return unused(self.problem.digits, self.dims, self.partial)
        return self.partial

    def _runs_in_turn(self, run: Axes) -> list[Axes]:
        """Runs of digits over equal links, if links are taken in turn."""
        if not self.in_turn:
            return [run]
        return [tuple(part) for _, part in groupby(run, lambda a: self.problem.paces[a])]

    def reduce_rest(self) -> None:
        """All-reduces what is still partial."""
        owed = tuple(sorted(self.partial, key=lambda a: self.problem.paces[a]))
        for run in self._runs_in_turn(owed) if owed else ():
            self._add(reduce(self.dims, self.partial, run))

    def finished(self, after: Dims) -> list[Move] | None:
        """These moves, a permute to `after`, exchanges, gathers; None if that misses the goal."""
        whole = copy(self)
        whole.moves = list(self.moves)
        whole.reduce_rest()
        if after != whole.dims:
            whole._add(permute(self.problem, whole.dims, whole.partial, after))
        while found := whole._next_exchange():
            whole._add(found)
        whole._gather()
        return whole.moves if whole.dims == self.problem.dst else None

    def _next_exchange(self) -> Move | None:
        """An all-to-all of the longest minor run of a dim that another one's goal has next."""
        dims, goal = self.dims, self.problem.dst
        for dim in self._straying():
            for keep in range(len(goal[dim]), len(dims[dim])):
                run = dims[dim][keep:]
                for other, wanted in enumerate(goal):
                    if other != dim and continuation(dims[other], wanted, run) == run:
                        return exchange(dims, self.partial, dim, keep, other)
        return None

    def _straying(self) -> list[int]:
        """Dims that begin as their goal and go on."""
        ends = enumerate(zip(self.dims, self.problem.dst, strict=True))
        return [
            dim for dim, (axes, goal) in ends if len(axes) > len(goal) and axes[: len(goal)] == goal
        ]

    def _gather(self) -> None:
        """Gathers what goes beyond the goal: first over slow links, while pieces are small."""
        paces, goal = self.problem.paces, self.problem.dst
        beyond = {dim: self.dims[dim][len(goal[dim]) :] for dim in self._straying()}
        for dim in sorted(beyond, key=lambda dim: -max(paces[a] for a in beyond[dim])):
            for run in reversed(self._runs_in_turn(beyond[dim])):
                keep = len(self.dims[dim]) - len(run)
                self._add(gather(self.dims, self.partial, dim, keep))
