"""Rules of ops that make, move, cut or join elements, and of sliding windows.

An operand's dim and a result's, of different sizes, may be one `window` factor. If that is split,
the rule's halos say which elements of the operand each device reads.
"""

import math

from spmd.ir.description import Role
from spmd.ir.dialect.batched import at_a_place, but_scalars, in_front
from spmd.ir.dialect.bodies import is_elementwise
from spmd.ir.dialect.callbacks import INSPECT
from spmd.ir.dialect.halo import Window
from spmd.ir.dialect.reducers import NEUTRAL, joining
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import REDUCE, REPLICATE, WINDOW, DimFactors, Pair, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import ConvDims


@op("stablehlo.constant", "stablehlo.iota", is_source=True, role=Role.INSIDE)
def _source(kind: OpKind) -> Rule:
    """Returns the rule `-> i j`: all dims may be split, as each device can make any piece."""
    build = RuleBuilder()
    return build.build([], [build.dims(kind.results[0].shape)])


@op("stablehlo.broadcast_in_dim", batched=in_front, is_same_locally=True, role=Role.INSIDE)
def _broadcast_in_dim(kind: OpKind) -> Rule:
    """Returns the rule `i -> i j`: new dims, and dims of size 1 that grow, are the result's."""
    build = RuleBuilder()
    result = build.dims(kind.results[0].shape)
    operand = [
        result[to] if size == kind.results[0].shape[to] else build.factor(size)
        for size, to in zip(kind.operands[0].shape, kind.attrs["broadcast_dimensions"], strict=True)
    ]
    return build.build([operand], [result], linear=((0,),), moves=True)


@op("stablehlo.transpose", batched=in_front, is_same_locally=True, role=Role.INSIDE)
@op("stablehlo.optimization_barrier", is_same_locally=True, is_repeatable=False, role=Role.ALIAS)
@op("spmd.mark", is_mark=True, is_global=True, vanishes=True, role=Role.ALIAS)
@op(INSPECT, is_global=True, vanishes=True, has_effect=True, is_repeatable=False, role=Role.ALIAS)
def _transpose(kind: OpKind) -> Rule:
    """Returns the rule `i j -> j i`, of marks and barriers (of one operand by now) `i j -> i j`."""
    build = RuleBuilder()
    operand = build.dims(kind.operands[0].shape)
    result = [operand[p] for p in kind.attrs.get("permutation", range(len(operand)))]
    return build.build([operand], [result], linear=((0,),), moves=True)


@op("stablehlo.reshape", batched=in_front, is_same_locally=True, role=Role.ALIAS)
def _reshape(kind: OpKind) -> Rule:
    """Returns the rule `(i j) k -> i (j k)`: factors divide dims of both shapes, major to minor.

    What is left of dims without a common divisor stays whole: of 6 x 4 to 8 x 3 a major factor 2
    may be split, and the 3 x 4 and 4 x 3 behind it may not.
    """
    build = RuleBuilder()
    source, target = kind.operands[0].shape, kind.results[0].shape
    operand: list[DimFactors] = [() for _ in source]
    result: list[DimFactors] = [() for _ in target]
    if kind.operands[0].size:
        # The heads of both lists, (dim, size still without a factor), share gcd(m, n), which
        # becomes a factor of both dims:
        #   [8, 3] -> [4, 6]:  8 4 share 4;  left 2 | 3 and 6 share 2, then 3:   (i j) k -> i (j k)
        # Heads that share nothing more cannot be told apart dim by dim:
        #   [6, 4] -> [8, 3]:  6 8 share 2;  left 3 | 4 and 4 | 3 share nothing
        # The major 2 can still be split; the rest of both sides is kept whole until both have
        # passed the same number of elements, here 3 * 4 == 4 * 3.
        left = [(d, size) for d, size in enumerate(source) if size > 1]
        right = [(d, size) for d, size in enumerate(target) if size > 1]
        while left and right:
            (i, m), (j, n) = left.pop(0), right.pop(0)
            shared = math.gcd(m, n)
            if shared > 1:
                factor = build.factor(shared)
                operand[i] += factor
                result[j] += factor
                m, n = m // shared, n // shared
            if n == 1 < m:
                left.insert(0, (i, m))
            elif m == 1 < n:
                right.insert(0, (j, n))
            elif m > 1:
                operand[i] += build.factor(m, REPLICATE)
                result[j] += build.factor(n, REPLICATE)
                while m != n:
                    side, dims = (left, operand) if m < n else (right, result)
                    d, size = side.pop(0)
                    dims[d] += build.factor(size, REPLICATE)
                    m, n = (m * size, n) if m < n else (m, n * size)
    operand = [dim or build.factor(n, REPLICATE) for dim, n in zip(operand, source, strict=True)]
    result = [dim or build.factor(n, REPLICATE) for dim, n in zip(result, target, strict=True)]
    return build.build([operand], [result], linear=((0,),), moves=True)


