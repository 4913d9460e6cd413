"""What devices exchange along a split dim: halos (elements of their neighbours' tiles) and merges.

A tile is one device's piece of a dim. Everything here is computed from sizes, for the planner and
the lowering alike, so that the plan counts the transfers that are made.

A 3-wide window at stride 1 over 8 elements in 4 tiles, padded by one on both sides:

    tile      0      1      2      3
    own       0 1    2 3    4 5    6 7
    reads   . 0 1 2  1 2 3 4  3 4 5 6  5 6 7 .
    rounds  each device to its right neighbour: 1 element; each to its left: 1 element

In a merge each device works on its own piece of a dim, then all put together what they found: an
argmax over a dim split in four finds four maxima, and the largest of these is the answer. A sort
exchanges whole pieces instead, two devices at a time, in the rounds of a sorting network.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, piece_sizes, tiles


class Window(NamedTuple):
    """Which elements of an operand's dim are read for each position of another dim, the tiled one.

    Position `o` of the tiled dim reads the base positions `o * stride - low + [0, span)`, where
    element `e` of the operand is at base position `e * dilation`; base positions without an element
    are padding. Example: with low 1 and span 3, position 4 reads elements 3, 4 and 5.
    """

    tiled: int  # size of the tiled dim, of which each device has a tile: a result's, or a kernel's
    # stride, low, dilation, span: as above
    stride: int = 1
    low: int = 0
    dilation: int = 1
    span: int = 1
    reverse: bool = False  # the tiled dim is counted from its end


class Halo(NamedTuple):
    """An operand's dim that devices read outside their tiles, by `window`; None: tiles' totals."""

    operand: int
    dim: int
    # the factor whose tiles read it: that of the operand's dim, or, where this dim stays whole,
    # that of the result's
    factor: int
    # what is read; None for running totals, where each device reads one element (the total) of
    # every tile
    window: Window | None


class Need(NamedTuple):
    """For each tile, the range `[start, start + length)` of elements that its device gets.

    Only `[low, high)` of the range exists and is read; the rest becomes padding. All devices run
    one program, so `length` is one number, while `starts`, `lows` and `highs` have one per tile.
    """

    length: int
    starts: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]

    @staticmethod
    def of(size: int, length: int, ranges: Iterable[tuple[int, int, int]]) -> "Need":
        """Returns tiles' (start, low, high) as a Need, cutting [low, high) to its range and dim."""
        starts, lows, highs = [], [], []
        for start, low, high in ranges:
            low, high = max(low, start, 0), min(high, start + length, size)
            if low >= high:
                low = high = max(start, 0)
            starts.append(start)
            lows.append(low)
            highs.append(high)
        return Need(length, tuple(starts), tuple(lows), tuple(highs))


class Reads(NamedTuple):
    """What each tile of a dim reads of an operand's dim: elements, base positions (`Window`)."""

    need: Need
    base: int  # number of base positions that each device needs
    # how many base positions lie before the first element, if the same on all devices
    low: int | None
    # for each tile, how many base positions after its first element it drops; used where `low` is
    # None
    skips: tuple[int, ...]


