"""Collectives, and the ops whose result depends on the device that they run on.

A collective that a user wrote is in a manual region and runs over axes that are manual there: the
compiler splits nothing over them. Over the other axes it is an op like any other: a dim that it
gathers, scatters or exchanges stays whole, all others may be split.
"""

from spmd.ir.description import Description, Role
from spmd.ir.dialect.reducers import body_reducer
from spmd.ir.dialect.registry import describe, op
from spmd.ir.dialect.rule import Rule, RuleBuilder, whole
from spmd.ir.program import OpKind

DEVICE_IDS = ("stablehlo.partition_id", "stablehlo.replica_id")
"""Names of the ops that return the number of the device that runs them."""

_LOCAL = Description(is_local=True, role=Role.INSIDE, tells_devices=True)
describe(_LOCAL, "axis_index", dialect="spmd")
describe(_LOCAL._replace(along="dim", reads_pieces=True), "local_slice", dialect="spmd")

op(*DEVICE_IDS, is_same_locally=True, is_manual=True)(whole)

RESIZED = {
    "all_gather": ("all_gather_dim", ""),
    "all_reduce": ("", ""),
    "all_to_all": ("concat_dimension", "split_dimension"),
    "collective_broadcast": ("", ""),
    "collective_permute": ("", ""),
    "reduce_scatter": ("", "scatter_dimension"),
}
"""Maps each kind of collective to its attributes that name the dim that it makes longer, and the
one that it makes shorter; "" for none."""


def _collective(kind: OpKind) -> Rule:
    """Returns the rule `n j -> m j`: the gathered, scattered or exchanged dim may not be split."""
    about = kind.about
    changed = [kind.attrs[name] for name in RESIZED[about.collective] if name]
    build = RuleBuilder()
    before, after = build.pairs(
        kind.operands[0],
        kind.results[0],
        lambda d, n, out: build.apart(n, out) if d in changed else build.passes(n),
    )
    # Of reductions only sums are linear. Devices to which a permute sends nothing have zeros, which
    # only sums ignore: it is linear, but hands no other partial value on.
    body = kind.attrs.get("body")
    linear = body is None or body_reducer(body) == "add"
    moves = body is None and about.collective != "collective_permute"
    return build.build([before], [after], linear=((0,),) if linear else (), moves=moves)


for _kind, (_grows, _shrinks) in RESIZED.items():
    _along = "" if _grows and _shrinks else _grows or _shrinks
    op(f"stablehlo.{_kind}", is_same_locally=True, is_manual=True, collective=_kind, along=_along)(
        _collective
    )
