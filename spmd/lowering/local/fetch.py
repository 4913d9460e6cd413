"""`fetch`, a halo exchange: sends each device the range of a split dim that it reads.

before: `%1 = f32[4]`, tiles of a dim of 16 over {data}, wanted with 1 more on each side
after:  `%2 = slice %1[3:4]; %3 = collective_permute %2 (each to its right neighbour)`
        `%4 = slice %1[0:1]; %5 = collective_permute %4 (each to its left neighbour)`
        `%6 = concatenate %3, %1, %5`

Where devices send different parts of their tiles, each takes the start of its slice from a table of
constants, by its index along the axes.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.halo import HaloSend, Need, Window, exchange, reads_of
from spmd.ir.program import Value
from spmd.ir.types import TensorType
from spmd.lowering.local.dims import Split, gather_dim, per_device, take_dim
from spmd.lowering.local.table import LocalOp
from spmd.mesh.sharding import Axes, tiles


class Piece(NamedTuple):
    """A local value with part of what a device reads, and for each tile its place in that range."""

    value: Value
    # for each tile (place, low, high): where in the range the value's first element would be (the
    # place may be negative), and that the value fills `[low, high)`
    places: tuple[tuple[int, int, int], ...]
    zeroed: bool = False  # whether the value is zero on devices where it fills nothing

    @property
    def used(self) -> list[tuple[int, int, int]]:
        """The `places` of those tiles whose range takes elements from this value."""
        return [each for each in self.places if each[1] < each[2]]


def fetch(
    b: Builder, x: Value, split: Split, need: Need, axes: Axes, fill: Value | None = None
) -> Value:
    """Returns each device's range `need` of a dim; beyond the dim it is `fill` (0 if None)."""
    type_ = b.types[x].with_dim(split.dim, need.length)
    return assembled(b, parts_of(b, x, split, need), type_, split.dim, axes, fill)


def parts_of(b: Builder, x: Value, split: Split, need: Need) -> list[Piece]:
    """Returns what makes each device's range: pieces of its tile and others', or all, gathered."""
    # Tiles 0 1 | 2 3 | 4 5 | 6 7, each wanted with one more on both sides: ranges of 4 elements
    # from -1, 1, 3 and 5. Places in the range, tile by tile:
    #
    #   part                  offset   filled
    #   own tile                   1   1:3  1:3  1:3  1:3
    #   from the left tile         0   none 0:1  0:1  0:1
    #   from the right tile        3   3:4  3:4  3:4  none
    dim, size, axes, mesh = split
    plan = exchange(need, size, axes, mesh) if axes else None
    if plan is None or plan.gather:
        whole = x if plan is None else split.join(b, gather_dim(b, x, dim, axes, mesh))
        every = range(len(need.starts))
        taken = [HaloSend(i, i, need.lows[i], need.highs[i]) for i in every]
        return [_part(whole, taken, [0 for _ in every], need)]
    owned, count, piece = tiles(size, axes, mesh), mesh.extent(axes), split.pieces[-1]
    own = [
        HaloSend(i, i, max(need.lows[i], start), min(need.highs[i], start + held))
        for i, (start, held) in enumerate(owned)
    ]
    found = [_part(x, own, [start for start, _ in owned], need)]
    for transfers, length in zip(plan.rounds, plan.lengths, strict=True):
        # One permute: every source sends the `length` elements of its tile that hold the transfer.
        # Where a shorter transfer ends at the tile's end the slice starts earlier, so that it stays
        # in the tile; `_part` knows where it starts.
        sends, firsts = dict[int, int](), [0] * count
        for source, target, low, _ in transfers:
            start = owned[source][0]
            sends[source] = min(low - start, piece - length)
            firsts[target] = start + sends[source]
        anything = sends[min(sends)]  # where nobody reads it; so fewer places differ
        starts = [sends.get(source, anything) for source in range(count)]
        sent = take_dim(b, x, dim, axes, starts, length)
        groups = mesh.groups(axes)
        pairs = sorted((group[t.source], group[t.target]) for group in groups for t in transfers)
        got = b.collective("collective_permute", sent, b.types[sent], axes, pairs=tuple(pairs))
        found.append(_part(got, transfers, firsts, need, zeroed=True))
    return found


def _part(
    x: Value, transfers: Iterable[HaloSend], firsts: Sequence[int], need: Need, zeroed: bool = False
) -> Piece:
    """Makes a `Piece` of `x`, whose first element on tile `i` is element `firsts[i]` of the dim."""
    places = [(0, 0, 0)] * len(need.starts)
    for _, i, low, high in transfers:
        if low < high:
            start = need.starts[i]
            places[i] = firsts[i] - start, low - start, high - start
    return Piece(x, tuple(places), zeroed)


