"""Rules of gather and scatter."""

from __future__ import annotations

from spmd.ir.description import Role, Traffic
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import PASS, REDUCE, REPLICATE, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import GatherDims, ScatterDims


@op("stablehlo.gather", traffic=Traffic.PIECE, role=Role.ONCE)
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
    result: list[DimFactors] = [()] * kind.results[0].rank
    batch = [d for d in range(len(indices)) if d != dims.index_vector_dim]
    places = [d for d in range(len(result)) if d not in dims.offset_dims]
    for place, d in zip(places, batch, strict=True):
        result[place] = indices[d]
    operand: list[DimFactors] = []
    offsets = iter(dims.offset_dims)
    for d, size in enumerate(table.shape):
        if d in dims.operand_batching_dims:
            position = dims.operand_batching_dims.index(d)
            operand.append(indices[dims.start_indices_batching_dims[position]])
            continue
        kept = None if d in dims.collapsed_slice_dims else next(offsets)
        if sizes[d] == size and size > 1:
            operand.append(build.factor(size))
        elif sizes[d] == 1 and d in dims.start_index_map:
            operand.append(build.factor(size, REDUCE))
        else:
            operand.append(build.factor(size, REPLICATE))
        if kept is not None:
            whole = sizes[d] == size and size > 1
            result[kept] = operand[-1] if whole else build.factor(sizes[d], REPLICATE)
    return build.build([operand, indices], [result], reduction="add", linear=((0,),))


@op("stablehlo.scatter", traffic=Traffic.UPDATE, role=Role.UPDATE, is_scatter=True)
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
    update: list[DimFactors] = [()] * update_type.rank
    batch = [d for d in range(len(indices)) if d != dims.index_vector_dim]
    places = [d for d in range(len(update)) if d not in dims.update_window_dims]
    for place, d in zip(places, batch, strict=True):
        update[place] = indices[d]
    operand: list[DimFactors] = []
    windows = iter(dims.update_window_dims)
    for d, size in enumerate(table.shape):
        if d in dims.input_batching_dims:
            position = dims.input_batching_dims.index(d)
            operand.append(indices[dims.scatter_indices_batching_dims[position]])
        elif d in dims.inserted_window_dims:
            operand.append(build.factor(size, PASS))
        else:
            place = next(windows)
            whole = update_type.shape[place] == size
            operand.append(build.factor(size, PASS if whole else REPLICATE))
            update[place] = (
                operand[-1] if whole else build.factor(update_type.shape[place], REPLICATE)
            )
    linear: tuple[tuple[int, ...], ...] = ()
    if reducer == "add":
        linear = ((*range(count), *range(count + 1, 2 * count + 1)),)
    return build.build(
        [operand] * count + [indices] + [update] * count,
        [operand] * count,
        reduction=reducer,
        linear=linear,
    )


def _index_dims(
    build: RuleBuilder, shape: tuple[int, ...], vector_dim: int, kind: str = PASS
) -> list[DimFactors]:
    """Factors of an index tensor: its batch dims, and the index vector itself kept whole."""
    return [
        build.factor(size, REPLICATE if d == vector_dim else kind) for d, size in enumerate(shape)
    ]
