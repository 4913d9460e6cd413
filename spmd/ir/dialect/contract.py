"""Ops that sum factors away: products of matrices, plain and ragged, and reductions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from spmd.ir.description import Role
from spmd.ir.dialect.batched import Batched, in_front, second_half, shifted
from spmd.ir.dialect.halo import Merge
from spmd.ir.dialect.reducers import NEUTRAL
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import MERGE, PASS, REDUCE, REPLICATE, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import DIM_NUMBERS, DotDims


def dot_flops(kind: OpKind) -> int:
    """Two for each point of the iteration space."""
    dims: DotDims = kind.attrs["dot_dimension_numbers"]
    contracted = (kind.operands[0].shape[d] for d in dims.lhs_contract)
    return 2 * kind.results[0].size * math.prod(contracted)


def _batched_dot(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched:
    """One more batch dim; if one operand is the same for all, a dim of the other's rows instead.

    `i k, k j -> i j` is `b i k, b k j -> b i j`, or `i k, b k j -> i b j`.
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
    operands = tuple(
        t.with_shape((count,) * differ + t.shape)
        for t, differ in zip(kind.operands, differs, strict=True)
    )
    results = (kind.results[0].with_shape(tuple(shape)),)
    attrs = {**kind.attrs, "dot_dimension_numbers": numbers}
    return Batched(OpKind(kind.name, operands, results, attrs), place)


@op("stablehlo.dot_general", batched=_batched_dot, flops=dot_flops, reads="matrices")
def _dot_general(kind: OpKind) -> Rule:
    """`b i k, b j k -> b i j {k: reduce add}`; linear in each operand alone."""
    build = RuleBuilder()
    lhs, rhs, result = _product(build, kind, kind.attrs["dot_dimension_numbers"])
    return build.build([lhs, rhs], [result], reduction="add", linear=((0,), (1,)))


def _product(
    build: RuleBuilder, kind: OpKind, dims: DotDims, group: int | None = None
) -> tuple[list[DimFactors], list[DimFactors], list[DimFactors]]:
    """Factors of the operands and of the result; `group` is a dim of the right one, summed too."""
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


@op("stablehlo.reduce", batched=in_front(second_half, dimensions=shifted), role=Role.FOLD)
def _reduce(kind: OpKind) -> Rule:
    """`i k, -> i {k: reduce}`; a body that is not one known op merges the results of pieces of `k`.

    StableHLO specification, section reduce: the body and the initial values form a monoid, terms
    are taken in order, and initial values may come in anywhere.
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
    inits: list[list[DimFactors]] = [[]] * count
    return build.build(
        [operand] * count + inits,
        [result] * count,
        reduction=reducer,
        linear=linear,
        merges=() if reducer else _partial_results(kind, operand),
    )


def _partial_results(kind: OpKind, operand: list[DimFactors]) -> tuple[Merge, ...]:
    """The tensors that are gathered along each reduced dim, for a body that is no known op."""
    # Reduced dims are merged from the most minor one on. Of f32[4, 6] reduced over both dims, each
    # device offers f32[4, 1] along dim 1, and f32[1, 1] along dim 0 when dim 1 is merged.
    summed = kind.attrs["dimensions"]
    merges = []
    for d in summed:
        gone = {r for r in summed if r >= d}
        dims = tuple(() if r in gone else dim for r, dim in enumerate(operand))
        shape = tuple(1 if r in gone else n for r, n in enumerate(kind.operands[0].shape))
        types = kind.operands[: len(kind.operands) // 2]
        tensors = tuple((type_.with_shape(shape), dims) for type_ in types)
        merges.append(Merge(operand[d][0], tensors))
    return tuple(merges)


class RaggedDims(NamedTuple):
    """`#chlo.ragged_dot`: dims of each operand by role; there is one `ragged` and one `group`."""

    dot: DotDims
    ragged: int
    group: int | None

    @staticmethod
    def of(kind: OpKind) -> RaggedDims:
        """The dimension numbers of a `chlo.ragged_dot`."""
        text = kind.attrs["ragged_dot_dimension_numbers"].text

        def dims(name: str) -> tuple[int, ...]:
            found = re.search(rf"{name} = \[([\d, ]*)\]", text)
            return tuple(map(int, found[1].replace(",", " ").split())) if found else ()

        group = dims("rhs_group_dimensions")
        dot = DotDims(*map(dims, DIM_NUMBERS[DotDims][1]))
        return RaggedDims(dot, dims("lhs_ragged_dimensions")[0], group[0] if group else None)


@op("chlo.ragged_dot")
def _ragged_dot(kind: OpKind) -> Rule:
    """`m k, g k n, g -> m n {k: reduce add, g: reduce add}` for ragged rows.

    Ragged rows may be split: each device finds out where its rows lie in the groups. The groups
    of the right operand may be: a device's term is zero in rows of groups that it lacks. The
    group sizes are whole on every device, and so are the groups of a result (ragged contraction).
    """
    # Rows of lhs are sorted by group: with group sizes 3, 7 and 6, rows 0..2 meet rhs[0], 3..9 meet
    # rhs[1], 10..15 meet rhs[2]. Where `g` is split each row has its group on one device alone.
    build, dims = RuleBuilder(), RaggedDims.of(kind)
    sizes_shape = kind.operands[2].shape
    lhs, rhs, result = _product(build, kind, dims.dot, dims.group)
    if dims.ragged in dims.dot.lhs_contract:
        result = [build.factor(sizes_shape[-1], REPLICATE), *result]
    outer = _outer_dims(dims) if len(sizes_shape) > 1 else ()
    sizes = [lhs[i] for i in outer] + [build.factor(sizes_shape[-1], REPLICATE)]
    return build.build([lhs, rhs, sizes], [result], reduction="add", linear=((0,), (1,)))


def _outer_dims(dims: RaggedDims) -> tuple[int, ...]:
    """Dims of the left operand in front of the ragged one: each index has its own group sizes."""
    ragged, batch, summed = dims.ragged, dims.dot.lhs_batch, dims.dot.lhs_contract
    if ragged in batch:
        return batch[: batch.index(ragged)]
    if ragged in summed:
        return (*batch, *summed[: summed.index(ragged)])
    return (*batch, *(i for i in range(ragged) if i not in (*batch, *summed)))
