"""Rules of ops that look up or search: gather and scatter, `top_k` and `sort`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd.ir.description import Role
from spmd.ir.dialect.batched import Batched, in_front, shifted
from spmd.ir.dialect.bodies import is_elementwise
from spmd.ir.dialect.halo import Merge
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import MERGE, PASS, REDUCE, REPLICATE, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import GatherDims, ScatterDims, TensorType


def _batched_gather(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
    """One more batching dim, or of a table that is the same for all, more indices."""
    dims: GatherDims = kind.attrs["dimension_numbers"]
    table = differs[0]
    numbers = GatherDims(
        shifted(dims.offset_dims),
        shifted(dims.collapsed_slice_dims) if table else dims.collapsed_slice_dims,
        (0, *shifted(dims.operand_batching_dims)) if table else dims.operand_batching_dims,
        (0,) * table + shifted(dims.start_indices_batching_dims),
        shifted(dims.start_index_map) if table else dims.start_index_map,
        dims.index_vector_dim + 1,
    )
    sizes = (1,) * table + tuple(kind.attrs["slice_sizes"])
    attrs = {**kind.attrs, "dimension_numbers": numbers, "slice_sizes": sizes}
    found = in_front()(kind, count, differs)
    assert found is not None
    operands = (found.kind.operands[0] if table else kind.operands[0], found.kind.operands[1])
    return Batched(OpKind(kind.name, operands, found.kind.results, attrs))


def _batched_scatter(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
    """One more batching dim."""
    dims: ScatterDims = kind.attrs["scatter_dimension_numbers"]
    numbers = ScatterDims(
        shifted(dims.update_window_dims),
        shifted(dims.inserted_window_dims),
        (0, *shifted(dims.input_batching_dims)),
        (0, *shifted(dims.scatter_indices_batching_dims)),
        shifted(dims.scatter_dims_to_operand_dims),
        dims.index_vector_dim + 1,
    )
    return in_front(scatter_dimension_numbers=lambda *_: numbers)(kind, count, differs)


@op("stablehlo.gather", batched=_batched_gather, reads_pieces=True, role=Role.ONCE)
def _gather(kind: OpKind) -> Rule:
    """`v h, b -> b h {v: reduce add}`: a device looks up only what lies in its piece of `v`."""
    # An embedding of f32[100, 8] looked up at i32[4, 1], in slices of (1, 8):
    #   i j, l k -> ...   dim 0 of the table is cut to one element, so it is reduced: a device that
    #                     lacks the row contributes zeros
    #                     dim 1 is taken whole, so it is a factor of the result, too
    # Of a dim that is cut to several elements a slice may straddle two pieces: it stays whole.
    build = RuleBuilder()
    dims: GatherDims = kind.attrs["dimension_numbers"]
    sizes = kind.attrs["slice_sizes"]
    table, indices_type = kind.operands
    indices = _index_dims(build, indices_type.shape, dims.index_vector_dim)
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
            kept = next(offsets)
            result[kept] = operand[-1] if whole else build.factor(sizes[d], REPLICATE)
    return build.build([operand, indices], [result], reduction="add", linear=((0,),))


@op("stablehlo.scatter", batched=_batched_scatter, role=Role.UPDATE)
def _scatter(kind: OpKind) -> Rule:
    """`v h, b, b h -> v h {b: reduce add}`: each device scatters its updates into its piece."""
    build = RuleBuilder()
    dims: ScatterDims = kind.attrs["scatter_dimension_numbers"]
    reducer = kind.attrs["reducer"]
    count = (len(kind.operands) - 1) // 2
    table, indices_type, update_type = kind.operands[0], kind.operands[count], kind.operands[-1]
    batch_kind = REDUCE if reducer else REPLICATE
    indices = _index_dims(build, indices_type.shape, dims.index_vector_dim, batch_kind)
    for d in dims.scatter_indices_batching_dims:
        indices[d] = build.factor(indices_type.shape[d])
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
    linear: tuple[tuple[int, ...], ...] = ()
    if reducer == "add":
        linear = ((*range(count), *range(count + 1, 2 * count + 1)),)
    return build.build(
        [operand] * count + [indices] + [update] * count,
        [operand] * count,
        reduction=reducer,
        linear=linear,
    )


def _around(
    windows: tuple[int, ...], indices: list[DimFactors], vector_dim: int, rank: int
) -> list[DimFactors]:
    """Dims of a result or update: the indices' batch dims around those of the windows, still ()."""
    batch = iter([dim for d, dim in enumerate(indices) if d != vector_dim])
    return [() if d in windows else next(batch) for d in range(rank)]


def _index_dims(
    build: RuleBuilder, shape: tuple[int, ...], vector_dim: int, kind: str = PASS
) -> list[DimFactors]:
    """Factors of an index tensor: its batch dims, and the index vector itself kept whole."""
    return [
        build.factor(size, REPLICATE if d == vector_dim else kind) for d, size in enumerate(shape)
    ]


GATHERED_SORT_BYTES = 1 << 18
"""Up to this many bytes of operands the sorted dim stays whole, gathered if need be.

A network of 8 devices takes 6 rounds that wait for each other, a gather one. It moves no less
before there are 32 devices (of each element also its position); what it saves is memory: a device
never holds more than two pieces. For this many bytes that is nothing, and latency decides.
"""


def _halvings(kind: OpKind) -> float:
    """How often a sort of the longest dim goes through it."""
    return 1 + math.log2(max(2, *kind.operands[0].shape))


@op("chlo.top_k", batched=in_front(), passes=_halvings)
def _top_k(kind: OpKind) -> Rule:
    """`i j -> i k, i k {j: merge}`: the largest are among the largest `k` of each piece."""
    build = RuleBuilder()
    *outer, searched = kind.operands[0].shape
    shared = [build.factor(size) for size in outer]
    along = build.factor(searched, MERGE)
    found = [*shared, build.factor(kind.results[0].shape[-1], REPLICATE)]
    merge = Merge(along[0], tuple((type_, (*shared, ())) for type_ in kind.results))
    return build.build([[*shared, along]], [found, found], merges=(merge,))


@op("stablehlo.sort", batched=in_front(dimension=shifted), passes=_halvings, is_in_place=True)
def _sort(kind: OpKind) -> Rule:
    """All dims but the sorted one pass; pieces of the sorted dim meet in a sorting network."""
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
