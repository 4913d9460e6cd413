"""Reshards: the cheapest collectives that take a value from one sharding to another.

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

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import LegalityError
from spmd.ir.control_flow import Index
from spmd.ir.program import Value
from spmd.ir.types import TensorType, dtype_bits, local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, format_sharding, is_even, is_legal
from spmd.mesh.topology import Topology
from spmd.reshard.atlas import distances
from spmd.reshard.comm import terms_of
from spmd.reshard.search import Answer, AtomMove, Names, cheapest, moved, pieces_after, questions

Table = np.ndarray[Any, np.dtype[np.float64]]

States = tuple[Sharding, ...]  # shardings that one value may be in


class PathStep(NamedTuple):
    """One step of a reshard: a collective, slice or mask over the atoms `axes`, in group order."""

    kind: str  # one of `comm.KINDS`, or `mask`
    before: Sharding
    after: Sharding
    # Atoms along which devices exchange (or that a slice cuts by, or over which a mask leaves one
    # device the value), in group order, major to minor.
    axes: Axes
    # slice, all_gather, reduce_scatter: `(dim,)`; all_to_all: `(dim that the axes leave and that is
    # concatenated, dim that they go to and that is split)`; otherwise `()`.
    dims: tuple[int, ...]


@dataclass(eq=False)
class Path:
    """The steps of a reshard (`make()`), their seconds, and bytes that each device sends."""

    make: Callable[[], tuple[PathStep, ...]]  # of most paths the steps are never asked for
    seconds: float
    bytes: int

    @cached_property
    def steps(self) -> tuple[PathStep, ...]:
        """The steps from first to last, made when this is first read."""
        return self.make()

    def __repr__(self) -> str:
        return f"Path(steps={self.steps}, seconds={self.seconds}, bytes={self.bytes})"


@lru_cache(maxsize=1 << 16)
def reshard(
    src: Sharding, dst: Sharding, type_: TensorType, mesh: Mesh, topology: Topology, held: Axes = ()
) -> Path:
    """Returns the cheapest path from one sharding of a value to another.

    It takes the fewest predicted seconds; of equals, the fewest bytes, then the fewest steps. That
    is exact on meshes of up to `EXACT_ATOMS` atoms. On larger ones steps between shardings over
    whole axes move whole axes (`atlas`); between others, atoms that both shardings have next to
    each other move together, and where that leaves more than `EXACT_DIGITS` of them, only steps
    that lead towards `dst` are tried.

    `dst` may be partial: what is partial at both ends is left so, and the last step makes the value
    partial over other atoms (a mask if terms are added, nothing if their maximum is taken). A dim
    that does not divide is searched as if padded until it does. No step may use `held` atoms: along
    them the value differs (see `ir.control_flow`).

    Raises:
      LegalityError: a sharding that is not legal, no path (without `held` atoms), or a value that
        is to become partial in a way in which no mask can make it.
    """
    if src == dst or type_.is_empty:  # of which any piece is made anywhere
        return Path(tuple, 0.0, 0)
    owed = tuple(a for a in dst.partial if a not in src.partial)
    if owed and dst.kind in SPLITTABLE and src.kind in ("", dst.kind):
        unmasked = dst.with_partial(set(dst.partial).difference(owed), dst.kind)
        path = reshard(src, unmasked, type_, mesh, topology, held)
        mask = PathStep("mask", unmasked, dst, owed, ())
        more = 0.0 if dst.kind in WHOLE_TERMS else mask_seconds(unmasked, type_, mesh, topology)
        return Path(lambda: (*path.steps, mask), path.seconds + more, path.bytes)
    legal = all(is_legal(sharding, type_.shape, mesh, even=False) for sharding in (src, dst))
    if not legal or not can_reshard(src, dst):
        fix = "use every atom at most once and give every dim its atoms"
        raise LegalityError(
            f"no reshard of {type_} leads from one sharding to the other",
            actual=format_sharding(src, mesh),
            required=format_sharding(dst, mesh),
            fix="leave partial only what is partial already" if legal else fix,
        )
    # Every dim that either sharding does not divide is rounded up until both do.
    pairs = zip(src.dims, dst.dims, strict=True)
    units = [math.lcm(mesh.extent(a), mesh.extent(b)) for a, b in pairs]
    shape = tuple(-(-size // unit) * unit for size, unit in zip(type_.shape, units, strict=True))
    # The cheapest path over whole axes; if there is none, the one that a search finds.
    room = tuple([math.gcd(size, mesh.size) for size in shape])
    bits = math.prod(shape) * dtype_bits(type_.dtype)
    known = distances(room, bits, held, mesh, topology)
    if known is not None and (found := known.path(src, dst)) is not None:
        (answer, seconds, sent), names = found, known.names
    else:
        # Joined atoms cannot part: there may be no path until they do.
        for question, names in questions(src, dst, room, held, mesh, topology):
            kept = mesh.extent(a for axes in names.kept for a in axes)
            if (moves := cheapest(question, -(-bits // kept))) is not None:
                break
        else:
            raise LegalityError(
                f"no path of collectives was found for {TensorType(shape, type_.dtype)}",
                actual=format_sharding(src, mesh),
                required=format_sharding(dst, mesh),
            )
        answer, seconds, sent = moves, 0.0, 0
        pieces = mesh.extent(a for axes in src.dims for a in axes)
        for move in moves:
            terms = terms_of(move.kind, _axes_of(move, names), mesh, topology)
            after = pieces_after(move.kind, terms.group, pieces)
            took, more = terms.cost(-(-bits // (8 * pieces)), -(-bits // (8 * after)))
            seconds, sent, pieces = seconds + took, sent + more, after
    path = Path(lambda: _steps_of(answer, names, src, dst), seconds, sent)
    steps = path.steps if shape != type_.shape else ()
    if not (torn := {d for step in steps for d in torn_dims(step, type_.shape, mesh)}):
        return path
    # A path that gathers these dims before any permute, and cuts them afterwards.
    bare, last = (
        Sharding(
            tuple(() if d in torn else axes for d, axes in enumerate(s.dims)), s.partial, s.kind
        )
        for s in (src, dst)
    )
    if bare != src:
        first = _one_by_one(src, bare, type_, mesh, topology)
        second = reshard(bare, dst, type_, mesh, topology, held)
    else:
        first = reshard(src, last, type_, mesh, topology, held)
        second = _one_by_one(last, dst, type_, mesh, topology)
    seconds, sent = first.seconds + second.seconds, first.bytes + second.bytes
    return Path(lambda: first.steps + second.steps, seconds, sent)


def reshard_seconds(
    states: Sequence[Sharding],
    needs: Sequence[Sharding],
    type_: TensorType,
    mesh: Mesh,
    topology: Topology,
    held: Axes = (),
) -> Table:
    """Returns a table of the seconds of `reshard` from each state (rows) to each need (columns).

    Entries are infinite if there can be no path, and NaN if only a call of `reshard` can tell.
    """
    result = np.full((len(states), len(needs)), math.nan)
    room = tuple([math.gcd(size, mesh.size) for size in type_.shape])
    known = distances(room, type_.size * dtype_bits(type_.dtype), held, mesh, topology)
    if known is None or type_.is_empty:
        return result
    # (position, node) of shardings that have a node, by what they are partial over.
    rows: dict[tuple[Axes, str], list[tuple[int, int]]] = {}
    columns: dict[tuple[Axes, str], list[tuple[int, int]]] = {}
    for shardings, found in ((states, rows), (needs, columns)):
        for i, sharding in enumerate(shardings):
            if (node := known.node(sharding)) is not None:
                found.setdefault((sharding.partial, sharding.kind), []).append((i, node))
    known.learn([node for at in rows.values() for _, node in at])
    ends: dict[tuple[Axes, str, Axes], tuple[Any, Any]] = {}  # where ways end, before any mask
    for (partial, _), at in rows.items():
        table = known.table([node for _, node in at])
        numbers = np.array([i for i, _ in at])[:, None]
        for (wanted, kind), there in columns.items():
            place = numbers, [j for j, _ in there]
            if not can_reshard(states[at[0][0]], needs[there[0][0]]):
                result[place] = math.inf
                continue
            kept = tuple([a for a in wanted if a in partial])
            if (wanted, kind, kept) not in ends:
                full = [needs[j].with_partial(kept, kind) for j, _ in there]
                masks = len(kept) < len(wanted) and kind not in WHOLE_TERMS
                more = [mask_seconds(s, type_, mesh, topology) if masks else 0.0 for s in full]
                ends[wanted, kind, kept] = np.array([known.node(s) for s in full]), np.array(more)
            nodes, more = ends[wanted, kind, kept]
            seconds = table[:, nodes] + more
            result[place] = np.where(np.isinf(seconds), math.nan, seconds)
    return result


def _one_by_one(
    src: Sharding, dst: Sharding, type_: TensorType, mesh: Mesh, topology: Topology
) -> Path:
    """Returns the path that gathers or slices, one after another, the dims that differ."""
    steps, seconds, sent, here = [], 0.0, 0, src
    for d, (a, b) in enumerate(zip(src.dims, dst.dims, strict=True)):
        if a != b:
            there = Sharding((*here.dims[:d], b, *here.dims[d + 1 :]), here.partial, here.kind)
            step = PathStep("all_gather" if a else "slice", here, there, a or b, (d,))
            before, after = (local_type(type_, s, mesh).bytes for s in (here, there))
            took, more = terms_of(step.kind, step.axes, mesh, topology).cost(before, after)
            seconds, sent = seconds + took, sent + more
            steps.append(step)
            here = there
    return Path(lambda: tuple(steps), seconds, sent)


def can_reshard(src: Sharding, dst: Sharding) -> bool:
    """Whether a reshard from one sharding to the other exists.

    It does unless `dst` is partial over atoms that `src` is not, and not by `add`, `max`, `min`,
    `and` or `or`; or both are partial, of different kinds.
    """
    if not dst.partial:
        return True
    if dst.kind in SPLITTABLE:
        return src.kind in ("", dst.kind)
    return src.kind == dst.kind and set(dst.partial) <= set(src.partial)


def mask_seconds(sharding: Sharding, type_: TensorType, mesh: Mesh, topology: Topology) -> float:
    """Returns the seconds of a mask, which makes a value partial without communication.

    Of the devices with the same piece, one keeps it, and the others write zeros.
    """
    return 2 * local_type(type_, sharding, mesh).bytes / topology.hbm_bandwidth


def torn_dims(step: PathStep, shape: Sequence[int], mesh: Mesh) -> list[int]:
    """Returns the padded dims whose tuples of atom sizes a permute changes; [] for other steps."""
    if step.kind != "collective_permute":
        return []
    sizes = mesh.atom_sizes
    return [
        d
        for d, (a, b) in enumerate(zip(step.before.dims, step.after.dims, strict=True))
        if not is_even(shape[d], a, mesh) and [sizes[x] for x in a] != [sizes[x] for x in b]
    ]


def permute_pairs(before: Sharding, after: Sharding, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """Returns (source, target) of every device in a collective-permute, by target.

    Devices are positions in the flattened mesh. A device that already has the piece it needs keeps
    it; the others get theirs, in order, from a device with equal coordinates along unmoved atoms.
    """
    axes = moved(before.dims, after.dims, mesh.atom_sizes)
    fixed = mesh.coordinates([a for a in range(len(mesh.atoms)) if a not in axes])

    def pieces(dims: tuple[Axes, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns a number for each device: equal for equal pieces and places in unmoved atoms."""
        number = fixed
        for axes in dims:  # a permute leaves the number of pieces of every dim alone
            number = number * mesh.extent(axes) + mesh.coordinates(axes)
        return number

    have, wanted = pieces(before.dims), pieces(after.dims)
    source = np.arange(mesh.size)
    moving = np.flatnonzero(have != wanted)
    takers, holders = (moving[np.argsort(p[moving], kind="stable")] for p in (wanted, have))
    source[takers] = holders
    return tuple(zip(source.tolist(), range(mesh.size), strict=True))


