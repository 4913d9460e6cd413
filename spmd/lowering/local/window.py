"""Local lowerings of sliding windows: reductions, running totals, selections, convolutions.

Each fetches what the device's piece of the result reads (`fetch`), then appends the op itself at
local shapes.
"""

from collections.abc import Sequence
from functools import partial

from spmd.ir.dialect.bodies import inline_elementwise
from spmd.ir.dialect.builder import resized
from spmd.ir.dialect.halo import Need
from spmd.ir.dialect.reducers import identity_element
from spmd.ir.dialect.window import Sliding
from spmd.ir.program import Value
from spmd.ir.types import Attribute, ConvDims
from spmd.lowering.local.dims import gather_dim, take_dim
from spmd.lowering.local.fetch import base_of, fetched
from spmd.lowering.local.table import LocalOp, local
from spmd.mesh.sharding import Axes, piece_sizes, tiles


@local("stablehlo.reduce_window")
def _reduce_window(op: LocalOp) -> tuple[Value, ...]:
    """Reduces windows of fetched elements (initial values beyond ends), or calls `_running`."""
    kind, b = op.op.kind, op.b
    count = len(op.operands) // 2
    xs, inits = list(op.operands[:count]), op.operands[count:]
    sliding = Sliding(kind, kind.operands[0].rank)
    for halo in op.rule.halos:
        if halo.window is None and op.choice.assignment[halo.factor]:
            backwards = sliding.padding[halo.dim][0] == 0
            return _running(op, halo.dim, backwards)
    padding, base = list(sliding.padding), list(sliding.base)
    sizes, strides = list(op.attrs["window_dimensions"]), list(sliding.strides)
    covered = [d for d in op.reduced_dims(0) if op.dim(0, d).axes]
    if covered:  # one window covers the whole dim: here it covers the piece
        xs = [op.masked(0)]
        for d in covered:
            sizes[d], strides[d], padding[d] = b.types[xs[0]].shape[d], 1, (0, 0)
    for d, read in op.reads(0).items():
        made = [
            base_of(op, i, x, d, *read, init)
            for i, (x, init) in enumerate(zip(xs, inits, strict=True))
        ]
        xs = [value for value, *_ in made]
        _, low, high, base[d] = made[0]
        padding[d] = low, high
    return op.emit(
        [*xs, *inits],
        padding=tuple(padding),
        base_dilations=tuple(base),
        window_dimensions=tuple(sizes),
        window_strides=tuple(strides),
    )


def _running(op: LocalOp, dim: int, backwards: bool) -> tuple[Value, ...]:
    """Makes each piece's running totals, combined with the total before it (`backwards`: behind).

    before: `reduce_window %1` over the whole of a split dim
    after:  `%2 = reduce_window %1; %3 = all_gather (last of %2); %4 = reduce_window %3`
            `%5 = body(%4[index], %2)`
    """
    # cumsum of 1 2 | 3 4 | 5 6:
    #   totals   1 3 | 3 7 | 5 11      each piece by itself
    #   edges    3 7 11, gathered
    #   sums     0 3 10 21             windows as wide as there are devices: one more than these
    #   before   0 | 3 | 10            each device takes its own entry, backwards the next one
    #   result   1 3 | 6 10 | 15 21
    b, count = op.b, len(op.operands) // 2
    axes = op.dim(0, dim).axes
    devices, piece = op.mesh.extent(axes), op.dim(0, dim).pieces[-1]
    shape = b.types[op.operands[0]].shape
    xs = [
        op.masked(i, partial(b.broadcast, op.operands[count + i], shape), [dim])
        for i in range(count)
    ]
    totals = _windows_of(op, xs, dim, piece, piece - 1, backwards)
    last = 0 if backwards else piece - 1
    edges = [b.slice_dim(t, dim, last, last + 1) for t in totals]
    with b.noted(f"{op.op.label} along dim {dim} needs the totals of the pieces before"):
        gathered = [gather_dim(b, edge, dim, axes, op.mesh) for edge in edges]
    sums = _windows_of(op, gathered, dim, devices, devices, backwards)
    places = [i + backwards for i in range(devices)]
    before = [
        b.broadcast(take_dim(b, s, dim, axes, places, 1), b.types[t].shape, range(b.types[t].rank))
        for s, t in zip(sums, totals, strict=True)
    ]
    args = (*totals, *before) if backwards else (*before, *totals)
    return inline_elementwise(b, op.attrs["body"], args, b.types[totals[0]].shape)


