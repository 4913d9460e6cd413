"""Manual regions as jax writes them for GSPMD: a call between custom calls that change shapes.

    %1 = custom_call @Sharding(%0) {whole}            the value, split over the manual axes
    %2 = custom_call @SPMDFullToShardShape(%1)        one device's piece
    %3 = call @shmap_body(%2)                         what is written for one device
    %4 = custom_call @Sharding(%3) {manual}
    %5 = custom_call @SPMDShardToFullShape(%4) {whole}

The call becomes the region; the custom calls are its boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spmd.frontend.importer.attributes import defining_op
from spmd.frontend.importer.manual import Scope
from spmd.frontend.importer.ops import Env, Importer, keep
from spmd.frontend.importer.shardings import MARKS, manual_refs, shardings_of
from spmd.frontend.importer.unsupported import refuse
from spmd.ir.description import FROM_MANUAL
from spmd.ir.dialect.manual import MANUAL, TO_MANUAL
from spmd.ir.program import Loc, Op, OpKind, Region
from spmd.mesh.sharding import Axes

ENTERS, LEAVES = "SPMDFullToShardShape", "SPMDShardToFullShape"

Inline = Callable[[Importer, Any, Env, list[Op]], None]  # imports what a call calls


class _Crossing(NamedTuple):
    """One value at the boundary of a region: inside, as the module has it, and outside.

    `manual` is the op that states the manual axes, `whole` the one that says how the outer is
    split.
    """

    inner: Any
    outer: Any
    manual: Any
    whole: Any


def is_manual_call(op: Any) -> bool:
    """Whether a call is a region that is written for one device."""
    is_call = op.name == "func.call" and len(op.operands) + len(op.results) > 0
    return is_call and all(map(_entry, op.operands)) and all(map(_exit, op.results))


def cross(importer: Importer, op: Any, env: Env) -> None:
    """Imports a custom call at the boundary of a region: values cross it with the region itself."""
    target = op.attributes["call_target_name"].value
    if target == ENTERS:
        calls = [use.owner for use in op.results[0].uses]
    else:
        manual = _custom_call(defining_op(op.operands[0]), "Sharding")
        calls = [defining_op(manual.operands[0])] if manual else []
    if not calls or not all(call is not None and is_manual_call(call) for call in calls):
        refuse(f"custom_call:{target}", importer.loc(op.location))
    env[op.results[0]] = env[op.operands[0]]


def import_manual_call(
    importer: Importer, op: Any, env: Env, ops: list[Op], inline: Inline
) -> None:
    """Imports a call as a region that is written for one device."""
    loc = importer.loc(op.location)
    entries = list(filter(None, map(_entry, op.operands)))
    exits = list(filter(None, map(_exit, op.results)))
    scope = _scope(importer, (entries + exits)[0])
    inside: list[Op] = []
    inner: Env = {}
    for entry in entries:
        attrs = {"axes": scope.held, "dims": _dims(importer, scope, entry, loc)}
        type_ = importer.type(entry.inner.type)
        inner[entry.inner] = importer.add(inside, TO_MANUAL, env[entry.outer], type_, attrs, loc)
    importer.scopes.append(scope)
    inline(importer, op, inner, inside)
    importer.scopes.pop()
    found, returned = [], []
    for end in exits:
        attrs = {"axes": scope.held, "dims": _dims(importer, scope, end, loc)}
        type_ = importer.type(end.outer.type)
        left = importer.add(inside, FROM_MANUAL, inner[end.inner], type_, attrs, loc)
        returned.append(left)
        env[end.inner] = importer.bind(env, end.outer)
        found.append(env[end.inner])
    types = tuple([importer.types[value] for value in found])
    kind = OpKind(MANUAL, (), types, {"axes": scope.axes})
    keep(Op(kind, (), tuple(found), (Region((), tuple(inside), tuple(returned)),), loc), ops)


def _entry(value: Any) -> _Crossing | None:
    """How an operand of a call comes into its region, if it does."""
    enters = _custom_call(defining_op(value), ENTERS)
    whole = enters and _custom_call(defining_op(enters.operands[0]), "Sharding")
    return _Crossing(value, enters.operands[0], enters, whole) if whole else None


def _exit(value: Any) -> _Crossing | None:
    """How a result of a call leaves its region, if it does."""
    manual = _custom_call(_only_user(value), "Sharding")
    leaves = manual and _custom_call(_only_user(manual.results[0]), LEAVES)
    return _Crossing(value, leaves.results[0], manual, leaves) if leaves else None


def _custom_call(op: Any, target: str) -> Any:
    """The op, if it is a call of this target that says how its result is split."""
    is_call = op is not None and op.name == "stablehlo.custom_call"
    is_known = is_call and op.attributes["call_target_name"].value == target
    return op if is_known and _GSPMD in op.attributes else None


_GSPMD = MARKS[1]


def _only_user(value: Any) -> Any:
    users = [use.owner for use in value.uses]
    return users[0].operation if len(users) == 1 else None


def _scope(importer: Importer, crossing: _Crossing) -> Scope:
    """The scope of a region, by what one of its boundary ops says is manual."""
    meshes = importer.contents.meshes
    held = importer.scopes[-1].held if importer.scopes else ()
    stated = manual_refs(shardings_of(crossing.manual.attributes[_GSPMD])[0])
    every = range(len(meshes.mesh.atoms)) if stated is None else meshes.atoms(*stated)
    axes = tuple(sorted(a for a in every if a not in held))
    return Scope(meshes.mesh, meshes.mesh, (), axes, held + axes)


def _dims(importer: Importer, scope: Scope, crossing: _Crossing, loc: Loc) -> tuple[Axes, ...]:
    """The manual atoms that split each dim of a value outside."""
    meshes = importer.contents.meshes
    outer, inner = importer.type(crossing.outer.type), importer.type(crossing.inner.type)
    stated = meshes.stated(shardings_of(crossing.whole.attributes[_GSPMD])[0], outer.rank)
    refs = stated.dims if stated else ((),) * outer.rank
    every = [meshes.atoms(stated.mesh, dim) if stated else () for dim in refs]
    dims = tuple(tuple(a for a in atoms if a in scope.axes) for atoms in every)
    pieces = tuple(n * meshes.mesh.extent(a) for n, a in zip(inner.shape, dims, strict=True))
    if pieces != outer.shape:
        refuse(f"custom_call:{ENTERS}", loc)
    return dims