# From the answer to a question back to steps, with the cost model's own figures.

WHOLE_TERMS = frozenset({"max", "min", "and", "or"})  # a whole value is each term: max(x, x) is x
SPLITTABLE = WHOLE_TERMS | {"add"}  # a whole value can be made terms: of a sum all but one are 0


def _steps_of(answer: Answer, names: Names, src: Sharding, dst: Sharding) -> tuple[PathStep, ...]:
    found, here = [], src
    for move in answer:
        tiling = list(names.kept)
        for number, digits in zip(names.dims, move.dims, strict=True):
            tiling[number] += names.atoms(digits)
        partial = (*names.atoms(move.partial), *dst.partial)
        there = Sharding(tuple(tiling)).with_partial(partial, src.kind)
        dims = tuple([names.dims[d] for d in move.at])
        found.append(PathStep(move.kind, here, there, _axes_of(move, names), dims))
        here = there
    return tuple(found)


def _axes_of(move: AtomMove, names: Names) -> Axes:
    axes = names.atoms(move.axes)
    # The groups of some have no order.
    return tuple(sorted(axes)) if move.kind in ("collective_permute", "all_reduce") else axes


NO_WAY = Path(tuple, math.inf, 0)  # the path between shardings that no collectives connect


class Resharder:
    """Finds reshards of one program's values, for the planner, the partitioner and reports.

    Inside a `shard_map` they do not use its manual axes, along which values may differ unseen.
    """

    def __init__(self, index: Index, mesh: Mesh, topology: Topology) -> None:
        self.index, self.mesh, self.topology = index, mesh, topology

    def held(self, value: Value) -> Axes:
        """Returns the atoms that no reshard of a value may use."""
        return self.index.held.get(value, ())

    def path(self, value: Value, have: Sharding, wanted: Sharding) -> Path:
        """Returns the cheapest path from `have` to `wanted`; `NO_WAY` if `can_reshard` is False."""
        if not can_reshard(have, wanted):
            return NO_WAY
        type_ = self.index.program.types[value]
        return reshard(have, wanted, type_, self.mesh, self.topology, self.held(value))

    def seconds(self, value: Value, have: Sharding, wanted: Sharding) -> float:
        """Returns the time of the cheapest path: 0 between equals, infinite where there is none."""
        return 0.0 if have == wanted else self.path(value, have, wanted).seconds

    def cheapest(
        self, value: Value, copies: Iterable[Sharding], wanted: Sharding
    ) -> tuple[Sharding, Path]:
        """Returns the sharding in `copies` from which `wanted` is made fastest, and the path."""
        paths = ((have, self.path(value, have, wanted)) for have in copies)
        return min(paths, key=lambda way: way[1].seconds)

    def table(self, value: Value, states: States, needs: States) -> Table:
        """Returns the seconds of the reshard from each state (rows) to each need (columns)."""
        type_, held = self.index.program.types[value], self.held(value)
        found = reshard_seconds(states, needs, type_, self.mesh, self.topology, held)
        for i, j in np.argwhere(np.isnan(found)).tolist():
            found[i, j] = self.seconds(value, states[i], needs[j])
        return found
