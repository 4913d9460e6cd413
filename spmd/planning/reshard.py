"""`reshard`: the cheapest collectives that take a value from one sharding to another.

A shortest path over shardings, weighted by predicted seconds, none of whose buffers exceeds the
larger of the two ends. Rink et al. 2021, "Memory-efficient array redistribution through portable
collective communication", show that such a path exists when axes are cut into primes; here the
reductions of partial values and the links of the machine are part of the same search.

    slice                 nothing is sent: a tile is cut further
    all_gather            the minor atoms of one dim are dropped
    all_to_all            the minor atoms of one dim move to the minor end of another
    collective_permute    tiles keep their shape and change place
    reduce_scatter        partial atoms become the minor atoms of a dim
    all_reduce            partial atoms vanish
    mask                  nothing is sent: one term keeps the value, the others become 0
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import LegalityError
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, format_sharding, is_even, local_shape
from spmd.mesh.topology import Topology
from spmd.planning.comm import collective_seconds, wire_bytes
from spmd.planning.reshard_direct import direct_paths
from spmd.planning.reshard_moves import DirectedMoves, ExhaustiveMoves, Move, Moves
from spmd.planning.reshard_problem import Dims, Problem, fabric_of, moved

EXACT_ATOMS = 4
"""On meshes of so many atoms every legal step is tried: the path is exactly optimal."""

PHASES = ((2.0, 20), (1.2, 20))
"""The directed search's phases: weight of the lower bound, and shardings to expand at most."""

LAST_GREED = 5.0
"""Weight of the lower bound when no path is known at all: then any path will do."""


class Step(NamedTuple):
    """One collective, or one slice.

    Attributes:
      kind: one of `comm.KINDS`, or `mask`.
      before: sharding that it starts from.
      after: sharding that it leads to.
      axes: atoms along which devices exchange (or that a slice cuts by, or over which a mask leaves
        one device the value), in group order, major to minor.
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
    src: Sharding,
    dst: Sharding,
    type_: TensorType,
    mesh: Mesh,
    topology: Topology,
    held: Axes = (),
) -> Path:
    """The cheapest path from one sharding of a value to another.

    Fewest predicted seconds; then fewest bytes, then fewest steps. Exact on meshes of up to
    `EXACT_ATOMS` atoms; on larger ones, a search over the steps that lead towards `dst`.

    Args:
      src: sharding that the value has.
      dst: sharding that is wanted. It may stay partial over some of `src`'s partial atoms, and, if
        its terms are added, become partial over others: that is done last, by a mask.
      type_: global type. A dim that does not divide is searched as if it were padded until it did
        (its figures are those of the padded pieces).
      mesh: the mesh of both shardings.
      topology: the links.
      held: atoms that no step may use: along them the value differs (see `ir.control_flow`).

    Returns:
      A `Path`, empty when `src == dst`.

    Raises:
      LegalityError: a sharding that is not legal, or a value that is to become partial in a way
        in which no mask can make it.

    Example:
      >>> mesh = Mesh(None, (4, 2), ("data", "model"))
      >>> src, dst = (parse_sharding(text, mesh) for text in ("[{data}, {}]", "[{}, {data}]"))
      >>> [step.kind for step in reshard(src, dst, type_, mesh, Topology("h200:8")).steps]
      ['all_to_all']
    """
    if src == dst:
        return Path((), 0.0, 0)
    owed = tuple(a for a in dst.partial if a not in src.partial)
    if owed and dst.kind == "add" and src.kind in ("", "add"):
        unmasked = dst.with_partial(set(dst.partial).difference(owed), "add")
        path = reshard(src, unmasked, type_, mesh, topology, held)
        mask = Step("mask", unmasked, dst, owed, ())
        seconds = path.seconds + mask_seconds(unmasked, type_, mesh, topology)
        return Path((*path.steps, mask), seconds, path.bytes)
    ranks = {len(src.dims), len(dst.dims), type_.rank}
    padded = type_.with_shape(_padded(src, dst, type_.shape, mesh)) if len(ranks) == 1 else type_
    problem = Problem(src, dst, padded, fabric_of(mesh, topology), held)
    path = _path(problem, _solve(problem))
    if padded == type_:
        return path
    torn = {d for step in path.steps for d in _torn_dims(step, type_.shape, mesh)}
    if not torn:
        return path
    middle = Sharding(
        tuple(() if d in torn else axes for d, axes in enumerate(src.dims)), src.partial, src.kind
    )
    first = reshard(src, middle, type_, mesh, topology, held)
    second = reshard(middle, dst, type_, mesh, topology, held)
    seconds, sent = first.seconds + second.seconds, first.bytes + second.bytes
    return Path(first.steps + second.steps, seconds, sent)


def can_reshard(src: Sharding, dst: Sharding) -> bool:
    """Whether there is a path at all: a sum can be split into terms, nothing else can."""
    if not dst.partial:
        return True
    if dst.kind == "add":
        return src.kind in ("", "add")
    return src.kind == dst.kind and set(dst.partial) <= set(src.partial)


def mask_seconds(sharding: Sharding, type_: TensorType, mesh: Mesh, topology: Topology) -> float:
    """Time to read one device's piece and to write it, or zeros."""
    local = type_.with_shape(local_shape(type_.shape, sharding, mesh))
    return 2 * local.bytes / topology.hbm_bandwidth


