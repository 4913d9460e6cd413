"""Local lowerings of ops that read their neighbours' pieces.

Each fetches what its piece of the result reads, then is the op itself without padding along the
split dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.frontend.canonical import inline_elementwise
from spmd.ir.builder import identity_element
from spmd.ir.program import Value
from spmd.ir.types import Attribute, ConvDims, TensorType
from spmd.lowering.expand import clamped_index
from spmd.lowering.local import LocalOp, collective, local
from spmd.lowering.padding import own_count, start_of
from spmd.lowering.window import (
    assemble,
    dynamic_take_dim,
    pad_dim,
    parts_of,
    resized,
    slice_dim,
    take_dim,
)
from spmd.mesh.sharding import Axes, piece_sizes, tile
from spmd.propagation.rule import REDUCE, WINDOW
from spmd.propagation.rules_window import (
    Sliding,
    contracts,
    covers,
    kernel_window,
    result_window,
    running_dim,
)
from spmd.propagation.window import Need, Reads, Window, reads_of


class _Dims:
    """Which dims of an op's first operand and result are split, and how."""

    def __init__(self, op: LocalOp) -> None:
        self.op = op
        self.operand = op.rule.operands[0]
        self.result = op.rule.results[0]

    def split(self, dim: int, kind: str, of_result: bool = True) -> Axes:
        """Atoms of a dim that has one factor, of a kind."""
        factors = (self.result if of_result else self.operand)[dim]
        if len(factors) != 1 or self.op.rule.factors[factors[0]].kind != kind:
            return ()
        return self.op.choice.assignment[factors[0]]


def _read(
    op: LocalOp, number: int, x: Value, dim: int, window: Window, axes: Axes, fill: Value | None
) -> tuple[Value, Reads]:
    """What the tiles over `axes` read of an operand's dim, which is split like them or whole."""
    size = op.op.kind.operands[number].shape[dim]
    reads = reads_of(window, size, axes, op.mesh)
    return _fetched(op, number, x, dim, axes, reads.need, fill), reads


def _fetched(
    op: LocalOp, number: int, x: Value, dim: int, axes: Axes, need: Need, fill: Value | None
) -> Value:
    b = op.b
    size, source = op.op.kind.operands[number].shape[dim], op.choice.operands[number].dims[dim]
    outer = b.loc
    b.loc = outer._replace(
        note=f"{op.op.label} reads its neighbours' pieces of dim {dim} of operand {number}"
    )
    parts = parts_of(b, x, dim, size, source, op.mesh, need)
    type_ = b.types[x].with_shape(resized(b.types[x].shape, dim, need.length))
    made = assemble(b, parts, dim, axes, type_, fill)
    b.loc = outer
    return made


class _Base(NamedTuple):
    """A fetched dim: the padding and dilation that the op itself still has to add to it."""

    value: Value
    low: int
    high: int
    dilation: int


def _base(
    op: LocalOp, number: int, x: Value, dim: int, window: Window, axes: Axes, fill: Value | None
) -> _Base:
    """The base positions that tiles read; dilated here where devices start at different phases."""
    b = op.b
    x, reads = _read(op, number, x, dim, window, axes, fill)
    dilation = window.dilation
    if reads.low is not None:
        filled = reads.low + (reads.need.length - 1) * dilation + 1
        return _Base(x, reads.low, reads.base - filled, dilation)
    scalar = fill if fill is not None else b.splat(0, b.types[x].with_shape(()))
    x = pad_dim(b, x, dim, 0, 0, scalar, dilation - 1)
    return _Base(take_dim(b, x, dim, axes, reads.skips, reads.base), 0, 0, 1)


# ---------------------------------------------------------------------------------------------
# Ops that only move elements.


@local("stablehlo.slice")
def _slice(op: LocalOp) -> tuple[Value, ...]:
    """Elements that a piece takes lie next to each other, `stride` apart."""
    b, (x,), dims = op.b, op.operands, _Dims(op)
    result = op.result_types()[0].shape
    starts, limits = list(op.attrs["start_indices"]), list(op.attrs["limit_indices"])
    strides = list(op.attrs["strides"])
    for d, size in enumerate(op.op.kind.operands[0].shape):
        axes = op.choice.operands[0].dims[d]
        if not axes:
            continue
        if dims.split(d, REDUCE, of_result=False):
            start = b.constant(starts[d], "i32")
            x = _pick(op, x, d, size, axes, start, 1)
        elif dims.split(d, WINDOW):
            window = Window(op.op.kind.results[0].shape[d], strides[d], -starts[d])
            x, _ = _read(op, 0, x, d, window, axes, None)
        if not dims.split(d, WINDOW):
            strides[d] = 1
        starts[d], limits[d] = 0, (result[d] - 1) * strides[d] + 1
    attrs = {
        "start_indices": tuple(starts),
        "limit_indices": tuple(limits),
        "strides": tuple(strides),
    }
    return op.emit([x], **attrs)


