"""Rules of ops that make, move, cut or join elements without computing on them."""

from __future__ import annotations

import math

from spmd.ir.description import Role
from spmd.ir.dialect.batched import behind_first, in_front
from spmd.ir.dialect.registry import op
from spmd.ir.dialect.rule import REPLICATE, DimFactors, Rule, RuleBuilder
from spmd.ir.program import OpKind


@op("stablehlo.constant", "stablehlo.iota", is_source=True, role=Role.INSIDE)
def _source(kind: OpKind) -> Rule:
    """`-> i j`: any piece can be made locally."""
    build = RuleBuilder()
    return build.build([], [[build.factor(size) for size in kind.results[0].shape]])


@op(
    "stablehlo.broadcast_in_dim",
    batched=in_front(broadcast_dimensions=behind_first),
    is_same_locally=True,
    role=Role.INSIDE,
)
def _broadcast_in_dim(kind: OpKind) -> Rule:
    """`i -> i j`: new and expanded dims belong to the result alone."""
    build = RuleBuilder()
    result = [build.factor(size) for size in kind.results[0].shape]
    operand = [
        result[to] if size == kind.results[0].shape[to] else build.factor(size)
        for size, to in zip(kind.operands[0].shape, kind.attrs["broadcast_dimensions"], strict=True)
    ]
    return build.build([operand], [result], linear=((0,),), moves=True)


@op(
    "stablehlo.transpose",
    batched=in_front(permutation=behind_first),
    is_same_locally=True,
    role=Role.INSIDE,
)
def _transpose(kind: OpKind) -> Rule:
    """`i j -> j i`."""
    build = RuleBuilder()
    operand = [build.factor(size) for size in kind.operands[0].shape]
    result = [operand[p] for p in kind.attrs["permutation"]]
    return build.build([operand], [result], linear=((0,),), moves=True)


@op("stablehlo.reshape", batched=in_front(), is_same_locally=True, role=Role.ALIAS)
def _reshape(kind: OpKind) -> Rule:
    """`(i j) k -> i (j k)`: factors are the common refinement of both shapes, major to minor.

    Where the shapes stop refining each other (6 x 4 to 8 x 3 share a major 2, then 3 x 4 meets
    4 x 3), dims keep a part that cannot be split, up to where both sides line up again.
    """
    build = RuleBuilder()
    source, target = kind.operands[0].shape, kind.results[0].shape
    operand: list[DimFactors] = [() for _ in source]
    result: list[DimFactors] = [() for _ in target]
    if kind.operands[0].size:
        sides = (
            [[d, size] for d, size in enumerate(source) if size > 1],
            [[d, size] for d, size in enumerate(target) if size > 1],
        )
        _refine(build, *sides, operand, result)
    operand = [dim or build.factor(n, REPLICATE) for dim, n in zip(operand, source, strict=True)]
    result = [dim or build.factor(n, REPLICATE) for dim, n in zip(result, target, strict=True)]
    return build.build([operand], [result], linear=((0,),), moves=True)


def _refine(
    build: RuleBuilder,
    left: list[list[int]],
    right: list[list[int]],
    operand: list[DimFactors],
    result: list[DimFactors],
) -> None:
    """Gives the dims of both shapes their shared factors, major to minor.

    Args:
      build: makes the factors.
      left, right: [dim, size still without a factor] of each dim; both lists are used up.
      operand, result: the factors of each dim, which are added to.
    """
    # The heads of both lists share gcd(m, n), which becomes a factor of both dims:
    #   [8, 3] -> [4, 6]:  8 4 share 4;  left 2 | 3 and 6 share 2, then 3:   (i j) k -> i (j k)
    # Heads that share nothing more cannot be told apart dim by dim:
    #   [6, 4] -> [8, 3]:  6 8 share 2;  left 3 | 4 and 4 | 3 share nothing
    # The major 2 can still be split; the rest of both sides is kept whole (`_skip_unrelated`) until
    # both have passed the same number of elements, here 3 * 4 == 4 * 3.
    while left and right:
        (i, m), (j, n) = left[0], right[0]
        shared = math.gcd(m, n)
        if shared > 1:
            factor = build.factor(shared)
            operand[i] += factor
            result[j] += factor
            left[0][1] //= shared
            right[0][1] //= shared
        if left[0][1] > 1 and right[0][1] > 1:
            _skip_unrelated(build, left, right, operand, result)
        for side in (left, right):
            if side and side[0][1] == 1:
                side.pop(0)


def _skip_unrelated(
    build: RuleBuilder,
    left: list[list[int]],
    right: list[list[int]],
    operand: list[DimFactors],
    result: list[DimFactors],
) -> None:
    """Uses up entries of both sides, as factors that stay whole, until their products agree."""
    m = n = 1
    while m == 1 or m != n:
        side, dims = (left, operand) if m <= n else (right, result)
        d, size = side.pop(0)
        dims[d] += build.factor(size, REPLICATE)
        if side is left:
            m *= size
        else:
            n *= size


@op("stablehlo.bitcast_convert", batched=in_front(), is_same_locally=True, role=Role.ALIAS)
def _bitcast_convert(kind: OpKind) -> Rule:
    """Equal widths are elementwise; otherwise the minor dim that appears or goes stays whole."""
    build = RuleBuilder()
    source, target = kind.operands[0].shape, kind.results[0].shape
    shared = [build.factor(n) for n in source[: min(len(source), len(target))]]
    operand = shared + [build.factor(n, REPLICATE) for n in source[len(shared) :]]
    result = shared + [build.factor(n, REPLICATE) for n in target[len(shared) :]]
    return build.build([operand], [result])


@op("stablehlo.optimization_barrier", is_same_locally=True, is_repeatable=False, role=Role.ALIAS)
@op("spmd.mark", is_mark=True, is_global=True, vanishes=True, role=Role.ALIAS)
def _passes(kind: OpKind) -> Rule:
    """`i j -> i j`: in the whole program a barrier has one operand (`spmd.frontend.normalize`).

    A mark passes open dims through; the closed ones are fixed where the program is read.
    """
    build = RuleBuilder()
    dims = [build.factor(size) for size in kind.operands[0].shape]
    return build.build([dims], [dims], linear=((0,),), moves=True)
