"""Rules of ops that sum factors away: dot_general, reduce, and their kin."""

from __future__ import annotations

from spmd.ir.dialect.merge import Merge
from spmd.ir.dialect.registry import rule
from spmd.ir.dialect.rule import MERGE, PASS, REDUCE, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind
from spmd.ir.types import DotDims


@rule("stablehlo.dot_general")
def _dot_general(kind: OpKind) -> Rule:
    """`b i k, b j k -> b i j {k: reduce add}`; linear in each operand alone."""
    build = RuleBuilder()
    dims: DotDims = kind.attrs["dot_dimension_numbers"]
    lhs_shape, rhs_shape = kind.operands[0].shape, kind.operands[1].shape
    lhs: list[DimFactors] = [()] * len(lhs_shape)
    rhs: list[DimFactors] = [()] * len(rhs_shape)
    for i, j in zip(dims.lhs_batch, dims.rhs_batch, strict=True):
        lhs[i] = rhs[j] = build.factor(lhs_shape[i])
    result = [lhs[i] for i in dims.lhs_batch]
    for i, j in zip(dims.lhs_contract, dims.rhs_contract, strict=True):
        lhs[i] = rhs[j] = build.factor(lhs_shape[i], REDUCE)
    lhs = [dim or build.factor(size) for dim, size in zip(lhs, lhs_shape, strict=True)]
    rhs = [dim or build.factor(size) for dim, size in zip(rhs, rhs_shape, strict=True)]
    summed_lhs = {*dims.lhs_batch, *dims.lhs_contract}
    summed_rhs = {*dims.rhs_batch, *dims.rhs_contract}
    result += [dim for i, dim in enumerate(lhs) if i not in summed_lhs]
    result += [dim for j, dim in enumerate(rhs) if j not in summed_rhs]
    return build.build([lhs, rhs], [result], reduction="add", linear=((0,), (1,)))


@rule("stablehlo.reduce")
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
    linear = ((0,),) if reducer == "add" and kind.attrs.get("spmd.neutral") else ()
    inits: list[list[DimFactors]] = [[]] * count
    return build.build(
        [operand] * count + inits,
        [result] * count,
        reduction=reducer,
        linear=linear,
        merges=() if reducer else _partial_results(kind, operand),
    )


def _partial_results(kind: OpKind, operand: list[DimFactors]) -> list[Merge]:
    """What is gathered along each reduced dim: those behind it are reduced before, in order."""
    summed = kind.attrs["dimensions"]
    merges = []
    for d in summed:
        gone = {r for r in summed if r >= d}
        dims = tuple(() if r in gone else dim for r, dim in enumerate(operand))
        shape = tuple(1 if r in gone else n for r, n in enumerate(kind.operands[0].shape))
        types = kind.operands[: len(kind.operands) // 2]
        tensors = tuple((type_.with_shape(shape), dims) for type_ in types)
        merges.append(Merge(operand[d][0], tensors))
    return merges