@local("stablehlo.reverse")
def _reverse(op: LocalOp) -> tuple[Value, ...]:
    """The tile at the other end, reversed."""
    (x,), dims = op.operands, _Dims(op)
    for d in op.attrs["dimensions"]:
        axes = dims.split(d, WINDOW)
        if axes:
            window = Window(op.op.kind.results[0].shape[d], reverse=True)
            x, _ = _read(op, 0, x, d, window, axes, None)
    return op.emit([x])


@local("stablehlo.pad")
def _pad(op: LocalOp) -> tuple[Value, ...]:
    """What lies beyond the operand's ends is fetched as padding."""
    (x, fill), dims = op.operands, _Dims(op)
    amounts = {
        name: list(op.attrs[name])
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    }
    low, high, interior = amounts.values()
    for d, size in enumerate(op.op.kind.results[0].shape):
        axes = dims.split(d, WINDOW)
        if axes:
            window = Window(size, 1, low[d], interior[d] + 1)
            x, low[d], high[d], dilation = _base(op, 0, x, d, window, axes, fill)
            interior[d] = dilation - 1
    return op.emit([x, fill], **{name: tuple(amount) for name, amount in amounts.items()})


@local("stablehlo.concatenate")
def _concatenate(op: LocalOp) -> tuple[Value, ...]:
    """Each device joins the elements of all operands that fall into its piece."""
    b, along = op.b, op.attrs["dimension"]
    axes = op.choice.results[0].dims[along]
    if not axes or len(op.operands) == 1:
        return op.emit()
    total = op.op.kind.results[0].shape[along]
    parts, start = [], 0
    outer = b.loc
    for i, x in enumerate(op.operands):
        size = op.op.kind.operands[i].shape[along]
        if size:
            b.loc = outer._replace(
                note=f"{op.op.label} reads its neighbours' pieces of dim {along} of operand {i}"
            )
            need = reads_of(Window(total, 1, start), size, axes, op.mesh).need
            source = op.choice.operands[i].dims[along]
            parts += parts_of(b, x, along, size, source, op.mesh, need)
        start += size
    b.loc = outer
    return (assemble(b, parts, along, axes, op.result_types()[0]),)


# ---------------------------------------------------------------------------------------------
# Slices from starts that are computed.


def _pick(
    op: LocalOp, x: Value, dim: int, size: int, axes: Axes, start: Value, length: int
) -> Value:
    """The elements `[start, start + length)` of a split dim that this device holds, else zeros.

    Args:
      op: where to.
      x: the local tile.
      dim: the dim.
      size: its global size.
      axes: what it is split over.
      start: an i32 scalar such that the range exists.
      length: how many elements.
    """
    b = op.b
    have = b.types[x].shape[dim]
    width = min(have, length)
    here = b.binary("subtract", start, start_of(b, size, axes, op.mesh))
    at = clamped_index(b, here, have - width)
    x = dynamic_take_dim(b, x, dim, at, width)
    x = _shifted(op, x, dim, b.binary("subtract", here, at), length)
    own = own_count(b, size, axes, op.mesh)
    inside = _within(op, length, here, own)
    return b.select(b.broadcast(inside, b.types[x].shape, (dim,)), x, b.splat(0, b.types[x]))


def _shifted(op: LocalOp, x: Value, dim: int, by: Value, length: int) -> Value:
    """`length` elements of a dim from position `by` on, which may be out of range; zeros there."""
    b = op.b
    have = b.types[x].shape[dim]
    if have == 1 and length == 1:
        return x
    x = pad_dim(b, x, dim, length, length, b.splat(0, b.types[x].with_shape(())))
    start = b.binary("add", by, b.constant(length, "i32"))
    return dynamic_take_dim(b, x, dim, clamped_index(b, start, have + length), length)