@lru_cache(maxsize=4096)
def reads_of(window: Window, size: int, axes: Axes, mesh: Mesh) -> Reads:
    """Returns what each tile (of a dim split over `axes`) reads of an operand's dim of `size`."""
    # With dilation, tiles may start at different phases between two elements. 10 base positions, an
    # element at every third, in tiles that start at 0, 3, 5 and 8 (piece 3):
    #
    #   position  0 1 2 | 3 4 | 5 6 7 | 8 9
    #   element   0 . . | 1 . | . 2 . | . 3        phases 0, 0, 1, 1: no common `low`
    #
    # So each device starts with the element at or before its first position (0, 1, 1, 2), dilates
    # what it fetched itself and drops what lies before that position: 0, 0, 5 - 3 and 8 - 6. With a
    # common phase the op's own padding and dilation do all that, and fetch no element in vain.
    total, dilation = window.tiled, window.dilation
    piece = piece_sizes(total, axes, mesh)[-1]
    base = (piece - 1) * window.stride + window.span
    owned = tiles(total, axes, mesh)
    firsts = [
        (total - s - piece if window.reverse else s) * window.stride - window.low for s, _ in owned
    ]
    phases = {-first % dilation for first, (_, own) in zip(firsts, owned, strict=True) if own}
    phase = phases.pop() if len(phases) == 1 else None
    starts = [(first + (phase or 0)) // dilation for first in firsts]
    if phase is None:
        length = -(-(base + dilation - 2) // dilation) + 1
    else:
        length = max(1, (base - 1 - phase) // dilation + 1)
    ranges = []
    for (s, own), start in zip(owned, starts, strict=True):
        begin = total - s - own if window.reverse else s
        low = -(-(begin * window.stride - window.low) // dilation)
        last = (begin + own - 1) * window.stride - window.low + window.span - 1
        ranges.append((start, low, last // dilation + 1 if own else low))
    skips = tuple(
        first - start * dilation if phase is None and own else 0
        for first, start, (_, own) in zip(firsts, starts, owned, strict=True)
    )
    return Reads(Need.of(size, length, ranges), base, phase, skips)


class HaloSend(NamedTuple):
    """One transfer: tile `source`'s device sends a dim's elements `[low, high)` to `target`'s."""

    source: int
    target: int
    low: int
    high: int


class HaloExchange(NamedTuple):
    """The transfers that bring every device the elements it needs from other devices' tiles."""

    rounds: tuple[tuple[HaloSend, ...], ...]  # in each, a device sends and receives at most once
    lengths: tuple[int, ...]  # for each round, the elements of its largest transfer
    gather: bool  # whether to gather the whole dim, as the rounds would move as much


@lru_cache(maxsize=4096)
def exchange(need: Need, size: int, axes: Axes, mesh: Mesh) -> HaloExchange:
    """Returns the transfers that meet a need, for a dim of `size` elements split over `axes`."""
    owned = tiles(size, axes, mesh)
    found: list[HaloSend] = []
    for target, (low, high) in enumerate(zip(need.lows, need.highs, strict=True)):
        for source, (start, own) in enumerate(owned):
            begin, end = max(low, start), min(high, start + own)
            if begin < end and source != target:
                found.append(HaloSend(source, target, begin, end))
    rounds = _rounds(sorted(found, key=lambda t: (t.source - t.target, t.target)))
    lengths = tuple(max(t.high - t.low for t in transfers) for transfers in rounds)
    piece = piece_sizes(size, axes, mesh)[-1]
    gather = sum(lengths) > 0 and sum(lengths) >= (len(owned) - 1) * piece
    return HaloExchange(rounds, lengths, gather)


def _rounds(transfers: Iterable[HaloSend]) -> tuple[tuple[HaloSend, ...], ...]:
    """Returns rounds: each transfer is in the first without another of its source or its target."""
    # They come sorted by distance, so that one round is one shift where every tile needs the same.
    # Where distances mix, later transfers fill gaps. 4 tiles that each need all before them:
    #   0->3 opens round 0;   0->2 and 1->3 round 1;   0->1 round 2;   1->2 fits into round 0;
    #   2->3 meets a busy 3 in rounds 0 and 1 and joins round 2
    rounds: list[list[HaloSend]] = []
    busy: list[set[tuple[str, int]]] = []
    for transfer in transfers:
        taken = {("source", transfer.source), ("target", transfer.target)}
        number = next((n for n, all_ in enumerate(busy) if taken.isdisjoint(all_)), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(transfer)
        busy[number] |= taken
    return tuple(map(tuple, rounds))


class Merge(NamedTuple):
    """What each device contributes where a factor is split: what it computes of its tile.

    For top-k these are the largest elements of the tile, for a large sort the sorted tile, for
    linear attention the state behind it.
    """

    factor: int
    # what each device contributes: the type of each tensor if no other factor is split, and the
    # factors of its dims
    tensors: tuple[tuple[TensorType, tuple[tuple[int, ...], ...]], ...]
    # whether tiles meet pair by pair in `rounds`; otherwise all tensors are gathered
    network: bool = False


@lru_cache(maxsize=256)
def rounds(count: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns a network that sorts `count` tiles, each sorted: for each round the pairs to merge.

    Batcher's odd-even merge sort (Knuth, The Art of Computer Programming, 5.2.2 and 5.3.4). A pair
    merges its tiles and the first keeps the lower half; `rounds(4)` is `((0, 1), (2, 3))`,
    `((0, 2), (1, 3))`, `((1, 2),)`.
    """
    # Four tiles that hold 4 3 2 1 take three rounds; pairs of one round meet at the same time:
    #   (0, 1) (2, 3)   4 3 2 1 -> 3 4 1 2    runs of two are sorted
    #   (0, 2) (1, 3)   3 4 1 2 -> 1 2 3 4
    #   (1, 2)          nothing to change here, but 1 3 2 4 would need it
    # Which tiles meet never depends on what they hold: that is why static permutes can do it.
    found, run = [], 1
    while run < count:  # two sorted runs become one
        apart = run
        while apart:
            skipped = apart % run
            firsts = [i for i in range(skipped, count - apart) if not (i - skipped) // apart % 2]
            inside = [i for i in firsts if i // (2 * run) == (i + apart) // (2 * run)]
            found.append(tuple((i, i + apart) for i in inside))
            apart //= 2
        run *= 2
    return tuple(found)