def _windows_of(
    op: LocalOp, xs: Sequence[Value], dim: int, size: int, pad: int, backwards: bool
) -> tuple[Value, ...]:
    inits = op.operands[len(xs) :]
    b, rank = op.b, op.op.kind.results[0].rank
    padding = (0, pad) if backwards else (pad, 0)
    length = b.types[xs[0]].shape[dim] + pad - size + 1
    attrs = {
        **op.attrs,
        "window_dimensions": resized((1,) * rank, dim, size),
        "padding": tuple(padding if d == dim else (0, 0) for d in range(rank)),
    }
    return b.op(op.op.name, (*xs, *inits), [b.types[x].with_dim(dim, length) for x in xs], attrs)


@local("stablehlo.select_and_scatter")
def _select_and_scatter(op: LocalOp) -> tuple[Value, ...]:
    """Scatters what all windows that touch this device's piece select, and cuts out the piece."""
    b, (x, source, init) = op.b, op.operands
    dtype = b.types[source].dtype
    shape = list(op.result_types()[0].shape)
    cuts = []
    for d, (axes, _) in op.reads(0).items():
        fill = b.constant(identity_element(op.attrs["reducer"], dtype), dtype)
        around, windows, skips = _scatter_needs(op, d, axes)
        x = fetched(op, 0, x, d, axes, around, None)
        source = fetched(op, 1, source, d, axes, windows, fill)
        cuts.append((d, axes, skips, shape[d]))
        shape[d] = around.length
    type_ = op.op.kind.results[0].with_shape(tuple(shape))
    (made,) = b.op(op.op.name, (x, source, init), (type_,), op.attrs)
    for d, axes, skips, length in cuts:
        made = take_dim(b, made, d, axes, skips, length)
    return (made,)


def _scatter_needs(op: LocalOp, dim: int, axes: Axes) -> tuple[Need, Need, list[int]]:
    """Returns (`Need` of operand, of source, for each tile its start in the operand's range)."""
    # Windows of 3 at stride 2 over 8 elements, tiles of 2: windows 0 and 1, which are [0, 3) and
    # [2, 5), touch the tile [2, 4). Its device gets the operand [0, 5) and the sources [0, 2), and
    # the tile starts at 2 in what these scatter to. All devices get equally many of both.
    kind, mesh = op.op.kind, op.mesh
    size, count = kind.operands[0].shape[dim], kind.operands[1].shape[dim]
    span = op.attrs["window_dimensions"][dim]
    stride = Sliding(kind, kind.operands[0].rank).strides[dim]
    piece = piece_sizes(size, axes, mesh)[-1]
    owned = tiles(size, axes, mesh)
    firsts = [(start - span + 1) // stride for start, _ in owned]
    skips = [start - first * stride for (start, _), first in zip(owned, firsts, strict=True)]
    skips = [skip if own else skips[0] for skip, (_, own) in zip(skips, owned, strict=True)]
    lasts = [(start + own - 1) // stride for start, own in owned]
    touching = max(last - first + 1 for first, last in zip(firsts, lasts, strict=True))
    length = max((touching - 1) * stride + span, max(skips) + piece)
    touching = (length - span) // stride + 1
    windows, around = [], []
    for first, last, (start, own) in zip(firsts, lasts, owned, strict=True):
        low, high = (max(first, 0), min(last + 1, count)) if own else (0, 0)
        windows.append((first, low, high))
        reach = ((high - 1) * stride + span) if low < high else start
        around.append((first * stride, max(low * stride, 0), reach if own else 0))
    return Need.of(size, length, around), Need.of(count, touching, windows), skips


# Convolutions.


@local("stablehlo.convolution")
def _convolution(op: LocalOp) -> tuple[Value, ...]:
    """Convolves what this device's piece of the result, or of the kernel, reads of the input."""
    numbers: ConvDims = op.attrs["dimension_numbers"]
    lhs, rhs = (op.masked(i) for i in range(2))
    sliding = Sliding(op.op.kind, len(numbers.input_spatial))
    padding, dilation = list(sliding.padding), list(sliding.base)
    for d, read in op.reads(0).items():
        i = numbers.input_spatial.index(d)
        lhs, low, high, dilation[i] = base_of(op, 0, lhs, d, *read, None)
        padding[i] = low, high
    attrs: dict[str, Attribute] = {}  # of groups those that are left on one device
    for name, d in (
        ("feature_group_count", numbers.input_feature),
        ("batch_group_count", numbers.input_batch),
    ):
        count = op.attrs.get(name, 1)
        if count > 1:
            axes = op.choice.assignment[op.rule.operands[0][d][0]]
            attrs[name] = piece_sizes(count, axes, op.mesh)[-1]
    if padding:
        attrs |= {"padding": tuple(padding), "lhs_dilation": tuple(dilation)}
    return op.emit([lhs, rhs], **attrs)