def _within(op: LocalOp, length: int, first: Value, count: Value) -> Value:
    """Which of the positions `first + [0, length)` are in `[0, count)`."""
    b = op.b
    line = TensorType((length,), "i32")
    position = b.binary("add", b.iota(line, 0), b.broadcast(first, line.shape))
    return b.binary(
        "and",
        b.compare("GE", position, b.splat(0, line)),
        b.compare("LT", position, b.broadcast(count, line.shape)),
    )


def _global_starts(op: LocalOp, starts: Sequence[Value], sizes: Sequence[int]) -> list[Value]:
    """Starts as the specification means them: clamped to where a slice of the sizes fits."""
    b = op.b
    return [
        b.convert(clamped_index(b, start, whole - size), "i32")
        for start, whole, size in zip(starts, op.op.kind.operands[0].shape, sizes, strict=True)
    ]


@local("stablehlo.dynamic_slice")
def _dynamic_slice(op: LocalOp) -> tuple[Value, ...]:
    """Dims taken whole are taken whole locally, from 0: any other start is clamped to that.

    Written as 0, because XLA adds it to the start of another slice before it clamps.
    """
    b, (x, *starts) = op.b, op.operands
    wanted, shape = op.attrs["slice_sizes"], op.op.kind.operands[0].shape
    split = [
        d for d, axes in enumerate(op.choice.operands[0].dims) if axes and wanted[d] < shape[d]
    ]
    if split:
        starts = _global_starts(op, starts, wanted)
        for d in split:
            x = _pick(op, x, d, shape[d], op.choice.operands[0].dims[d], starts[d], wanted[d])
    sizes = op.result_types()[0].shape
    starts = [
        b.constant(0, b.types[start].dtype) if size == whole else start
        for start, size, whole in zip(starts, sizes, b.types[x].shape, strict=True)
    ]
    return op.emit([x, *starts], slice_sizes=sizes)


@local("stablehlo.dynamic_update_slice")
def _dynamic_update_slice(op: LocalOp) -> tuple[Value, ...]:
    """Each device overwrites a window of its piece, with what is there outside of the update.

    So no more is read and written than the update is large, and it can be done in place.
    """
    b, (x, update, *starts) = op.b, op.operands
    shape, sizes = (t.shape for t in op.op.kind.operands[:2])
    dims = op.choice.operands[0].dims
    split = [d for d, axes in enumerate(dims) if axes and sizes[d] < shape[d]]
    if not split:
        return op.emit()
    starts = _global_starts(op, starts, sizes)
    flags = []
    for d in split:
        width = min(sizes[d], b.types[x].shape[d])
        here = b.binary("subtract", starts[d], start_of(b, shape[d], dims[d], op.mesh))
        starts[d] = clamped_index(b, here, b.types[x].shape[d] - width)
        shift = b.binary("subtract", starts[d], here)
        update = _shifted(op, update, d, shift, width)
        flags.append((d, _within(op, width, shift, b.constant(sizes[d], "i32"))))
    type_ = b.types[update]
    there = b.dynamic_slice(x, starts, type_.shape)
    masks = [b.broadcast(flag, type_.shape, (d,)) for d, flag in flags]
    inside = masks[0]
    for mask in masks[1:]:
        inside = b.binary("and", inside, mask)
    return op.emit([x, b.select(inside, update, there), *starts])


# ---------------------------------------------------------------------------------------------
# Sliding windows.


