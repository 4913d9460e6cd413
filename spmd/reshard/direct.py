"""Paths that are written down without a search: often the best ones, else something to undercut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from spmd.mesh.sharding import Axes
from spmd.reshard.moves import DirectedMoves, Move, continuation, put, unused, without
from spmd.reshard.problem import Problem
from spmd.reshard.question import Dims


def direct_paths(problem: Problem, directed: DirectedMoves) -> Iterator[list[Move]]:
    """Slice and reduce what the goal asks for, permute if need be, exchange, gather.

    One path without a permute where that leads to the goal. Else several that permute once the
    local shape has everything that the goal's has, into the arrangements that `directed` proposes.
    Over links of different speed each of them also link by link, and with the help of digits that
    are parked on a dim that neither end splits: pieces are smaller while they cross the slow links.
    """
    if not problem.partial and [problem.extent(axes) for axes in problem.src] == list(
        problem.goal_extents
    ):
        moved = problem.moved(problem.src, problem.dst)
        yield [Move("collective_permute", problem.dst, (), moved, ())]
    for style in _styles(problem):
        begun = _Begun(problem, style)
        begun.towards_goal("slice")
        begun.park("reduce_scatter")
        begun.towards_goal("reduce_scatter")
        paths = [begun.finished(begun.dims)]
        if paths[0] is None:
            paths = [
                begun.finished(after)
                for begun in _permutable(problem, style)
                for after in directed.arrangements(begun.dims, begun.partial)
            ]
        for path in paths:
            if path and all(problem.pieces(move.dims) >= problem.fewest_pieces for move in path):
                yield path


class _Style(NamedTuple):
    """How a path deals with links of different speed.

    Attributes:
      in_turn: whether reductions and gathers go link by link.
      helpers: digits to park.
    """

    in_turn: bool
    helpers: Axes


def _styles(problem: Problem) -> Iterator[_Style]:
    """All links at once; in turn; with what is fast parked; and all that is partial as well."""
    yield _Style(False, ())
    slow = problem.fabric.slow
    if not slow:
        return
    yield _Style(True, ())
    if any(not (a or b) for a, b in zip(problem.src, problem.dst, strict=True)):
        used = {a for axes in (*problem.src, *problem.dst) for a in axes}
        idle = [a for a in problem.atoms if a not in used]
        fast = tuple(a for a in idle if a not in slow[0][2])
        both = (*fast, *(a for a in problem.partial if a in idle and a not in fast))
        yield from (_Style(True, parked) for parked in dict.fromkeys((fast, both)) if parked)


def _permutable(problem: Problem, style: _Style) -> Iterator[_Begun]:
    """Paths that are sliced and reduced, ready for a permute; what is owed may be cut finer."""
    for finer in (False, True) if problem.partial else (False,):
        begun = _Begun(problem, style)
        begun.towards_goal("slice")
        begun.towards_goal_shape("slice")
        if finer:
            begun.anywhere("slice")
        begun.park("reduce_scatter")
        begun.towards_goal("reduce_scatter")
        begun.towards_goal_shape("reduce_scatter")
        if finer:
            begun.anywhere("reduce_scatter")
        begun.reduce_rest()
        begun.towards_goal_shape("slice")
        yield begun


class _Begun:
    """The moves of a path so far, and where they have led."""

    def __init__(self, problem: Problem, style: _Style) -> None:
        self.problem = problem
        self.moves: list[Move] = []
        self.dims, self.partial = problem.src, problem.partial
        self.style = style
        self.park("slice")

    def park(self, kind: str) -> None:
        """Appends helpers to dims that neither end splits."""
        problem, helpers = self.problem, self.style.helpers
        for dim, (axes, goal) in enumerate(zip(problem.src, problem.dst, strict=True)):
            for alike in self._in_turn(helpers) if helpers and not (axes or goal) else ():
                pool = [a for a in self._pool(kind) if a in alike]
                if run := problem.dividing(problem.room[dim], self.dims[dim], pool):
                    self._append(kind, dim, run)

    def _in_turn(self, run: Axes) -> list[Axes]:
        """Runs of digits over equal links, if links are taken in turn."""
        paces = self.problem.fabric.paces
        if not self.style.in_turn:
            return [run]
        return [tuple(part) for _, part in groupby(run, lambda a: paces[a])]

    def _append(self, kind: str, dim: int, run: Axes) -> None:
        self.dims = put(self.dims, dim, self.dims[dim] + run)
        self.partial = without(self.partial, run)
        self.moves.append(Move(kind, self.dims, self.partial, run, (dim,)))

    def _pool(self, kind: str) -> Axes:
        """The atoms that a slice or a reduce-scatter can append."""
        if kind == "slice":
            return unused(self.problem.atoms, self.dims, self.partial)
        return self.partial

    def towards_goal(self, kind: str) -> None:
        """Appends to every dim the atoms that its goal has next."""
        for dim, goal in enumerate(self.problem.dst):
            if run := continuation(self.dims[dim], goal, self._pool(kind)):
                self._append(kind, dim, run)

    def towards_goal_shape(self, kind: str) -> None:
        """Appends to every dim atoms of the sizes that it lacks against its goal."""
        sizes = self.problem.fabric.sizes
        for dim, goal in enumerate(self.problem.dst):
            lacking = Counter(sizes[a] for a in goal)
            lacking.subtract(sizes[a] for a in self.dims[dim])
            run: Axes = ()
            for a in self._pool(kind):
                if lacking[sizes[a]] > 0:
                    lacking[sizes[a]] -= 1
                    run = (*run, a)
            if run:
                self._append(kind, dim, run)

    def anywhere(self, kind: str) -> None:
        """Appends atoms wherever a dim still divides."""
        for dim in range(len(self.dims)):
            room = self.problem.room[dim]
            if run := self.problem.dividing(room, self.dims[dim], self._pool(kind)):
                self._append(kind, dim, run)

    def reduce_rest(self) -> None:
        """All-reduces what is still owed."""
        paces = self.problem.fabric.paces
        owed = tuple(sorted(self.partial, key=lambda a: paces[a]))
        for run in self._in_turn(owed) if owed else ():
            self.partial = without(self.partial, run)
            self.moves.append(Move("all_reduce", self.dims, self.partial, run, ()))

    def finished(self, dims: Dims) -> list[Move] | None:
        """The moves so far, a permute to `dims`, exchanges, gathers; None if the goal is missed."""
        problem, goal = self.problem, self.problem.dst
        self.reduce_rest()
        moves = list(self.moves)
        if dims != self.dims:
            axes = problem.moved(self.dims, dims)
            moves.append(Move("collective_permute", dims, self.partial, axes, ()))
        while found := self._exchange(dims):
            dims = found.dims
            moves.append(found)
        for dim in self._slowest_first(dims):
            for run in reversed(self._in_turn(dims[dim][len(goal[dim]) :])):
                dims = put(dims, dim, dims[dim][: -len(run)])
                moves.append(Move("all_gather", dims, self.partial, run, (dim,)))
        return moves if dims == goal else None

    def _exchange(self, dims: Dims) -> Move | None:
        """An all-to-all of the longest minor run of a dim that another one's goal has next."""
        goal = self.problem.dst
        for dim in self._straying(dims):
            for keep in range(len(goal[dim]), len(dims[dim])):
                run = dims[dim][keep:]
                for other, wanted in enumerate(goal):
                    if other != dim and continuation(dims[other], wanted, run) == run:
                        after = put(put(dims, dim, dims[dim][:keep]), other, dims[other] + run)
                        return Move("all_to_all", after, self.partial, run, (dim, other))
        return None

    def _straying(self, dims: Dims) -> list[int]:
        """Dims that begin as their goal and go on."""
        ends = enumerate(zip(dims, self.problem.dst, strict=True))
        return [
            dim for dim, (axes, goal) in ends if len(axes) > len(goal) and axes[: len(goal)] == goal
        ]

    def _slowest_first(self, dims: Dims) -> list[int]:
        """The dims to gather: those over slow links while pieces are small."""
        paces, goal = self.problem.fabric.paces, self.problem.dst

        def pace(dim: int) -> float:
            return max(paces[a] for a in dims[dim][len(goal[dim]) :])

        return sorted(self._straying(dims), key=lambda dim: -pace(dim))