@op("stablehlo.bitcast_convert", batched=in_front, is_same_locally=True, role=Role.ALIAS)
def _bitcast_convert(kind: OpKind) -> Rule:
    """Returns the rule: all dims may be split but one that another element width adds or drops."""
    build = RuleBuilder()
    source, target = kind.operands[0].shape, kind.results[0].shape
    shared = build.dims(source[: len(target)])
    operand = shared + build.dims(source[len(shared) :], REPLICATE)
    return build.build([operand], [shared + build.dims(target[len(shared) :], REPLICATE)])


# Ops whose pieces read elements of their neighbours' pieces.


@op("stablehlo.slice", batched=in_front, reads_pieces=True, role=Role.INSIDE)
def _slice(kind: OpKind) -> Rule:
    """Returns the rule of a slice, by which any dim may be split.

    A dim cut to one element is summed: devices without that element add 0. Other cut dims have
    halos, since `result[o] = operand[start + o * stride]`.
    """
    # [2:8] of 8 elements over {2, 2}: the six results lie as 2 3 | 4 . | 5 6 | 7 . and the operand
    # as 0 1 | 2 3 | 4 5 | 6 7. One round brings 2 3, 4 and 6 one tile to the left.
    build = RuleBuilder()
    starts, strides = kind.attrs["start_indices"], kind.attrs["strides"]

    def pair(d: int, size: int, out: int) -> Pair:
        if size == out:
            return build.passes(size)
        if out == 1:
            return build.apart(size, 1, REDUCE)
        return build.window(d, size, Window(out, strides[d], -starts[d]))

    operand, result = build.pairs(kind.operands[0], kind.results[0], pair)
    more = {"reduction": joining(kind.operands[0].dtype), "linear": ((0,),), "moves": True}
    return build.build([operand], [result], **more)


@op("stablehlo.reverse", batched=in_front, role=Role.INSIDE)
def _reverse(kind: OpKind) -> Rule:
    """Returns the rule: any dim may be split; along a reversed one devices read others' tiles."""
    build = RuleBuilder()
    turned = kind.attrs["dimensions"]
    dims = [
        build.window(d, size, Window(size, reverse=True))[1]
        if d in turned and size > 1
        else build.factor(size)
        for d, size in enumerate(kind.results[0].shape)
    ]
    return build.build([dims], [dims], linear=((0,),), moves=True)


@op("stablehlo.pad", batched=but_scalars, role=Role.INSIDE)
def _pad(kind: OpKind) -> Rule:
    """Returns the rule of a pad, by which any dim may be split.

    A padded dim has halos, since `result[low + e * (interior + 1)] = operand[e]`. The operand may
    be partial if the padding is 0.
    """
    build = RuleBuilder()
    low, inner = kind.attrs["edge_padding_low"], kind.attrs["interior_padding"]

    def pair(d: int, size: int, out: int) -> Pair:
        window = Window(out, 1, low[d], inner[d] + 1)
        return build.passes(size) if window == Window(size) else build.window(d, size, window)

    operand, result = build.pairs(kind.operands[0], kind.results[0], pair)
    return build.build([operand, []], [result], linear=((0,),) if kind.attrs.get(NEUTRAL) else ())


@op("stablehlo.concatenate", batched=in_front, role=Role.INSIDE)
def _concatenate(kind: OpKind) -> Rule:
    """Returns the rule: any dim may be split, the joined one with halos as of padded operands."""
    build = RuleBuilder()
    along = kind.attrs["dimension"]
    shape = kind.results[0].shape
    result = [
        build.factor(n, WINDOW) if d == along and n > 1 else build.factor(n)
        for d, n in enumerate(shape)
    ]
    operands, start = [], 0
    for i, type_ in enumerate(kind.operands):
        size, dims = type_.shape[along], list(result)
        if size < 2:
            dims[along] = build.factor(size, REPLICATE)
        if size:
            build.read(i, along, result[along], Window(shape[along], 1, start))
        operands.append(dims)
        start += size
    return build.build(operands, [result], linear=(tuple(range(len(operands))),), moves=True)