@local("stablehlo.reduce_window")
def _reduce_window(op: LocalOp) -> tuple[Value, ...]:
    """Windows over fetched elements; what does not exist is the initial value."""
    kind, dims = op.op.kind, _Dims(op)
    running = running_dim(kind)
    if running is not None and dims.split(running[0], WINDOW):
        return _running(op, *running)
    count = len(op.operands) // 2
    inits = op.operands[count:]
    sliding = Sliding(kind, kind.operands[0].rank)
    xs = list(op.operands[:count])
    padding, base = list(sliding.padding), list(sliding.base)
    sizes, strides = list(op.attrs["window_dimensions"]), list(sliding.strides)
    for d in range(sliding.rank):
        if covers(kind, sliding, d) and (axes := dims.split(d, REDUCE, of_result=False)):
            element = identity_element(op.attrs["reducer"], kind.operands[0].dtype)
            fill = op.b.constant(element, kind.operands[0].dtype)
            need = _own(op, d, axes)
            xs = [_fetched(op, i, x, d, axes, need, fill) for i, x in enumerate(xs)]
            sizes[d], strides[d], padding[d] = need.length, 1, (0, 0)
        elif (axes := dims.split(d, WINDOW)) and running is None:
            span = (sizes[d] - 1) * sliding.window[d] + 1
            out = kind.results[0].shape[d]
            window = Window(out, strides[d], padding[d][0], base[d], span)
            made = [
                _base(op, i, x, d, window, axes, init)
                for i, (x, init) in enumerate(zip(xs, inits, strict=True))
            ]
            xs = [m.value for m in made]
            padding[d], base[d] = (made[0].low, made[0].high), made[0].dilation
    attrs: dict[str, Attribute] = {
        "padding": tuple(padding),
        "base_dilations": tuple(base),
        "window_dimensions": tuple(sizes),
        "window_strides": tuple(strides),
    }
    return op.emit([*xs, *inits], **attrs)


def _own(op: LocalOp, dim: int, axes: Axes) -> Need:
    """Just the tile, without its padding."""
    size = op.op.kind.operands[0].shape[dim]
    piece = piece_sizes(size, axes, op.mesh)[-1]
    tiles = [tile(size, axes, op.mesh, i) for i in range(op.mesh.extent(axes))]
    return Need.of(size, piece, [(start, start, start + own) for start, own in tiles])


def _running(op: LocalOp, dim: int, backwards: bool) -> tuple[Value, ...]:
    """Running totals of the pieces, and the total of all pieces before added to each.

    before: `reduce_window %1` over the whole of a split dim
    after:  `%2 = reduce_window %1; %3 = all_gather (last of %2); %4 = reduce_window %3`
            `%5 = body(%4[index], %2)`
    """
    b, count = op.b, len(op.operands) // 2
    inits = op.operands[count:]
    axes = op.choice.operands[0].dims[dim]
    devices = op.mesh.extent(axes)
    need = _own(op, dim, axes)
    xs = [_fetched(op, i, op.operands[i], dim, axes, need, inits[i]) for i in range(count)]
    piece = need.length
    totals = _windows_of(op, xs, inits, dim, piece, piece - 1, backwards)
    last = 0 if backwards else piece - 1
    edges = [slice_dim(b, t, dim, last, last + 1) for t in totals]
    outer = b.loc
    b.loc = outer._replace(
        note=f"{op.op.label} along dim {dim} needs the totals of the pieces before"
    )
    gathered = []
    for edge in edges:
        type_ = b.types[edge]
        type_ = type_.with_shape(resized(type_.shape, dim, devices))
        gathered.append(collective(b, "all_gather", edge, type_, axes, all_gather_dim=dim))
    b.loc = outer
    sums = _windows_of(op, gathered, inits, dim, devices, devices, backwards)
    places = [i + backwards for i in range(devices)]
    before = [
        b.broadcast(take_dim(b, s, dim, axes, places, 1), b.types[t].shape, range(b.types[t].rank))
        for s, t in zip(sums, totals, strict=True)
    ]
    args = (*totals, *before) if backwards else (*before, *totals)
    return inline_elementwise(b, op.attrs["body"], args, b.types[totals[0]].shape)


def _windows_of(
    op: LocalOp,
    xs: Sequence[Value],
    inits: Sequence[Value],
    dim: int,
    size: int,
    pad: int,
    backwards: bool,
) -> tuple[Value, ...]:
    """The op with windows of `size` along a dim and `pad` elements before (or behind) it."""
    b, rank = op.b, op.op.kind.results[0].rank
    padding = (0, pad) if backwards else (pad, 0)
    length = b.types[xs[0]].shape[dim] + pad - size + 1
    attrs = {
        **op.attrs,
        "window_dimensions": resized((1,) * rank, dim, size),
        "padding": tuple(padding if d == dim else (0, 0) for d in range(rank)),
    }
    types = [b.types[x].with_shape(resized(b.types[x].shape, dim, length)) for x in xs]
    return b.op(op.op.name, (*xs, *inits), types, attrs)


