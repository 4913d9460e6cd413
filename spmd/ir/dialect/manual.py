"""Rules of what is in manual regions: the ways in and out, and the collectives that users wrote.

A collective runs over axes that are held: the compiler splits nothing over them here. Over the
other axes it is an op like any other: a dim whose size or content it changes along the devices
stays whole, all others pass.
"""

from __future__ import annotations

from spmd.ir.control_flow import FROM_MANUAL, TO_MANUAL
from spmd.ir.dialect.registry import LONE_CALL, rule
from spmd.ir.dialect.rule import FIXED, REPLICATE, DimFactors, Rule, RuleBuilder
from spmd.ir.legality import DEVICE_IDS
from spmd.ir.program import Body, OpKind, body_reducer


@rule(TO_MANUAL)
def _to_manual(kind: OpKind) -> Rule:
    """`(x i) j -> i j`, where `x` is split over just the axes of the dim."""
    return _boundary(kind, whole=kind.operands[0].shape, inner=kind.results[0].shape)


@rule(FROM_MANUAL)
def _from_manual(kind: OpKind) -> Rule:
    """`i j -> (x i) j`, where `x` is split over just the axes of the dim."""
    return _boundary(kind, whole=kind.results[0].shape, inner=kind.operands[0].shape)


def _boundary(kind: OpKind, whole: tuple[int, ...], inner: tuple[int, ...]) -> Rule:
    build = RuleBuilder()
    outer_dims: list[DimFactors] = []
    inner_dims: list[DimFactors] = []
    for axes, size, piece in zip(kind.attrs["dims"], whole, inner, strict=True):
        fixed = build.factor(size // max(piece, 1), FIXED, axes) if axes else ()
        free = build.factor(piece)
        outer_dims.append(fixed + free)
        inner_dims.append(free)
    enters = kind.name == TO_MANUAL
    ends = (outer_dims, inner_dims) if enters else (inner_dims, outer_dims)
    return build.build([ends[0]], [ends[1]], linear=((0,),), moves=True, held=kind.attrs["axes"])


@rule(*DEVICE_IDS)
def _device_id(kind: OpKind) -> Rule:
    return RuleBuilder().build([], [[]])


@rule(LONE_CALL)
def _lone_call(kind: OpKind) -> Rule:
    """Nothing is split: one device's program has it as the user wrote it."""
    build = RuleBuilder()
    types = (*kind.operands, *kind.results)
    dims = [[build.factor(size, REPLICATE) for size in t.shape] for t in types]
    return build.build(dims[: len(kind.operands)], dims[len(kind.operands) :])


@rule("stablehlo.all_reduce")
def _all_reduce(kind: OpKind) -> Rule:
    """`i j -> i j`."""
    return _along(kind, (), sums=True)


@rule("stablehlo.collective_permute")
def _collective_permute(kind: OpKind) -> Rule:
    """`i j -> i j`; a device that receives nothing has zeros, which only sums ignore."""
    return _along(kind, ())


@rule("stablehlo.collective_broadcast")
def _collective_broadcast(kind: OpKind) -> Rule:
    """`i j -> i j`."""
    return _along(kind, (), moves=True)


@rule("stablehlo.all_gather")
def _all_gather(kind: OpKind) -> Rule:
    """`n j -> m j`, with the gathered dim whole."""
    return _along(kind, (kind.attrs["all_gather_dim"],), moves=True)


@rule("stablehlo.reduce_scatter")
def _reduce_scatter(kind: OpKind) -> Rule:
    """`n j -> m j`, with the scattered dim whole."""
    return _along(kind, (kind.attrs["scatter_dimension"],), sums=True)


@rule("stablehlo.all_to_all")
def _all_to_all(kind: OpKind) -> Rule:
    """`n p j -> m q j`, with both dims whole."""
    dims = (kind.attrs["split_dimension"], kind.attrs["concat_dimension"])
    return _along(kind, dims, moves=True)


def _along(
    kind: OpKind, whole: tuple[int, ...], *, sums: bool = False, moves: bool = False
) -> Rule:
    """The rule of a collective of one operand: some dims stay whole, the others pass."""
    build = RuleBuilder()
    before, after = [], []
    for dim, (size, left) in enumerate(
        zip(kind.operands[0].shape, kind.results[0].shape, strict=True)
    ):
        changes = dim in whole
        before.append(build.factor(size, REPLICATE) if changes else build.factor(size))
        after.append(build.factor(left, REPLICATE) if changes else before[-1])
    body = kind.attrs.get("body")
    linear = not sums or (isinstance(body, Body) and body_reducer(body) == "add")
    return build.build([before], [after], linear=((0,),) if linear else (), moves=moves)
