"""Rules of ops whose pieces read elements of their neighbours' pieces.

A `window` factor ties an operand's dim to a result's of another size. Where it is split, the
rule's halos say what every device reads of the operand.
"""

from __future__ import annotations

from spmd.ir.description import Role
from spmd.ir.dialect.batched import all_of_it, at_a_place, first, in_front, second_half, shifted
from spmd.ir.dialect.bodies import is_elementwise
from spmd.ir.dialect.halo import Window
from spmd.ir.dialect.reducers import NEUTRAL
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import (
    REDUCE,
    REPLICATE,
    WINDOW,
    DimFactors,
    Pair,
    Rule,
    RuleBuilder,
    sides,
)
from spmd.ir.program import OpKind
from spmd.ir.types import ConvDims


def term_kind(dtype: str) -> str:
    """The reduction that combines terms of which all but one device's are zero."""
    return "or" if dtype == "i1" else "add"


_SLICED = in_front(start_indices=first(0), limit_indices=all_of_it, strides=first(1))


@op("stablehlo.slice", batched=_SLICED, reads_pieces=True, role=Role.INSIDE)
def _slice(kind: OpKind) -> Rule:
    """Dims taken whole pass; one element comes from the device that holds it, as a term of a sum.

    StableHLO specification, section slice: `result[o] = operand[start + o * stride]`.
    """
    # [2:8] of 8 elements over {2, 2}: the six results lie as 2 3 | 4 . | 5 6 | 7 . and the operand
    # as 0 1 | 2 3 | 4 5 | 6 7. One round brings 2 3, 4 and 6 one tile to the left.
    build = RuleBuilder()
    pairs: list[Pair] = []
    for d, (size, out) in enumerate(
        zip(kind.operands[0].shape, kind.results[0].shape, strict=True)
    ):
        if size == out:
            pairs.append(build.passes(size))
        elif out == 1:
            pairs.append(build.apart(size, 1, REDUCE))
        else:
            start, stride = kind.attrs["start_indices"][d], kind.attrs["strides"][d]
            pairs.append(build.window(0, d, size, Window(out, stride, -start)))
    operand, result = sides(pairs)
    reduction = term_kind(kind.operands[0].dtype)
    return build.build([operand], [result], reduction=reduction, linear=((0,),), moves=True)


@op("stablehlo.reverse", batched=in_front(dimensions=shifted), role=Role.INSIDE)
def _reverse(kind: OpKind) -> Rule:
    """A reversed dim's tile comes from the device at the other end.

    StableHLO specification, section reverse: `result[o] = operand[size - 1 - o]`.
    """
    build = RuleBuilder()
    turned = kind.attrs["dimensions"]
    dims = [
        build.window(0, d, size, Window(size, reverse=True))[1]
        if d in turned and size > 1
        else build.factor(size)
        for d, size in enumerate(kind.results[0].shape)
    ]
    return build.build([dims], [dims], linear=((0,),), moves=True)


_PADDED = in_front(
    lambda _: 1, edge_padding_low=first(0), edge_padding_high=first(0), interior_padding=first(0)
)


@op("stablehlo.pad", batched=_PADDED, role=Role.INSIDE)
def _pad(kind: OpKind) -> Rule:
    """Dims without padding pass; linear in the operand when it pads with zeros.

    StableHLO specification, section pad: `result[low + e * (interior + 1)] = operand[e]`.
    """
    build = RuleBuilder()
    low, high = kind.attrs["edge_padding_low"], kind.attrs["edge_padding_high"]
    inner = kind.attrs["interior_padding"]
    pairs: list[Pair] = []
    for d, size in enumerate(kind.operands[0].shape):
        if (low[d], high[d], inner[d]) == (0, 0, 0):
            pairs.append(build.passes(size))
        else:
            window = Window(kind.results[0].shape[d], 1, low[d], inner[d] + 1)
            pairs.append(build.window(0, d, size, window))
    operand, result = sides(pairs)
    linear = ((0,),) if kind.attrs.get(NEUTRAL) else ()
    return build.build([operand, []], [result], linear=linear)