def assembled(
    b: Builder,
    parts: Sequence[Piece],
    type_: TensorType,
    dim: int,
    axes: Axes,
    fill: Value | None = None,
) -> Value:
    """Returns a range, of `type_`, made of parts that do not overlap; gaps are `fill` (None: 0)."""
    length = type_.shape[dim]

    def filler(size: int) -> Value:
        wanted = type_.with_dim(dim, size)
        return b.splat(0, wanted) if fill is None else b.broadcast(fill, wanted.shape)

    def selected(x: Value, other: Value, part: Piece, first: int) -> Value:
        """Returns `x` at places that `part` fills, else `other`; `x[0]` is at place `first`."""
        shape = b.types[x].shape
        last = first + shape[dim]
        lows = [min(max(low, first), last) for _, low, _ in part.places]
        ends = zip(lows, part.places, strict=True)
        highs = [max(low, min(high, last)) for low, (_, _, high) in ends]
        flags = None
        line = TensorType((shape[dim],), "i32")
        for direction, bounds, trivial in (("GE", lows, first), ("LT", highs, last)):
            if set(bounds) == {trivial}:
                continue
            limit = per_device(b, axes, [n - first for n in bounds])
            flag = b.compare(direction, b.iota(line, 0), b.broadcast(limit, line.shape))
            flags = flag if flags is None else b.binary("and", flags, flag)
        return x if flags is None else b.select(b.broadcast(flags, shape, (dim,)), x, other)

    parts = [part for part in parts if part.used]
    segments = _segments(parts)
    if segments is None:
        # Each part is shifted to its place on this device, one over the other. Padding dims may
        # need this. 6 elements in pieces of 6, 3, 2 lie as 0 1 | 2 . | 3 4 | 5 . With two more in
        # front they become . . | 0 1 | 2 3 | 4 5: tile 2 has 3 in its own second place, and gets 2
        # for its first one, while tile 1 gets both of its elements: no common places.
        result = filler(length)
        padding = b.splat(0, type_.with_shape(()))
        for part in parts:
            anywhere = part.used[0][0]
            offsets = [at if low < high else anywhere for at, low, high in part.places]
            have = b.types[part.value].shape[dim]
            low, high = max(0, *offsets), max(0, *(length - have - o for o in offsets))
            padded = b.pad_dim(part.value, dim, low, high, padding)
            shifted = take_dim(b, padded, dim, axes, [low - o for o in offsets], length)
            result = selected(shifted, result, part, 0)
        return result
    pieces, at = [], 0
    for low, high, part in segments:
        if at < low:
            pieces.append(filler(low - at))
        offset = part.used[0][0]
        piece = b.slice_dim(part.value, dim, low - offset, high - offset)
        places = part.used if part.zeroed and fill is None else part.places
        if {place[1:] for place in places} != {(low, high)}:  # some device takes less than all
            piece = selected(piece, filler(high - low), part, low)
        pieces.append(piece)
        at = high
    if at < length:
        pieces.append(filler(length - at))
    return b.concatenate(pieces, dim)


def _segments(parts: Sequence[Piece]) -> list[tuple[int, int, Piece]] | None:
    """Returns (low, high, part) by place; None if places differ among devices, or overlap."""
    found = []
    for part in parts:
        offsets, lows, highs = zip(*part.used, strict=True)
        if len(set(offsets)) > 1:
            return None
        found.append((min(lows), max(highs), part))
    found.sort(key=lambda segment: segment[:2])
    return None if any(a[1] > b[0] for a, b in pairwise(found)) else found


def read_around(op: LocalOp, x: Value) -> Value:
    """Returns what this device's tile of the result reads of `x`, operand 0, along all its dims."""
    for d, (axes, window) in op.reads(0).items():
        need = reads_of(window, op.dim(0, d).size, axes, op.mesh).need
        x = fetched(op, 0, x, d, axes, need, None)
    return x


def fetched(
    op: LocalOp, number: int, x: Value, dim: int, axes: Axes, need: Need, fill: Value | None
) -> Value:
    """Calls `fetch` for a dim of `x`, operand `number`; its ops get `note_of` as a note."""
    with op.b.noted(note_of(op, number, dim)):
        return fetch(op.b, x, op.dim(number, dim), need, axes, fill)


def note_of(op: LocalOp, number: int, dim: int) -> str:
    """Returns a sentence for users that says why an op communicates."""
    return f"{op.op.label} reads its neighbours' pieces of dim {dim} of operand {number}"


def base_of(
    op: LocalOp, number: int, x: Value, dim: int, axes: Axes, window: Window, fill: Value | None
) -> tuple[Value, int, int, int]:
    """Returns (`x` with a fetched dim, padding low, high, dilation): the op adds the last three.

    Where devices start at different phases (see `reads_of`), all is done here: 0, 0, 1 are left.
    """
    b = op.b
    reads = reads_of(window, op.dim(number, dim).size, axes, op.mesh)
    x = fetched(op, number, x, dim, axes, reads.need, fill)
    dilation = window.dilation
    if reads.low is not None:
        filled = reads.low + (reads.need.length - 1) * dilation + 1
        return x, reads.low, reads.base - filled, dilation
    scalar = fill if fill is not None else b.splat(0, b.types[x].with_shape(()))
    x = b.pad_dim(x, dim, 0, 0, scalar, dilation - 1)
    return take_dim(b, x, dim, axes, reads.skips, reads.base), 0, 0, 1
