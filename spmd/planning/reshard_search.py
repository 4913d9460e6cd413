"""The cheapest moves that answer a question, for every size of the value: A* over shardings."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from spmd.mesh.sharding import Axes
from spmd.planning.reshard_direct import direct_paths
from spmd.planning.reshard_moves import DirectedMoves, ExhaustiveMoves, Move, Moves
from spmd.planning.reshard_problem import Problem
from spmd.planning.reshard_question import MOST_DIGITS, Dims, Question

PHASES = ((2.0, 20), (1.2, 20))
"""The directed search's phases: weight of the lower bound, and shardings to expand at most."""

LAST_GREED = 5.0
"""Weight of the lower bound when no path is known at all: then any path will do."""

LARGEST = 1 << 36
"""Bytes of the smallest possible piece of the largest value that is looked at."""

Cost = tuple[float, int, int]
"""Femtoseconds, bytes, steps."""

Node = tuple[Dims, Axes]
"""Digits of each dim, and partial digits."""

Answer = tuple[Move, ...]
"""Moves from first to last."""


@lru_cache(maxsize=1 << 14)
def answers(question: Question) -> tuple[Answer, ...]:
    """A best path for every size of the value, those for small values first; none if there is none.

    A path takes a fixed time and a time for each byte, so that the least time is a concave function
    of the size, made of straight pieces. Between two sizes whose best paths differ there is one
    where these two cost the same: either both are best there, or a third one is.
    """
    small, large = (_solve(Problem(question, _bits(question, size))) for size in (1, LARGEST))
    if small is None or large is None:
        return ()
    return tuple(dict.fromkeys(_between(question, (1, small), (LARGEST, large))))


def _bits(question: Question, size: int) -> int:
    """Bits of a value of which a device has so many bytes when it is split over all."""
    return 8 * size * math.prod(size for digit in question.digits for size in digit.sizes)


def _between(
    question: Question, first: tuple[int, Answer], last: tuple[int, Answer]
) -> tuple[Answer, ...]:
    """The best paths from one size, where the first is one, up to another, where the last is one."""
    small, large = (Problem(question, _bits(question, size)) for size in (first[0], last[0]))
    least, cost = _cost(small, first[1]), _cost(small, last[1])
    if cost[0] <= least[0] + cost[2]:  # but for the rounding of each step
        return (last[1],)
    most = _cost(large, first[1])
    if most[0] <= _cost(large, last[1])[0] + most[2]:
        return (first[1],)
    middle = _crossing(question, first, last)
    if not first[0] < middle < last[0]:
        return (first[1], last[1])
    problem = Problem(question, _bits(question, middle))
    best = _solve(problem)
    assert best is not None
    known = min(_cost(problem, path)[0] for path in (first[1], last[1]))
    time, _, steps = _cost(problem, best)
    if time + steps >= known:
        return (first[1], last[1])
    lower, upper = (first, (middle, best)), ((middle, best), last)
    return (*_between(question, *lower), *_between(question, *upper))


def _crossing(question: Question, first: tuple[int, Answer], last: tuple[int, Answer]) -> int:
    """At which size two paths cost the same."""
    (at, path), (end, other) = first, last
    gaps = []
    for size in (at, end):
        problem = Problem(question, _bits(question, size))
        gaps.append(_cost(problem, path)[0] - _cost(problem, other)[0])
    return at + round((end - at) * -gaps[0] / (gaps[1] - gaps[0]))


def _solve(problem: Problem) -> Answer | None:
    """The best direct path where that is provably best; else the best that a search finds."""
    directed = DirectedMoves(problem)
    known: Sequence[Move] | None = None
    for moves in direct_paths(problem, directed):
        if known is None or _cost(problem, moves) < _cost(problem, known):
            known = moves
        if _is_tight(problem, known):
            return tuple(known)
    if len(problem.atoms) <= MOST_DIGITS:
        known = _search(problem, ExhaustiveMoves(problem), known)
    else:
        for greed, budget in PHASES:
            known = _search(problem, directed, known, budget, greed)
    if known is None:
        known = _search(problem, directed, None, None, LAST_GREED)
    return None if known is None else tuple(known)


def _cost(problem: Problem, moves: Sequence[Move]) -> Cost:
    time = sent = 0
    pieces = problem.pieces(problem.src)
    for move in moves:
        step_time, step_sent, pieces = problem.price(move.kind, move.axes, pieces)
        time, sent = time + step_time, sent + step_sent
    return time, sent, len(moves)


def _is_tight(problem: Problem, moves: Sequence[Move]) -> bool:
    """Whether moves cost no more than the lower bound, but for the rounding of each."""
    time, sent, count = _cost(problem, moves)
    least_time, least_sent, _ = problem.bound(problem.src, problem.partial)
    return time - least_time <= 2 * count and sent <= least_sent


def _search(
    problem: Problem,
    moves: Moves,
    known: Sequence[Move] | None,
    budget: int | None = None,
    greed: float = 1,
) -> Sequence[Move] | None:
    """A* from `src` to `dst`.

    Args:
      problem: what is searched.
      moves: which moves are tried.
      known: a path that is to be undercut.
      budget: shardings to expand at most.
      greed: weight of the lower bound; above 1 it is faster, and no longer optimal.

    Returns:
      The best path, or `known` when nothing better is found.
    """
    limit = _cost(problem, known) if known is not None else None
    start, goal = (problem.src, problem.partial), (problem.dst, ())
    best: dict[Node, Cost] = {start: (0, 0, 0)}
    bounds: dict[Node, tuple[int, int, int]] = {}
    came: dict[Node, tuple[Node, Move]] = {}
    heap = [((0.0, 0, 0), (0, 0), best[start], start, problem.pieces(problem.src))]
    expanded = 0
    while heap and (budget is None or expanded < budget):
        _, _, spent, here, pieces = heapq.heappop(heap)
        if here == goal:
            return _unwind(came, here)
        if best[here] < spent:
            continue
        expanded += 1
        time, sent, count = spent
        last = came[here][1].kind if here in came else ""
        for number, move in enumerate(moves.out_of(*here, pieces, last)):
            there = (move.dims, move.partial)
            step_time, step_sent, after = problem.price(move.kind, move.axes, pieces)
            cost = (time + step_time, sent + step_sent, count + 1)
            if (there in best and best[there] <= cost) or (limit is not None and cost >= limit):
                continue
            left = bounds.get(there)
            if left is None:
                left = bounds[there] = problem.bound(*there)
            estimate = (cost[0] + greed * left[0], cost[1] + left[1], cost[2] + left[2])
            if limit is not None and estimate >= limit:
                continue
            best[there] = cost
            came[there] = (here, move)
            turn = (-expanded, number)  # of equals, the one found last: it is nearer to the goal
            heapq.heappush(heap, (estimate, turn, cost, there, after))
    return known


def _unwind(came: dict[Node, tuple[Node, Move]], here: Node) -> list[Move]:
    moves: list[Move] = []
    while here in came:
        here, move = came[here]
        moves.append(move)
    return moves[::-1]