@op("stablehlo.concatenate", batched=in_front(dimension=shifted), role=Role.INSIDE)
def _concatenate(kind: OpKind) -> Rule:
    """Each operand is read as if it were padded to the result; the other dims pass.

    StableHLO specification, section concatenate.
    """
    build = RuleBuilder()
    along = kind.attrs["dimension"]
    shape = kind.results[0].shape
    splittable = shape[along] > 1 and len(kind.operands) > 1
    result = [build.factor(size) for size in shape]
    if splittable:
        build.factors[result[along][0]] = build.factors[result[along][0]]._replace(kind=WINDOW)
    operands = []
    start = 0
    for i, type_ in enumerate(kind.operands):
        size = type_.shape[along]
        dims = list(result)
        if len(kind.operands) > 1:
            if size < 2:
                dims[along] = build.factor(size, REPLICATE)
            if size:
                build.read(i, along, result[along], Window(shape[along], 1, start))
        operands.append(dims)
        start += size
    every = tuple(range(len(operands)))
    return build.build(operands, [result], linear=(every,), moves=True)


@op(
    "stablehlo.dynamic_slice",
    batched=at_a_place(1, slice_sizes=all_of_it),
    reads_pieces=True,
    role=Role.INSIDE,
)
def _dynamic_slice(kind: OpKind) -> Rule:
    """Dims taken whole pass (their start can only be 0).

    Of a dim that is cut, each device takes what lies in its piece: a term of the result.
    """
    build = RuleBuilder()
    operand, result = [], []
    for size, out in zip(kind.operands[0].shape, kind.results[0].shape, strict=True):
        shared = build.factor(size) if size == out else None
        operand.append(shared or build.factor(size, REDUCE))
        result.append(shared or build.factor(out, REPLICATE))
    starts: list[list[DimFactors]] = [[] for _ in kind.operands[1:]]
    return build.build(
        [operand, *starts],
        [result],
        reduction=term_kind(kind.operands[0].dtype),
        linear=((0,),),
        moves=True,
    )


@op("stablehlo.dynamic_update_slice", batched=at_a_place(2), role=Role.UPDATE)
def _dynamic_update_slice(kind: OpKind) -> Rule:
    """Every device updates the part that falls into its piece; what it updates with is whole.

    Dims that the update covers whole pass.
    """
    build = RuleBuilder()
    operand, update = [], []
    for size, part in zip(kind.operands[0].shape, kind.operands[1].shape, strict=True):
        operand.append(build.factor(size))
        update.append(operand[-1] if size == part else build.factor(part, REPLICATE))
    starts: list[list[DimFactors]] = [[] for _ in kind.operands[2:]]
    return build.build([operand, update, *starts], [operand], linear=((0, 1),), moves=True)


# ---------------------------------------------------------------------------------------------
# Sliding windows.


class Sliding:
    """The windows of a `reduce_window`, `select_and_scatter` or `convolution`, dim by dim."""

    def __init__(self, kind: OpKind, rank: int) -> None:
        conv = kind.name == "stablehlo.convolution"
        names = ("lhs_dilation", "rhs_dilation") if conv else ("base_dilations", "window_dilations")
        ones = (1,) * rank
        # strides of windows, dilations of what they slide over and of themselves, padding
        self.strides: tuple[int, ...] = kind.attrs.get("window_strides") or ones
        self.base: tuple[int, ...] = kind.attrs.get(names[0]) or ones
        self.window: tuple[int, ...] = kind.attrs.get(names[1]) or ones
        self.padding: tuple[tuple[int, int], ...] = kind.attrs.get("padding") or ((0, 0),) * rank

    def is_plain(self, d: int) -> bool:
        """Whether each element of a dim is a window of its own, given that windows have size 1."""
        return (self.strides[d], self.base[d], self.padding[d]) == (1, 1, (0, 0))


def running_dim(kind: OpKind) -> int | None:
    """The dim along which a `reduce_window` is a running total; None for all other ops."""
    if kind.name != "stablehlo.reduce_window":
        return None
    sliding = Sliding(kind, kind.operands[0].rank)
    # jax writes cumsum as windows as long as the dim, padded by one element less in front of it: of
    # 4 elements, result i is the sum of x[i - 3] to x[i], where what lies below x[0] is padding.
    # Padding behind the dim makes the total run backwards.
    shape, sizes = kind.operands[0].shape, kind.attrs["window_dimensions"]
    wide = [d for d, size in enumerate(sizes) if size > 1 or not sliding.is_plain(d)]
    if len(wide) != 1:
        return None
    (d,) = wide
    rest = shape[d] - 1
    runs = (
        sizes[d] == shape[d]
        and (sliding.strides[d], sliding.base[d], sliding.window[d]) == (1, 1, 1)
        and sliding.padding[d] in ((rest, 0), (0, rest))
        and is_elementwise(kind.attrs["body"])
    )
    return d if runs else None


