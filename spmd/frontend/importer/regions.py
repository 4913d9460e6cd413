"""Manual regions, their collectives, and Shardy's other ops: marks and named computations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spmd.errors import UnsupportedOpError
from spmd.frontend.importer.attributes import exchange_of
from spmd.frontend.importer.manual import BY_PIPELINE, BY_USER, Scope, collective
from spmd.frontend.importer.ops import Env, Handler, Importer, keep
from spmd.frontend.importer.shardings import NO_AXES, Stated, manual_axes, shardings_of
from spmd.ir.description import FROM_MANUAL
from spmd.ir.dialect.callbacks import FLAG
from spmd.ir.dialect.collectives import COLLECTIVES
from spmd.ir.dialect.manual import MANUAL, TO_MANUAL
from spmd.ir.pipelines import SHIFT
from spmd.ir.program import Loc, Op, OpKind, Region, Value, has_effect
from spmd.ir.types import Attribute, ShardingAttr

SAME = (
    "sdy.all_gather", "sdy.all_reduce", "sdy.all_slice", "sdy.all_to_all",
    "sdy.collective_permute", "sdy.data_flow_edge", "sdy.func_data_flow_edge",
    "sdy.propagation_barrier", "sdy.reduce_scatter", "sdy.replicated_to_unreduced", "sdy.reshard",
    "sdy.sharded_to_unreduced", "sdy.sharding_constraint",
)  # fmt: skip
"""Ops of Shardy that return their operand, mostly in another sharding."""


def _manual(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """`sdy.manual_computation`: operands and results cross the boundary by ops in the region."""
    # before: %2 = manual_computation(%1) in=[{x}] out=[{x}] { (%a): %b = tanh %a; return %b }
    # after:  %2 = spmd.manual { %3 = to_manual %1 {x}; %4 = tanh %3; %5 = from_manual %4 {x}
    #                            return %5 }
    # A region without operands may read any value around it, as those of control flow do, and the
    # boundary becomes ops with rules like any other. What a boundary sharding says of axes that are
    # not manual is a mark inside, between the boundary op and what is in the region.
    loc, block = importer.loc(op.location), op.regions[0].blocks[0]
    ins, outs = (
        [
            _whole(importer.contents.meshes.stated(attr, rank), rank, loc)
            for attr, rank in zip(shardings_of(op.attributes[name]), ranks, strict=True)
        ]
        for name, ranks in (
            ("in_shardings", [importer.type(arg.type).rank for arg in block.arguments]),
            ("out_shardings", [importer.type(result.type).rank for result in op.results]),
        )
    )
    scope = _scope(importer, manual_axes(op.attributes["manual_axes"]), [*ins, *outs])
    inside: list[Op] = []
    inner: Env = {}
    for arg, value, stated in zip(block.arguments, op.operands, ins, strict=True):
        attrs, rest = _crossing(importer, scope, stated)
        type_ = importer.type(arg.type)
        entered = importer.add(inside, TO_MANUAL, env[value], type_, attrs, loc)
        inner[arg] = importer.mark(inside, entered, rest, loc)
    importer.scopes.append(scope)
    body, results = importer.block(block, inner)
    importer.scopes.pop()
    inside += body
    returned = []
    for result, value, stated in zip(op.results, results, outs, strict=True):
        attrs, rest = _crossing(importer, scope, stated)
        marked = importer.mark(inside, value, rest, loc)
        type_ = importer.type(result.type)
        returned.append(importer.add(inside, FROM_MANUAL, marked, type_, attrs, loc))
    found = tuple([importer.bind(env, result) for result in op.results])
    if not found and any(map(has_effect, inside)):  # ops go by their results: it gets one
        inside.append(flag := importer.flag(loc))
        attrs = {"axes": scope.held, "dims": ()}
        returned.append(importer.add(inside, FROM_MANUAL, flag.results[0], FLAG, attrs, loc))
        found = (importer.value(FLAG),)
    types = tuple([importer.types[value] for value in found])
    kind = OpKind(MANUAL, (), types, {"axes": scope.axes})
    keep(Op(kind, (), found, (Region((), tuple(inside), tuple(returned)),), loc), ops)


def _scope(importer: Importer, names: Sequence[str], ends: Sequence[Stated]) -> Scope:
    """The scope of a region whose manual axes are named, with the shardings at its boundary."""
    meshes = importer.contents.meshes
    outer = importer.scopes[-1] if importer.scopes else None
    own = next((stated.mesh for stated in ends if any(stated.dims)), None)
    if own is None:  # nothing is split: the manual axes tell the mesh
        around = outer.own if outer and set(names) <= set(outer.own.axis_names) else None
        own = around or meshes.with_axes(names)
    axes = tuple(sorted(meshes.atoms(own, [(name, 1, 0) for name in names])))
    return Scope(meshes.mesh, own, tuple(names), axes, (outer.held if outer else ()) + axes)


def _crossing(
    importer: Importer, scope: Scope, stated: Stated
) -> tuple[dict[str, Attribute], ShardingAttr | None]:
    """The attributes of a boundary op, and what is a mark inside."""
    meshes = importer.contents.meshes
    manual, free = scope.split(stated.dims)
    dims = tuple(meshes.atoms(stated.mesh, refs) for refs in manual)
    rest = None if scope.is_whole else meshes.written(stated._replace(dims=free))
    return {"axes": scope.held, "dims": dims}, rest


def _whole(stated: Stated | None, rank: int, loc: Loc) -> Stated:
    """A sharding at the boundary of a region, where every device has a piece of the whole value."""
    if stated is None:
        return Stated(NO_AXES, ((),) * rank, (True,) * rank)
    if stated.unreduced:
        raise UnsupportedOpError(
            "a value crosses the boundary of a manual region as terms that are not added up: "
            f"it is unreduced over {', '.join(name for name, _, _ in stated.unreduced)}",
            source=loc.source,
            fix="add it up inside the region (jax.lax.psum), and leave `unreduced` out of its spec",
        )
    return stated


def _collective(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """A collective of a manual region: one op for each of its operands."""
    # A variadic collective, as jax writes for `psum` of a tree, becomes one op for each operand:
    # rules and rewrites know only these, and `combine` joins small ones again.
    loc = importer.loc(op.location)
    scope = importer.scopes[-1] if importer.scopes else None
    meshes = importer.contents.meshes
    attrs = collective(exchange_of(op), scope, meshes.named, loc, meshes.partitions)
    if attrs is None:
        env.update((r, env[v]) for r, v in zip(op.results, op.operands, strict=True))
        return
    if len(op.regions):
        attrs |= importer.bodies(op)
    loc = loc._replace(note=BY_PIPELINE if SHIFT in loc.scope else BY_USER)
    for result, value in zip(op.results, op.operands, strict=True):
        type_ = importer.type(result.type)
        env[result] = importer.add(ops, op.name, env[value], type_, attrs, loc)


def _marks(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """An op that returns its operand, in the sharding that it states if any."""
    # Whatever such an op exchanges, the value is the same. It is a mark, and what is sent for it is
    # planned as for any other.
    value, loc = env[op.operands[0]], importer.loc(op.location)
    name = next((name for name in ("sharding", "out_sharding") if name in op.attributes), None)
    rank = importer.types[value].rank
    stated = importer.contents.meshes.mark(op.attributes[name], rank) if name else None
    marked = importer.mark(ops, value, stated, loc)
    env[op.results[0]] = marked
    if next(iter(op.results[0].uses), None) is None:  # of a constraint, which speaks of its operand
        env[op.operands[0]] = marked


def _named(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """`sdy.named_computation` is what is inside, between the marks that it states."""
    block = op.regions[0].blocks[0]
    entered = _all_marked(importer, ops, [env[v] for v in op.operands], op, "in_shardings")
    body, results = importer.block(block, dict(zip(block.arguments, entered, strict=True)))
    ops += body
    left = _all_marked(importer, ops, results, op, "out_shardings")
    env.update(zip(op.results, left, strict=True))


def _all_marked(
    importer: Importer, ops: list[Op], values: Sequence[Value], op: Any, name: str
) -> Sequence[Value]:
    """Values marked as an attribute of a named computation says, if it has that."""
    if name not in op.attributes:
        return values
    found = []
    for value, attr in zip(values, shardings_of(op.attributes[name]), strict=True):
        mark = importer.contents.meshes.mark(attr, importer.types[value].rank)
        found.append(importer.mark(ops, value, mark, importer.loc(op.location)))
    return found


def _constant(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    ops.append(importer.op(op, env, "stablehlo.constant"))


def _nothing(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """An op without results that only guides Shardy's own propagation."""


REGION_HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        **dict.fromkeys(COLLECTIVES, _collective),
        "sdy.manual_computation": _manual,
        **dict.fromkeys(SAME, _marks),
        "sdy.constant": _constant,
        "sdy.named_computation": _named,
        "sdy.sharding_group": _nothing,
    }
)