def _padded(src: Sharding, dst: Sharding, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """The shape with every dim that either sharding does not divide rounded up until both do."""
    sizes = []
    for size, a, b in zip(shape, src.dims, dst.dims, strict=True):
        unit = math.lcm(mesh.extent(a), mesh.extent(b))
        fits = size % mesh.extent(a) == 0 and size % mesh.extent(b) == 0
        sizes.append(size if fits else -(-size // unit) * unit)
    return tuple(sizes)


def _torn_dims(step: Step, shape: Sequence[int], mesh: Mesh) -> list[int]:
    """Dims whose padded pieces a permute cannot move whole.

    Pieces are cut atom by atom; without padding only their number matters, with padding the order
    of the atoms' sizes does too.
    """
    if step.kind != "collective_permute":
        return []
    sizes = mesh.atom_sizes
    return [
        d
        for d, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True))
        if not is_even(shape[d], a, mesh) and [sizes[x] for x in a] != [sizes[x] for x in b]
    ]


def permute_pairs(before: Sharding, after: Sharding, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """Who sends to whom in a collective-permute: (source, target) for every device, by target.

    Devices are positions in the flattened mesh. A device that already holds what it needs keeps it;
    replicas share out the rest in order, within the groups of the atoms that change place.
    """
    axes = moved(before.dims, after.dims, mesh.atom_sizes)
    fixed = [a for a in range(len(mesh.atoms)) if a not in axes]

    have, wanted = (_pieces(sharding.dims, fixed, mesh) for sharding in (before, after))
    source = np.arange(mesh.size)
    moving = np.flatnonzero(have != wanted)
    takers, holders = (moving[np.argsort(p[moving], kind="stable")] for p in (wanted, have))
    source[takers] = holders
    return tuple(zip(source.tolist(), range(mesh.size), strict=True))


def _pieces(dims: Dims, fixed: Sequence[int], mesh: Mesh) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A number for the piece that each device holds, and for where it is along other atoms."""
    number = mesh.coordinates(fixed)
    for axes in dims:  # a permute leaves the number of pieces of every dim alone
        number = number * mesh.extent(axes) + mesh.coordinates(axes)
    return number


def _path(problem: Problem, moves: Sequence[Move]) -> Path:
    """Moves as steps, with the cost model's own figures."""
    steps: list[Step] = []
    here, seconds, sent = problem.src, 0.0, 0
    mesh, topology = problem.fabric.mesh, problem.fabric.topology
    before = problem.local_bytes(problem.pieces(here.dims))
    for move in moves:
        there = Sharding(move.dims, move.partial, problem.src.kind if move.partial else "")
        after = problem.local_bytes(problem.pieces(there.dims))
        seconds += collective_seconds(move.kind, move.axes, before, after, mesh, topology)
        sent += wire_bytes(move.kind, mesh.extent(move.axes), before, after)
        steps.append(Step(move.kind, here, there, move.axes, move.at))
        here, before = there, after
    return Path(tuple(steps), seconds, sent)


# ---------------------------------------------------------------------------------------------
# Search.

Cost = tuple[float, int, int]
"""Femtoseconds, bytes, steps."""

Node = tuple[Dims, Axes]
"""Atoms of each dim, and partial atoms."""


def _solve(problem: Problem) -> Sequence[Move]:
    """The path that is best at any size, if there is one; else the best at this size."""
    fabric = problem.fabric
    shape = tuple(math.gcd(size, fabric.mesh.size) for size in problem.shape)
    moves = _best_at_any_size(
        problem.src, problem.dst, shape, problem.barred, fabric.mesh, fabric.topology
    )
    return moves if moves is not None else _solve_at_size(problem)


@lru_cache(maxsize=1 << 16)
def _best_at_any_size(
    src: Sharding,
    dst: Sharding,
    shape: tuple[int, ...],
    barred: Axes,
    mesh: Mesh,
    topology: Topology,
) -> Sequence[Move] | None:
    """The path that is best whether values are small or large, hence for all in between.

    A path takes a fixed time and a time for each byte. If the one that is best for values so small
    that only the first counts costs no less than the one for values so large that only the second
    does, that one is best at both ends, and costs are linear.

    Args:
      src, dst: the shardings.
      shape: for each dim, what it has in common with the number of devices: all that legality asks.
      barred: atoms that no step may use.
      mesh: the mesh.
      topology: the links.
    """
    type_ = TensorType(shape, "i8")
    bits = 8 * mesh.size
    small, large = (
        Problem(src, dst, type_, fabric_of(mesh, topology), barred, bits * scale)
        for scale in (1, 1 << 40)
    )
    best = _solve_at_size(large)
    least = _cost(small, _solve_at_size(small))
    time, _, steps = _cost(small, best)
    return best if time <= least[0] + steps else None


def _solve_at_size(problem: Problem) -> Sequence[Move]:
    """The best direct path where that is provably best; else the best that a search finds."""
    directed = DirectedMoves(problem)
    known: Sequence[Move] | None = None
    for moves in direct_paths(problem, directed):
        if known is None or _cost(problem, moves) < _cost(problem, known):
            known = moves
        if _is_tight(problem, known):
            return known
    if len(problem.fabric.sizes) <= EXACT_ATOMS:
        known = _search(problem, ExhaustiveMoves(problem), known)
    else:
        for greed, budget in PHASES:
            known = _search(problem, directed, known, budget, greed)
    if known is None:
        known = _search(problem, directed, None, None, LAST_GREED)
    if known is None:
        raise LegalityError(
            f"no path of collectives was found for {problem.type}",
            actual=format_sharding(problem.src, problem.fabric.mesh),
            required=format_sharding(problem.dst, problem.fabric.mesh),
        )
    return known


def _cost(problem: Problem, moves: Sequence[Move]) -> Cost:
    time = sent = 0
    pieces = problem.pieces(problem.src.dims)
    for move in moves:
        step_time, step_sent, pieces = problem.price(move.kind, move.axes, pieces)
        time, sent = time + step_time, sent + step_sent
    return time, sent, len(moves)


def _is_tight(problem: Problem, moves: Sequence[Move]) -> bool:
    """Whether moves cost no more than the lower bound, but for the rounding of each."""
    time, sent, count = _cost(problem, moves)
    least_time, least_sent, _ = problem.bound(problem.src.dims, problem.src.partial)
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
    start, goal = (problem.src.dims, problem.src.partial), (problem.dst.dims, problem.dst.partial)
    best: dict[Node, Cost] = {start: (0, 0, 0)}
    bounds: dict[Node, tuple[int, int, int]] = {}
    came: dict[Node, tuple[Node, Move]] = {}
    heap = [((0.0, 0, 0), (0, 0), best[start], start, problem.pieces(problem.src.dims))]
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