_WINDOWED = in_front(
    second_half,
    window_dimensions=first(1),
    window_strides=first(1),
    base_dilations=first(1),
    window_dilations=first(1),
    padding=first((0, 0)),
)


@op("stablehlo.reduce_window", batched=_WINDOWED, role=Role.FOLD)
def _reduce_window(kind: OpKind) -> Rule:
    """Dims with windows of one element pass; one window over a whole dim is a reduction.

    StableHLO specification, section reduce_window. Running totals (cumsum and its like) only
    exchange the totals of their pieces.
    """
    count = len(kind.operands) // 2
    build = RuleBuilder()
    sliding = Sliding(kind, kind.operands[0].rank)
    running = running_dim(kind)
    pairs: list[Pair] = []
    for d, size in enumerate(kind.operands[0].shape):
        if d == running:
            factor = build.factor(size, WINDOW)
            pairs.append((factor, factor))
            build.read(0, d, factor, None)
        elif kind.attrs["window_dimensions"][d] == 1 and sliding.is_plain(d):
            pairs.append(build.passes(size))
        elif _covers(kind, sliding, d):
            pairs.append(build.apart(size, 1, REDUCE))
        else:
            span = (kind.attrs["window_dimensions"][d] - 1) * sliding.window[d] + 1
            low, out = sliding.padding[d][0], kind.results[0].shape[d]
            window = Window(out, sliding.strides[d], low, sliding.base[d], span)
            pairs.append(build.window(0, d, size, window))
    operand, result = sides(pairs)
    build.reads = [read._replace(operand=i) for i in range(count) for read in build.reads]
    neutral = kind.attrs.get("reducer") == "add" and kind.attrs.get(NEUTRAL)
    scalars: list[list[DimFactors]] = [[]] * count
    return build.build(
        [*[operand] * count, *scalars],
        [result] * count,
        reduction=kind.attrs.get("reducer", ""),
        linear=((0,),) if neutral else (),
    )


def _covers(kind: OpKind, sliding: Sliding, d: int) -> bool:
    """Whether one window covers a whole dim, so that the terms of its pieces can be reduced."""
    size, span = kind.operands[0].shape[d], kind.attrs["window_dimensions"][d]
    low = sliding.padding[d][0]
    return (
        size > 1
        and kind.results[0].shape[d] == 1
        and (sliding.base[d], sliding.window[d]) == (1, 1)
        and low >= 0
        and span >= low + size
        and bool(kind.attrs.get("reducer"))
        and bool(kind.attrs.get(NEUTRAL))
    )


def _indices(kind: OpKind) -> int:
    """Bytes of each dim's index as a tensor of its own, of all elements and of what is chosen."""
    image, source = kind.operands[:2]
    return image.rank * 4 * (image.size + source.size) + source.bytes


@op("stablehlo.select_and_scatter", workspace=_indices)
def _select_and_scatter(kind: OpKind) -> Rule:
    """A piece reads all windows that touch it, and the sources of these windows.

    StableHLO specification, section select_and_scatter. Where windows reach into padding (jax
    pads the operand first) and where the scatter is no known reduction, the dim stays whole.
    """
    build = RuleBuilder()
    sliding = Sliding(kind, kind.operands[0].rank)
    pairs: list[Pair] = []
    for d, size in enumerate(kind.operands[0].shape):
        span, stride = kind.attrs["window_dimensions"][d], sliding.strides[d]
        count = kind.operands[1].shape[d]
        if span == 1 and sliding.is_plain(d):
            pairs.append(build.passes(size))
        elif sliding.padding[d] != (0, 0) or not kind.attrs.get("reducer") or count < 2:
            pairs.append(build.apart(size, count))
        else:
            # Windows of 3 at stride 2 start at 0, 2, 4, ...: those of sources 0 and 1, [0, 3) and
            # [2, 5), touch the tile [2, 4). Position o reads the sources at base positions o - 2
            # to o (source s lies at 2 * s), and the operand from o - 2 to o + 2, since every
            # window has to be whole for its maximum to be known.
            factor = build.factor(size, WINDOW)
            pairs.append((factor, factor))
            reach = span - 1
            build.read(1, d, factor, Window(size, 1, reach, stride, span))
            build.read(0, d, factor, Window(size, 1, reach, 1, 2 * reach + 1))
    operand, source = sides(pairs)
    return build.build([operand, source, []], [operand])