@local("stablehlo.select_and_scatter")
def _select_and_scatter(op: LocalOp) -> tuple[Value, ...]:
    """All windows that touch the piece, whole; then the piece is cut out of what they scatter to.

    Windows that do not exist scatter the identity of the reduction.
    """
    b, (x, source, init), dims = op.b, op.operands, _Dims(op)
    kind = op.op.kind
    shape = list(op.result_types()[0].shape)
    cuts = []
    for d in range(kind.results[0].rank):
        axes = dims.split(d, WINDOW)
        if axes:
            element = identity_element(op.attrs["reducer"], kind.operands[1].dtype)
            fill = b.constant(element, kind.operands[1].dtype)
            around, windows, skips = _scatter_needs(op, d, axes)
            x = _fetched(op, 0, x, d, axes, around, None)
            source = _fetched(op, 1, source, d, axes, windows, fill)
            cuts.append((d, axes, skips, shape[d]))
            shape[d] = around.length
    type_ = kind.results[0].with_shape(tuple(shape))
    (made,) = b.op(op.op.name, (x, source, init), (type_,), op.attrs)
    for d, axes, skips, length in cuts:
        made = take_dim(b, made, d, axes, skips, length)
    return (made,)


def _scatter_needs(op: LocalOp, dim: int, axes: Axes) -> tuple[Need, Need, list[int]]:
    """Operand and source elements around each tile, and where the tile starts in the former."""
    kind, mesh = op.op.kind, op.mesh
    size, count = kind.operands[0].shape[dim], kind.operands[1].shape[dim]
    span = op.attrs["window_dimensions"][dim]
    stride = Sliding(kind, kind.operands[0].rank).strides[dim]
    piece = piece_sizes(size, axes, mesh)[-1]
    tiles = [tile(size, axes, mesh, i) for i in range(mesh.extent(axes))]
    firsts = [(start - span + 1) // stride for start, _ in tiles]
    skips = [start - first * stride for (start, _), first in zip(tiles, firsts, strict=True)]
    skips = [skip if own else skips[0] for skip, (_, own) in zip(skips, tiles, strict=True)]
    lasts = [(start + own - 1) // stride for start, own in tiles]
    touching = max(last - first + 1 for first, last in zip(firsts, lasts, strict=True))
    length = max((touching - 1) * stride + span, max(skips) + piece)
    touching = (length - span) // stride + 1
    windows, around = [], []
    for first, last, (start, own) in zip(firsts, lasts, tiles, strict=True):
        low, high = (max(first, 0), min(last + 1, count)) if own else (0, 0)
        windows.append((first, low, high))
        reach = ((high - 1) * stride + span) if low < high else start
        around.append((first * stride, max(low * stride, 0), reach if own else 0))
    return Need.of(size, length, around), Need.of(count, touching, windows), skips


# ---------------------------------------------------------------------------------------------
# Convolution.


@local("stablehlo.convolution")
def _convolution(op: LocalOp) -> tuple[Value, ...]:
    """A convolution of what the piece of the result, or of the kernel, reads of the input."""
    kind, numbers = op.op.kind, op.attrs["dimension_numbers"]
    assert isinstance(numbers, ConvDims)
    lhs, rhs = (op.masked(i, 0, op.reduced_dims(i)) for i in range(2))
    sliding = Sliding(kind, len(numbers.input_spatial))
    padding, dilation = list(sliding.padding), list(sliding.base)
    for i, d in enumerate(numbers.input_spatial):
        axes = op.choice.operands[0].dims[d]
        if contracts(kind, i):
            window = kernel_window(kind, i, sliding)
        else:
            window = result_window(kind, i, sliding)
            axes = op.choice.results[0].dims[numbers.output_spatial[i]]
        if axes:
            lhs, low, high, dilation[i] = _base(op, 0, lhs, d, window, axes, None)
            padding[i] = low, high
    attrs: dict[str, Attribute] = dict(_groups(op, numbers))
    if padding:
        attrs |= {"padding": tuple(padding), "lhs_dilation": tuple(dilation)}
    return op.emit([lhs, rhs], **attrs)


def _groups(op: LocalOp, numbers: ConvDims) -> dict[str, int]:
    """The groups that are left on one device."""
    found = {}
    for name, dims, d in (
        ("feature_group_count", op.rule.operands[0], numbers.input_feature),
        ("batch_group_count", op.rule.operands[0], numbers.input_batch),
    ):
        count = op.attrs.get(name, 1)
        if count > 1:
            axes = op.choice.assignment[dims[d][0]]
            found[name] = piece_sizes(count, axes, op.mesh)[-1]
    return found