@op("stablehlo.dynamic_slice", batched=at_a_place, reads_pieces=True, role=Role.INSIDE)
def _dynamic_slice(kind: OpKind) -> Rule:
    """Returns the rule: the operand's dims may be split; the result is partial if a cut one is."""
    build = RuleBuilder()
    operand, result = build.cut(kind.operands[0], kind.results[0], REDUCE)
    starts: list[list[DimFactors]] = [[] for _ in kind.operands[1:]]
    more = {"reduction": joining(kind.operands[0].dtype), "linear": ((0,),), "moves": True}
    return build.build([operand, *starts], [result], **more)


@op("stablehlo.dynamic_update_slice", batched=at_a_place, role=Role.UPDATE)
def _dynamic_update_slice(kind: OpKind) -> Rule:
    """Returns the rule: any dim may be split; the update is split in dims that it covers whole."""
    build = RuleBuilder()
    operand, update = build.cut(kind.operands[0], kind.operands[1])
    starts: list[list[DimFactors]] = [[] for _ in kind.operands[2:]]
    return build.build([operand, update, *starts], [operand], linear=((0, 1),), moves=True)


# Sliding windows.


class Sliding:
    """Strides, dilations and padding of a `reduce_window`, `select_and_scatter`, `convolution`."""

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
        """Whether a dim has stride and base dilation 1, no padding: windows of 1 are elements."""
        return (self.strides[d], self.base[d], self.padding[d]) == (1, 1, (0, 0))


def running_dim(kind: OpKind) -> int | None:
    """Returns the dim along which an op has running totals (a cumsum, ...); None if it has none."""
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


@op("stablehlo.reduce_window", batched=but_scalars, role=Role.FOLD)
def _reduce_window(kind: OpKind) -> Rule:
    """Returns the rule: dims may be split, by halos where windows are wide.

    A dim that one window covers is reduced. Along running totals (cumsum and its like) devices
    exchange only the totals of their pieces.
    """
    count = len(kind.operands) // 2
    build = RuleBuilder()
    sliding = Sliding(kind, kind.operands[0].rank)
    running = running_dim(kind)
    reducer, neutral = kind.attrs.get("reducer", ""), bool(kind.attrs.get(NEUTRAL))

    def pair(d: int, size: int, out: int) -> Pair:
        width, low = kind.attrs["window_dimensions"][d], sliding.padding[d][0]
        # whether one window covers the whole dim, so that the terms of its pieces can be reduced
        is_undilated = (sliding.base[d], sliding.window[d]) == (1, 1)
        covers = size > 1 and out == 1 and is_undilated and low >= 0 and width >= low + size
        if d == running:
            factor = build.factor(size, WINDOW)
            build.read(0, d, factor, None)
            return factor, factor
        if width == 1 and sliding.is_plain(d):
            return build.passes(size)
        if covers and reducer and neutral:
            return build.apart(size, 1, REDUCE)
        span = (width - 1) * sliding.window[d] + 1
        return build.window(d, size, Window(out, sliding.strides[d], low, sliding.base[d], span))

    operand, result = build.pairs(kind.operands[0], kind.results[0], pair)
    build.reads = [read._replace(operand=i) for i in range(count) for read in build.reads]
    scalars: list[list[DimFactors]] = [[]] * count
    return build.build(
        [*[operand] * count, *scalars],
        [result] * count,
        reduction=reducer,
        linear=((0,),) if reducer == "add" and neutral else (),
    )


def _indices(kind: OpKind) -> int:
    """Returns workspace bytes: `rank` i32 per element of operand and source, plus the source."""
    image, source = kind.operands[:2]
    return image.rank * 4 * (image.size + source.size) + source.bytes