# ---------------------------------------------------------------------------------------------
# Convolution.


def convolution_flops(kind: OpKind) -> int:
    """Two for each point of the iteration space."""
    dims: ConvDims = kind.attrs["dimension_numbers"]
    kernel = kind.operands[1]
    taps = kernel.size // max(1, kernel.shape[dims.kernel_output_feature])
    return 2 * kind.results[0].size * taps


@op("stablehlo.convolution", flops=convolution_flops, reads="images")
def _convolution(kind: OpKind) -> Rule:
    """`b (g i) y, i (g o) k -> b (g o) y {i: reduce add, y: window, k: replicate}`.

    StableHLO specification, section convolution. Groups of the batch, where there are such,
    stand in the input's batch instead: `(g b) i y, i (g o) k -> b (g o) y`.
    """
    dims: ConvDims = kind.attrs["dimension_numbers"]
    build = RuleBuilder()
    lhs: list[DimFactors] = [()] * kind.operands[0].rank
    rhs: list[DimFactors] = [()] * kind.operands[1].rank
    out: list[DimFactors] = [()] * kind.results[0].rank
    _batch_and_features(kind, build, lhs, rhs, out)
    sliding = Sliding(kind, len(dims.input_spatial))
    reversal = kind.attrs.get("window_reversal") or (False,) * len(dims.input_spatial)
    for i, (x, k, y) in enumerate(
        zip(dims.input_spatial, dims.kernel_spatial, dims.output_spatial, strict=True)
    ):
        size, kernel = kind.operands[0].shape[x], kind.operands[1].shape[k]
        result = kind.results[0].shape[y]
        stride, taps, base = sliding.strides[i], sliding.window[i], sliding.base[i]
        low = sliding.padding[i][0]
        # A kernel that is larger than the result is contracted. The gradient with respect to a
        # kernel looks like that: the gradient of the images, as large as they are, takes the
        # kernel's place. So its dim is split and the results are partial, instead of the kernel
        # being whole on every device.
        contracts = kernel > 1 and result < kernel
        if contracts and size > 1:
            out[y] = build.factor(result, REPLICATE)
            lhs[x] = rhs[k] = build.factor(kernel, REDUCE)
            span = (result - 1) * stride + 1
            build.read(0, x, rhs[k], Window(kernel, taps, low, base, span, bool(reversal[i])))
        elif contracts or result < 2:
            lhs[x], out[y] = build.apart(size, result)
            rhs[k] = build.factor(kernel, REPLICATE)
        else:
            span = (kernel - 1) * taps + 1
            lhs[x], out[y] = build.window(0, x, size, Window(result, stride, low, base, span))
            rhs[k] = build.factor(kernel, REPLICATE)
    return build.build([lhs, rhs], [out], reduction="add", linear=((0,), (1,)))


def _batch_and_features(
    kind: OpKind,
    build: RuleBuilder,
    lhs: list[DimFactors],
    rhs: list[DimFactors],
    out: list[DimFactors],
) -> None:
    dims: ConvDims = kind.attrs["dimension_numbers"]
    features = kind.attrs.get("feature_group_count", 1)
    batches = kind.attrs.get("batch_group_count", 1)
    groups = features * batches  # one of them is 1
    kernel, result = kind.operands[1].shape, kind.results[0].shape
    g = build.factor(groups)
    b = build.factor(result[dims.output_batch])
    depth = kernel[dims.kernel_input_feature]
    i = build.factor(depth, REDUCE if depth > 1 else REPLICATE)
    o = build.factor(kernel[dims.kernel_output_feature] // groups)
    lhs[dims.input_batch] = _grouped(build, g if batches > 1 else (), b)
    lhs[dims.input_feature] = _grouped(build, g if features > 1 else (), i)
    rhs[dims.kernel_input_feature] = i
    rhs[dims.kernel_output_feature] = out[dims.output_feature] = _grouped(
        build, g if groups > 1 else (), o
    )
    out[dims.output_batch] = b


def _grouped(build: RuleBuilder, group: DimFactors, inner: DimFactors) -> DimFactors:
    """Groups, major to what each consists of; a group of one element is that element."""
    if group and build.factors[inner[0]].size == 1:
        return group
    return group + inner
