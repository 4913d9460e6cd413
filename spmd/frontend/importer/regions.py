"""Manual regions, their collectives, and Shardy's other ops: marks and named computations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from spmd.frontend.importer.attributes import (
    exchange_of,
    manual_axes,
    sharding_attr,
    shardings_of,
)
from spmd.frontend.importer.manual import (
    BY_USER,
    collective,
    says_nothing,
    scope_of,
)
from spmd.frontend.importer.ops import Env, Handler, Importer, keep
from spmd.ir.dialect.callbacks import FLAG
from spmd.ir.dialect.collectives import COLLECTIVES
from spmd.ir.dialect.manual import FROM_MANUAL, MANUAL, TO_MANUAL
from spmd.ir.program import Loc, Op, OpKind, Region, Value, has_effect
from spmd.ir.types import ShardingAttr
from spmd.mesh.mesh import Mesh


def _manual(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """`sdy.manual_computation`: operands and results cross the boundary by ops in the region."""
    # before: %2 = manual_computation(%1) in=[{x}] out=[{x}] { (%a): %b = tanh %a; return %b }
    # after:  %2 = spmd.manual { %3 = to_manual %1 {x}; %4 = tanh %3; %5 = from_manual %4 {x}
    #                            return %5 }
    # A region without operands may read any value around it, as those of control flow do, and the
    # boundary becomes ops with rules like any other. What a boundary sharding says of axes that are
    # not manual is a mark inside, between the boundary op and what is in the region.
    ins, outs = (shardings_of(op.attributes[n]) for n in ("in_shardings", "out_shardings"))
    outer = importer.scopes[-1] if importer.scopes else None
    mesh = importer.contents.mesh_of([*ins, *outs])
    mesh = mesh or (outer.mesh if outer else Mesh(None, (), ()))
    scope = scope_of(manual_axes(op.attributes["manual_axes"]), mesh, outer)
    loc, block = importer.loc(op.location), op.regions[0].blocks[0]
    inside: list[Op] = []
    inner: Env = {}
    for arg, value, attr in zip(block.arguments, op.operands, ins, strict=True):
        fixed, rest = scope.split(sharding_attr(attr))
        attrs = {"axes": scope.held, "dims": fixed}
        type_ = importer.type(arg.type)
        inner[arg] = importer.add(inside, TO_MANUAL, env[value], type_, attrs, loc)
        if rest is not None:
            inner[arg] = _mark(importer, inside, inner[arg], rest, loc)
    importer.scopes.append(scope)
    body, results = importer.block(block, inner)
    importer.scopes.pop()
    inside += body
    returned = []
    for result, value, attr in zip(op.results, results, outs, strict=True):
        fixed, rest = scope.split(sharding_attr(attr))
        marked = value if rest is None else _mark(importer, inside, value, rest, loc)
        attrs = {"axes": scope.held, "dims": fixed}
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


def _collective(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """A collective of a manual region: one op for each of its operands."""
    # A variadic collective, as jax writes for `psum` of a tree, becomes one op for each operand:
    # rules and rewrites know only these, and `combine` joins small ones again.
    loc = importer.loc(op.location)
    scope = importer.scopes[-1] if importer.scopes else None
    meshes, partitions = importer.contents.all_meshes(), importer.contents.partitions
    attrs = collective(exchange_of(op), scope, meshes, loc, partitions)
    if attrs is None:
        env.update((r, env[v]) for r, v in zip(op.results, op.operands, strict=True))
        return
    if len(op.regions):
        attrs |= importer.bodies(op)
    loc = loc._replace(note=BY_USER)
    for result, value in zip(op.results, op.operands, strict=True):
        type_ = importer.type(result.type)
        env[result] = importer.add(ops, op.name, env[value], type_, attrs, loc)


def _constraint(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """A mark; inside partly manual regions jax also writes marks that say nothing."""
    attr = op.attributes["sharding"]
    if (importer.in_bodies or importer.scopes) and says_nothing(sharding_attr(attr)):
        env[op.results[0]] = env[op.operands[0]]
        return
    importer.contents.note_mesh(attr)
    ops.append(importer.op(op, env, "spmd.mark"))


def _named(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """`sdy.named_computation` is what is inside, between the marks that it states."""
    loc, block = importer.loc(op.location), op.regions[0].blocks[0]
    inner = {
        arg: _mark_stated(importer, ops, env[value], op, "in_shardings", i, loc)
        for i, (arg, value) in enumerate(zip(block.arguments, op.operands, strict=True))
    }
    body, results = importer.block(block, inner)
    ops += body
    for i, (result, value) in enumerate(zip(op.results, results, strict=True)):
        env[result] = _mark_stated(importer, ops, value, op, "out_shardings", i, loc)


def _mark_stated(
    importer: Importer, ops: list[Op], value: Value, op: Any, name: str, index: int, loc: Loc
) -> Value:
    if name not in op.attributes:
        return value
    attr = shardings_of(op.attributes[name])[index]
    sharding = sharding_attr(attr)
    if says_nothing(sharding):
        return value
    importer.contents.note_mesh(attr)
    return _mark(importer, ops, value, sharding, loc)


def _mark(
    importer: Importer, ops: list[Op], value: Value, sharding: ShardingAttr, loc: Loc
) -> Value:
    attrs = {"sharding": sharding}
    return importer.add(ops, "spmd.mark", value, importer.types[value], attrs, loc)


REGION_HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        **dict.fromkeys(COLLECTIVES, _collective),
        "sdy.manual_computation": _manual,
        "sdy.named_computation": _named,
        "sdy.sharding_constraint": _constraint,
    }
)
