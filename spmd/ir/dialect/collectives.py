"""Collectives, and the ops that tell the devices apart.

A collective that a user wrote is in a manual region and runs over axes that are held: the compiler
splits nothing over them there. Over the other axes it is an op like any other: a dim whose size or
content it changes along the devices stays whole, all others pass.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.ir.description import DESCRIPTIONS, Description, Role, Traffic
from spmd.ir.dialect.reducers import body_reducer
from spmd.ir.dialect.registry import RuleFunction, describe, op
from spmd.ir.dialect.rule import REPLICATE, Rule, RuleBuilder
from spmd.ir.program import Body, OpKind

DEVICE_IDS = ("stablehlo.partition_id", "stablehlo.replica_id")
"""Ops that tell the devices apart, in the user's programs and in what is emitted."""

describe(Description(is_local=True, role=Role.INSIDE), "axis_index", dialect="spmd")
describe(
    Description(is_local=True, along="dim", traffic=Traffic.PIECE, role=Role.INSIDE),
    "local_slice",
    dialect="spmd",
)


def _collective(kind: str, along: str = "") -> Callable[[RuleFunction], RuleFunction]:
    """Decorator: describes a collective by the function of its rule."""
    name = f"stablehlo.{kind}"
    return op(name, is_same_locally=True, is_manual=True, collective=kind, along=along)


@op(*DEVICE_IDS, is_same_locally=True, is_manual=True)
def _device_id(kind: OpKind) -> Rule:
    return RuleBuilder().build([], [[]])


@_collective("all_reduce")
def _all_reduce(kind: OpKind) -> Rule:
    """`i j -> i j`."""
    return _along(kind, (), sums=True)


@_collective("collective_permute")
def _collective_permute(kind: OpKind) -> Rule:
    """`i j -> i j`; a device that receives nothing has zeros, which only sums ignore."""
    return _along(kind, ())


@_collective("collective_broadcast")
def _collective_broadcast(kind: OpKind) -> Rule:
    """`i j -> i j`."""
    return _along(kind, (), moves=True)


@_collective("all_gather", along="all_gather_dim")
def _all_gather(kind: OpKind) -> Rule:
    """`n j -> m j`, with the gathered dim whole."""
    return _along(kind, (kind.attrs["all_gather_dim"],), moves=True)


@_collective("reduce_scatter", along="scatter_dimension")
def _reduce_scatter(kind: OpKind) -> Rule:
    """`n j -> m j`, with the scattered dim whole."""
    return _along(kind, (kind.attrs["scatter_dimension"],), sums=True)


@_collective("all_to_all")
def _all_to_all(kind: OpKind) -> Rule:
    """`n p j -> m q j`, with both dims whole."""
    dims = (kind.attrs["split_dimension"], kind.attrs["concat_dimension"])
    return _along(kind, dims, moves=True)


def _along(
    kind: OpKind, whole: tuple[int, ...], *, sums: bool = False, moves: bool = False
) -> Rule:
    """The rule of a collective of one operand: some dims stay whole, the others pass.

    Args:
      kind: the collective.
      whole: dims whose size or content it changes along the devices.
      sums: whether it reduces; it is then linear only if it adds.
      moves: whether it only moves elements.
    """
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


COLLECTIVES = tuple(sorted(name for name, about in DESCRIPTIONS.items() if about.collective))
"""Names of all collectives; they carry the atoms that they run over as `axes`."""
