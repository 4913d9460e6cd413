"""Rules of matrix products and reductions, of gathers and scatters, of top-k and sorts."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from spmd.ir.description import Role
from spmd.ir.dialect.batched import Batched, but_scalars, in_front, shifted, stacked
from spmd.ir.dialect.bodies import is_elementwise
from spmd.ir.dialect.halo import Merge
from spmd.ir.dialect.reducers import NEUTRAL, joining
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import MERGE, PASS, REDUCE, REPLICATE, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import DIM_NUMBERS, DotDims, GatherDims, ScatterDims, TensorType


def dot_flops(kind: OpKind) -> int:
    """Returns the arithmetic operations of a matrix product: 2 i j k for `i k, k j -> i j`."""
    dims: DotDims = kind.attrs["dot_dimension_numbers"]
    contracted = (kind.operands[0].shape[d] for d in dims.lhs_contract)
    return 2 * kind.results[0].size * math.prod(contracted)


def _batched_dot(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched:
    """Returns one product for `count`: with a new batch dim, or more rows if they share an operand.

    `i k, k j -> i j` becomes `b i k, b k j -> b i j`, or `i k, b k j -> i b j`.
    """
    dims: DotDims = kind.attrs["dot_dimension_numbers"]
    both = (0,) * all(differs)
    left, right = (shifted if differ else tuple for differ in differs)
    numbers = DotDims(
        (*both, *left(dims.lhs_batch)),
        (*both, *right(dims.rhs_batch)),
        left(dims.lhs_contract),
        right(dims.rhs_contract),
    )
    # Results have the batch dims in front, then the rest of the left operand, then of the right.
    rows = kind.operands[0].rank - len(dims.lhs_contract)
    place = 0 if both else len(dims.lhs_batch) if differs[0] else rows
    shape = list(kind.results[0].shape)
    shape.insert(place, count)
    made = stacked(kind, count, differs, dot_dimension_numbers=numbers).kind
    results = (kind.results[0].with_shape(tuple(shape)),)
    return Batched(OpKind(kind.name, made.operands, results, made.attrs), place)


@op("stablehlo.dot_general", batched=_batched_dot, flops=dot_flops, reads="matrices")
def _dot_general(kind: OpKind) -> Rule:
    """Returns the rule `b i k, b j k -> b i j`, `k` summed; one of the operands may be partial."""
    build = RuleBuilder()
    lhs, rhs, result = _product(build, kind, kind.attrs["dot_dimension_numbers"])
    return build.build([lhs, rhs], [result], reduction="add", linear=((0,), (1,)))


def _product(
    build: RuleBuilder, kind: OpKind, dims: DotDims, group: int | None = None
) -> tuple[list[DimFactors], list[DimFactors], list[DimFactors]]:
    """Returns the factors of lhs's, rhs's and result's dims; rhs's dim `group` is summed, too."""
    lhs_shape, rhs_shape = kind.operands[0].shape, kind.operands[1].shape
    lhs: list[DimFactors] = [()] * len(lhs_shape)
    rhs: list[DimFactors] = [()] * len(rhs_shape)
    for i, j in zip(dims.lhs_batch, dims.rhs_batch, strict=True):
        lhs[i] = rhs[j] = build.factor(lhs_shape[i])
    for i, j in zip(dims.lhs_contract, dims.rhs_contract, strict=True):
        lhs[i] = rhs[j] = build.factor(lhs_shape[i], REDUCE)
    if group is not None:
        rhs[group] = build.factor(rhs_shape[group], REDUCE)
    result = [lhs[i] for i in dims.lhs_batch]
    for side, shape in ((lhs, lhs_shape), (rhs, rhs_shape)):
        for d, size in enumerate(shape):
            if not side[d]:
                side[d] = build.factor(size)
                result.append(side[d])
    return lhs, rhs, result


@op("stablehlo.reduce", batched=but_scalars, role=Role.FOLD)
def _reduce(kind: OpKind) -> Rule:
    """Returns the rule `i k, -> i`: `k` is reduced, or merged if the body is not one op (argmax's).

    By StableHLO's specification, section reduce, body and initial values form a monoid, terms are
    taken in order, and initial values may come in anywhere.
    """
    build = RuleBuilder()
    summed = kind.attrs["dimensions"]
    reducer = kind.attrs["reducer"]
    count = len(kind.operands) // 2
    operand = [
        build.factor(size, PASS if d not in summed else REDUCE if reducer else MERGE)
        for d, size in enumerate(kind.operands[0].shape)
    ]
    result = [dim for d, dim in enumerate(operand) if d not in summed]
    linear = ((0,),) if reducer == "add" and kind.attrs.get(NEUTRAL) else ()
    # Of a body that is no known op, the results of pieces are gathered along each reduced dim, from
    # the most minor one on. Of f32[4, 6] reduced over both dims, each device offers f32[4, 1] along
    # dim 1, and f32[1, 1] along dim 0 when dim 1 is merged.
    merges = []
    for d in () if reducer else summed:
        gone = {r for r in summed if r >= d}
        dims = tuple(() if r in gone else dim for r, dim in enumerate(operand))
        shape = tuple(1 if r in gone else n for r, n in enumerate(kind.operands[0].shape))
        tensors = tuple((type_.with_shape(shape), dims) for type_ in kind.operands[:count])
        merges.append(Merge(operand[d][0], tensors))
    inits: list[list[DimFactors]] = [[]] * count
    operands, results = [operand] * count + inits, [result] * count
    more = {"reduction": reducer, "linear": linear, "merges": tuple(merges)}
    return build.build(operands, results, **more)


class RaggedDims(NamedTuple):
    """Dims of a `chlo.ragged_dot`: a product's, the ragged dim of lhs, rhs's group dim or None."""

    dot: DotDims
    ragged: int
    group: int | None

    @staticmethod
    def of(kind: OpKind) -> "RaggedDims":
        """Returns the dims that the attributes of a `chlo.ragged_dot` name."""
        text = kind.attrs["ragged_dot_dimension_numbers"].text

        def dims(name: str) -> tuple[int, ...]:
            found = re.search(rf"{name} = \[([\d, ]*)\]", text)
            return tuple(map(int, found[1].replace(",", " ").split())) if found else ()

        group = dims("rhs_group_dimensions")
        dot = DotDims(*map(dims, DIM_NUMBERS[DotDims][1]))
        return RaggedDims(dot, dims("lhs_ragged_dimensions")[0], group[0] if group else None)


@op("chlo.ragged_dot")
def _ragged_dot(kind: OpKind) -> Rule:
    """Returns the rule `m k, g k n, g -> m n` of ragged rows `m`, with `k` and `g` summed.

    If `m` is split, each device finds out to which groups its rows belong. If the groups `g` of rhs
    are, a device's term is zero in rows of other groups. The group dim of the group sizes is whole
    on every device, and so is that of a result (ragged contraction).
    """
    # Rows of lhs are sorted by group: with group sizes 3, 7 and 6, rows 0..2 meet rhs[0], 3..9 meet
    # rhs[1], 10..15 meet rhs[2]. Where `g` is split each row has its group on one device alone.
    build, dims = RuleBuilder(), RaggedDims.of(kind)
    sizes_shape = kind.operands[2].shape
    lhs, rhs, result = _product(build, kind, dims.dot, dims.group)
    if dims.ragged in dims.dot.lhs_contract:
        result = [build.factor(sizes_shape[-1], REPLICATE), *result]
    # Each index of the left operand's dims in front of the ragged one has its own group sizes.
    batch, inner = dims.dot.lhs_batch, dims.dot.lhs_contract
    if dims.ragged not in inner:
        inner = tuple(i for i in range(len(lhs)) if i not in (*batch, *inner))
    order = (*batch, *inner)
    outer = order[: order.index(dims.ragged)] if len(sizes_shape) > 1 else ()
    sizes = [lhs[i] for i in outer] + [build.factor(sizes_shape[-1], REPLICATE)]
    return build.build([lhs, rhs, sizes], [result], reduction="add", linear=((0,), (1,)))


# Look-ups and searches.


def _batched_gather(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched:
    """Returns one gather for `count`: with a new batch dim, or more indices of one table."""
    dims: GatherDims = kind.attrs["dimension_numbers"]
    table, moved = differs[0], shifted if differs[0] else tuple
    numbers = GatherDims(
        shifted(dims.offset_dims),
        moved(dims.collapsed_slice_dims),
        (0,) * table + moved(dims.operand_batching_dims),
        (0,) * table + shifted(dims.start_indices_batching_dims),
        moved(dims.start_index_map),
        dims.index_vector_dim + 1,
    )
    sizes = (1,) * table + tuple(kind.attrs["slice_sizes"])
    return stacked(kind, count, (table, True), dimension_numbers=numbers, slice_sizes=sizes)


def _batched_scatter(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched:
    dims: ScatterDims = kind.attrs["scatter_dimension_numbers"]
    numbers = ScatterDims(*map(shifted, dims))._replace(
        input_batching_dims=(0, *shifted(dims.input_batching_dims)),
        scatter_indices_batching_dims=(0, *shifted(dims.scatter_indices_batching_dims)),
    )
    return stacked(kind, count, [True] * len(differs), scatter_dimension_numbers=numbers)


@op("stablehlo.gather", batched=_batched_gather, reads_pieces=True, role=Role.ONCE)
def _gather(kind: OpKind) -> Rule:
    """Returns the rule `v h, b -> b h`, `v` summed: a device adds 0 for rows it does not have."""
    # An embedding of f32[100, 8] looked up at i32[4, 1], in slices of (1, 8):
    #   i j, l k -> ...   dim 0 of the table is cut to one element, so it is reduced: a device that
    #                     lacks the row contributes zeros
    #                     dim 1 is taken whole, so it is a factor of the result, too
    # Of a dim that is cut to several elements a slice may straddle two pieces: it stays whole.
    build = RuleBuilder()
    dims: GatherDims = kind.attrs["dimension_numbers"]
    sizes = kind.attrs["slice_sizes"]
    table, indices_type = kind.operands
    kinds = [PASS] * indices_type.rank
    indices = _index_dims(build, indices_type.shape, dims.index_vector_dim, kinds)
    result = _around(dims.offset_dims, indices, dims.index_vector_dim, kind.results[0].rank)
    batched = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
    operand: list[DimFactors] = []
    offsets = iter(dims.offset_dims)
    for d, size in enumerate(table.shape):
        if d in batched:
            operand.append(indices[batched[d]])
            continue
        whole = sizes[d] == size and size > 1
        picked = sizes[d] == 1 and d in dims.start_index_map
        operand.append(build.factor(size, PASS if whole else REDUCE if picked else REPLICATE))
        if d not in dims.collapsed_slice_dims:
            result[next(offsets)] = operand[-1] if whole else build.factor(sizes[d], REPLICATE)
    return build.build([operand, indices], [result], reduction=joining(table.dtype), linear=((0,),))


@op("stablehlo.scatter", batched=_batched_scatter, role=Role.UPDATE)
def _scatter(kind: OpKind) -> Rule:
    """Returns the rule `v h, b, b h -> v h`, `b` reduced, or whole if the body is no known op."""
    build = RuleBuilder()
    dims: ScatterDims = kind.attrs["scatter_dimension_numbers"]
    reducer = kind.attrs["reducer"]
    count = (len(kind.operands) - 1) // 2
    table, indices_type, update_type = kind.operands[0], kind.operands[count], kind.operands[-1]
    batch_kind = REDUCE if reducer else REPLICATE
    batching = dims.scatter_indices_batching_dims
    kinds = [PASS if d in batching else batch_kind for d in range(indices_type.rank)]
    indices = _index_dims(build, indices_type.shape, dims.index_vector_dim, kinds)
    update = _around(dims.update_window_dims, indices, dims.index_vector_dim, update_type.rank)
    batched = dict(zip(dims.input_batching_dims, dims.scatter_indices_batching_dims, strict=True))
    operand: list[DimFactors] = []
    windows = iter(dims.update_window_dims)
    for d, size in enumerate(table.shape):
        if d in batched:
            operand.append(indices[batched[d]])
        elif d in dims.inserted_window_dims:
            operand.append(build.factor(size, PASS))
        else:
            place = next(windows)
            part = update_type.shape[place]
            operand.append(build.factor(size, PASS if part == size else REPLICATE))
            update[place] = operand[-1] if part == size else build.factor(part, REPLICATE)
    return build.build(
        [operand] * count + [indices] + [update] * count,
        [operand] * count,
        reduction=reducer,
        linear=((0, 2),) if reducer == "add" else (),
    )


def _around(
    windows: tuple[int, ...], indices: list[DimFactors], vector_dim: int, rank: int
) -> list[DimFactors]:
    """Returns `rank` dims: () at those in `windows`, else `indices`, in order, but `vector_dim`."""
    batch = iter([dim for d, dim in enumerate(indices) if d != vector_dim])
    return [() if d in windows else next(batch) for d in range(rank)]


def _index_dims(
    build: RuleBuilder, shape: tuple[int, ...], vector_dim: int, kinds: Sequence[str]
) -> list[DimFactors]:
    """Returns an index tensor's dims: a new factor each, by `kinds`; `vector_dim` stays whole."""
    pairs = enumerate(zip(shape, kinds, strict=True))
    return [build.factor(n, REPLICATE if d == vector_dim else kind) for d, (n, kind) in pairs]


GATHERED_SORT_BYTES = 1 << 18
"""Up to this many bytes of operands a sort's dim is gathered, not split. A sorting network of 8
devices takes 6 rounds one after another, a gather takes one, and moves no more bytes up to 32
devices (a network moves each element's position, too). A network saves memory, as a device holds
two pieces at most; for so few bytes latency decides."""


def _halvings(kind: OpKind) -> float:
    return 1 + math.log2(max(2, *kind.operands[0].shape))


@op("chlo.top_k", batched=in_front, passes=_halvings)
def _top_k(kind: OpKind) -> Rule:
    """Returns the rule `i j -> i k, i k`: devices merge the `k` largest of their pieces of `j`."""
    build = RuleBuilder()
    *outer, searched = kind.operands[0].shape
    shared = build.dims(outer)
    along = build.factor(searched, MERGE)
    found = [*shared, build.factor(kind.results[0].shape[-1], REPLICATE)]
    merge = Merge(along[0], tuple((type_, (*shared, ())) for type_ in kind.results))
    return build.build([[*shared, along]], [found, found], merges=(merge,))


@op("stablehlo.sort", batched=in_front, passes=_halvings, is_in_place=True)
def _sort(kind: OpKind) -> Rule:
    """Returns the rule: any dim may be split, the sorted one in large elementwise sorts only."""
    build = RuleBuilder()
    along = kind.attrs["dimension"]
    merges = is_elementwise(kind.attrs["body"]) and (
        sum(t.bytes for t in kind.operands) > GATHERED_SORT_BYTES
    )
    dims = [
        build.factor(size, PASS if d != along else MERGE if merges else REPLICATE)
        for d, size in enumerate(kind.results[0].shape)
    ]
    keys = TensorType(kind.results[0].shape, "i32")
    tensors = tuple((type_, tuple(dims)) for type_ in (*kind.operands, keys))
    merge = (Merge(dims[along][0], tensors, network=True),) if merges else ()
    return build.build([dims] * len(kind.operands), [dims] * len(kind.results), merges=merge)