@op("stablehlo.select_and_scatter", workspace=_indices)
def _select_and_scatter(kind: OpKind) -> Rule:
    """Returns the rule: for its piece a device reads all windows that touch it, and their sources.

    Where windows reach into padding (jax pads the operand first) and where the scatter is no known
    reduction, the dim stays whole.
    """
    build = RuleBuilder()
    sliding = Sliding(kind, kind.operands[0].rank)

    def pair(d: int, size: int, count: int) -> Pair:
        span, stride = kind.attrs["window_dimensions"][d], sliding.strides[d]
        if span == 1 and sliding.is_plain(d):
            return build.passes(size)
        if sliding.padding[d] != (0, 0) or not kind.attrs.get("reducer") or count < 2:
            return build.apart(size, count)
        # Windows of 3 at stride 2 start at 0, 2, 4, ...: those of sources 0 and 1, [0, 3) and
        # [2, 5), touch the tile [2, 4). Position o reads the sources at base positions o - 2
        # to o (source s lies at 2 * s), and the operand from o - 2 to o + 2, since every
        # window has to be whole for its maximum to be known.
        factor, reach = build.factor(size, WINDOW), span - 1
        build.read(1, d, factor, Window(size, 1, reach, stride, span))
        build.read(0, d, factor, Window(size, 1, reach, 1, 2 * reach + 1))
        return factor, factor

    operand, source = build.pairs(kind.operands[0], kind.operands[1], pair)
    return build.build([operand, source, []], [operand])


# Convolution.


def convolution_flops(kind: OpKind) -> int:
    """Returns arithmetic operations: 2 x result elements x kernel elements per output feature."""
    dims: ConvDims = kind.attrs["dimension_numbers"]
    kernel = kind.operands[1]
    taps = kernel.size // max(1, kernel.shape[dims.kernel_output_feature])
    return 2 * kind.results[0].size * taps


@op("stablehlo.convolution", flops=convolution_flops, reads="images")
def _convolution(kind: OpKind) -> Rule:
    """Returns the rule `b (g i) y, i (g o) k -> b (g o) y`: `i` summed, `y` with halos, `k` whole.

    With a `batch_group_count` the groups `g` are in the input's batch instead:
    `(g b) i y, i (g o) k -> b (g o) y`. Where a kernel is larger than the result, `y` of the input
    and `k` are one factor, which is summed, and `y` of the result is whole.
    """
    dims: ConvDims = kind.attrs["dimension_numbers"]
    build = RuleBuilder()
    lhs: list[DimFactors] = [()] * kind.operands[0].rank
    rhs: list[DimFactors] = [()] * kind.operands[1].rank
    out: list[DimFactors] = [()] * kind.results[0].rank
    kernel, result = kind.operands[1].shape, kind.results[0].shape
    features = kind.attrs.get("feature_group_count", 1)
    batches = kind.attrs.get("batch_group_count", 1)
    groups = features * batches  # one of them is 1
    g, b = build.factor(groups), build.factor(result[dims.output_batch])
    depth = kernel[dims.kernel_input_feature]
    i = build.factor(depth, REDUCE if depth > 1 else REPLICATE)
    o = build.factor(kernel[dims.kernel_output_feature] // groups)

    def grouped(count: int, inner: DimFactors) -> DimFactors:
        """Returns a dim's factors: `inner` for one group, else `g`, then `inner` if not 1 long."""
        if count == 1:
            return inner
        return g if build.factors[inner[0]].size == 1 else g + inner

    lhs[dims.input_batch], lhs[dims.input_feature] = grouped(batches, b), grouped(features, i)
    rhs[dims.kernel_input_feature], out[dims.output_batch] = i, b
    rhs[dims.kernel_output_feature] = out[dims.output_feature] = grouped(groups, o)
    sliding = Sliding(kind, len(dims.input_spatial))
    reversal = kind.attrs.get("window_reversal") or (False,) * len(dims.input_spatial)
    for at, (x, k, y) in enumerate(
        zip(dims.input_spatial, dims.kernel_spatial, dims.output_spatial, strict=True)
    ):
        size, width, length = kind.operands[0].shape[x], kernel[k], result[y]
        stride, taps, base = sliding.strides[at], sliding.window[at], sliding.base[at]
        low = sliding.padding[at][0]
        # A kernel that is larger than the result is contracted. The gradient with respect to a
        # kernel looks like that: the gradient of the images, as large as they are, takes the
        # kernel's place. So its dim is split and the results are partial, instead of the kernel
        # being whole on every device.
        contracts = width > 1 and length < width
        if contracts and size > 1:
            out[y] = build.factor(length, REPLICATE)
            lhs[x] = rhs[k] = build.factor(width, REDUCE)
            span = (length - 1) * stride + 1
            build.read(0, x, rhs[k], Window(width, taps, low, base, span, bool(reversal[at])))
        else:
            window = Window(length, stride, low, base, (width - 1) * taps + 1)
            parts = build.apart(size, length) if contracts else build.window(x, size, window)
            lhs[x], out[y] = parts
            rhs[k] = build.factor(width, REPLICATE)
    return build.build([lhs, rhs], [out], reduction="add", linear=((0,), (1,)))
