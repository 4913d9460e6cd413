"""Imports ops that become other ops: calls, composites, tuples, manual regions, collectives, marks.

Each handler appends the ops that an op becomes, if any, and enters the op's results into `env`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.errors import FrontendError, UnsupportedOpError
from spmd.frontend.importer.contents import (
    NO_AXES,
    Contents,
    Scope,
    Stated,
    composite_attribute,
    entries_of,
    items_of,
    mesh_of,
    refs_of,
    shardings_of,
)
from spmd.frontend.importer.ops import LEGALIZED, Attrs, Env, Handler, Importer, refusal, refuse
from spmd.ir.description import DESCRIPTIONS, FROM_MANUAL
from spmd.ir.dialect.callbacks import CALLBACK, FLAG, INSPECT
from spmd.ir.dialect.collectives import RESIZED
from spmd.ir.dialect.manual import MANUAL, TO_MANUAL
from spmd.ir.pipelines import SHIFT
from spmd.ir.program import Loc, Value, has_effect
from spmd.ir.types import Attribute, ShardingAttr
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, part_atoms

_ELEMENTWISE = (name for name, about in DESCRIPTIONS.items() if about.is_elementwise)
CHLO_COMPOSITES = {"chlo.top_k", *(name for name in _ELEMENTWISE if name.startswith("chlo."))}
"""CHLO ops that exported modules have as composites of the same name; they stay one op."""

SAME = (
    "sdy.all_gather", "sdy.all_reduce", "sdy.all_slice", "sdy.all_to_all",
    "sdy.collective_permute", "sdy.data_flow_edge", "sdy.func_data_flow_edge",
    "sdy.propagation_barrier", "sdy.reduce_scatter", "sdy.replicated_to_unreduced", "sdy.reshard",
    "sdy.sharded_to_unreduced", "sdy.sharding_constraint",
)  # fmt: skip
"""Shardy ops whose result is their operand, mostly in another sharding; they become marks."""

Marks = Sequence[ShardingAttr | None]

# Calls, composites, tuples, and custom calls that name a function.


def _composite(importer: Importer, op: Any, env: Env) -> None:
    name = op.attributes["name"].value
    has_own = "composite_attributes" in op.attributes
    own = items_of(op.attributes["composite_attributes"]) if has_own else {}
    if name in CHLO_COMPOSITES:
        attrs = {n: importer.attribute(n, attr) for n, attr in own.items()}
        importer.op(op, env, name, attrs)
    elif name in importer.composites:
        attrs = {f"with.{n}": composite_attribute(attr) for n, attr in own.items()}
        attrs = {"name": name, **importer.composites[name], **attrs}
        importer.op(op, env, attrs=attrs)
    else:
        _inline(importer, op, env, "decomposition")


def _any_custom_call(importer: Importer, op: Any, env: Env) -> None:
    target = op.attributes["call_target_name"].value
    if target in (CALLBACK, INSPECT):
        _callback(importer, op, env, target)
    elif target in ("Sharding", "xla.sdy.FuncResultSharding"):  # their attributes mark it
        env[op.results[0]] = env[op.operands[0]]
    else:
        attrs: dict[str, Attribute] | None = None
        names = [attr.value for attr in op.attributes.get("called_computations", ())]
        function = importer.contents.functions.get(names[0]) if len(names) == 1 else None
        if function is not None:  # a scalar function, which becomes the op's `body`
            attrs = {n: importer.attribute(n, attr) for n, attr in entries_of(op)}
            del attrs["called_computations"]
            attrs["body"] = importer.body(function.regions[0], op.name)
        importer.op(op, env, attrs=attrs)


def _tuple(importer: Importer, op: Any, env: Env) -> None:
    # A tuple never becomes a value: it is remembered as the values that it was made of.
    #   %3 = tuple %1, %2; %4 = get_tuple_element %3[1]      %4 is %2, and no op is appended
    try:
        if op.name == "stablehlo.tuple":
            importer.tuples[op.results[0]] = tuple([env[v] for v in op.operands])
        else:
            env[op.results[0]] = importer.tuples[op.operands[0]][op.attributes["index"].value]
    except KeyError as error:  # of an argument, of a tuple inside a tuple
        raise FrontendError(
            f"{op.name} of tuples that the module does not make itself",
            source=importer.loc(op.location).source,
            fix="pass the elements one by one, without nesting",
        ) from error


def _inline(importer: Importer, op: Any, env: Env, stated: str = "callee") -> None:
    """Appends the ops of the function that the attribute `stated` names, in place of the call."""
    # before: func @f(%a) { %b = tanh %a; return %b }   and   %5 = call @f(%4); %6 = call @f(%5)
    # after:  %5 = tanh %4; %6 = tanh %5
    # The body is imported anew for each call: two calls may get different shardings, and their ops
    # carry the line of their own call.
    function = importer.contents.functions[op.attributes[stated].value]
    outer = importer.call_loc
    importer.call_loc = importer.loc(op.location)
    ends = [importer.contents.boundary_marks(function, side) for side in ("argument", "result")]
    _written_out(importer, op, env, function, ends, importer.call_loc)
    importer.call_loc = outer


def _written_out(
    importer: Importer, op: Any, env: Env, function: Any, ends: Sequence[Marks], loc: Loc
) -> None:
    """Appends `function`'s ops in place of `op`; `ends` are marks of its operands and results."""
    block = function.regions[0].blocks[0]

    def marked(values: Sequence[Value], marks: Marks) -> list[Value]:
        return [importer.mark(v, mark, loc) for v, mark in zip(values, marks, strict=True)]

    entered = marked([env[v] for v in op.operands], ends[0])
    returned = importer.block(block, dict(zip(block.arguments, entered, strict=True)))
    env.update(zip(op.results, marked(returned, ends[1]), strict=True))


def _callback(importer: Importer, op: Any, env: Env, target: str) -> None:
    loc = importer.loc(op.location)
    stated = dict(entries_of(op))
    names = ("number", "called", "ordered", "partitioned")
    attrs = {n: importer.attribute(n, stated[n]) for n in names if n in stated}
    if not 0 <= int(attrs.get("number", -1)) < importer.callbacks:
        refuse(f"custom_call:{target}", loc)
    if target == INSPECT:
        (value,) = map(env.__getitem__, op.operands)
        importer.add(INSPECT, value, importer.b.types[value], {"number": attrs["number"]}, loc)
        return
    attrs["held"] = importer.scopes[-1].held if importer.scopes else ()
    importer.b.loc, types = loc, [importer.type(result.type) for result in op.results]
    results = importer.b.op(CALLBACK, [env[v] for v in op.operands], types, attrs)
    env.update(zip(op.results, results, strict=True))


# Manual regions. A region without operands may read any value around it, as those of control flow
# do. Its boundary becomes ops inside, with rules like any other:
#
#   before: %2 = manual_computation(%1) in=[{x}] out=[{x}] { (%a): %b = tanh %a; return %b }
#   after:  %2 = spmd.manual { %3 = to_manual %1 {x}; %4 = tanh %3; %5 = from_manual %4 {x}
#                              return %5 }


def _manual(importer: Importer, op: Any, env: Env) -> None:
    loc, contents = importer.loc(op.location), importer.contents
    block = op.regions[0].blocks[0]
    sides = ("in_shardings", block.arguments), ("out_shardings", op.results)
    ins, outs = (
        [
            _whole(contents.stated(attr, rank := importer.type(value.type).rank), rank, loc)
            for attr, value in zip(shardings_of(op.attributes[name]), values, strict=True)
        ]
        for name, values in sides
    )
    manual = sdy.ManualAxesAttr(op.attributes["manual_axes"])
    names = [manual[i] for i in range(len(manual))]
    outer = importer.scopes[-1] if importer.scopes else None
    own = next((stated.mesh for stated in (*ins, *outs) if any(stated.dims)), None)
    if own is None:  # nothing is split: the manual axes tell the mesh
        wanted = set(names)
        known = [outer.own] if outer else []
        known += [mesh for mesh in contents.meshes.values() if mesh] + [NO_AXES]
        if None in contents.meshes.values():  # along the axes of a single device
            known.append(Mesh(None, (1,) * len(wanted), sorted(wanted)))
        own = next((mesh for mesh in known if wanted <= set(mesh.axis_names)), None)
        if own is None:
            raise FrontendError(f"the module has no mesh with the axes {', '.join(sorted(wanted))}")
    axes = tuple(sorted(contents.atoms(own, [(name, 1, 0) for name in names])))
    scope = Scope(contents.mesh, own, axes, (outer.held if outer else ()) + axes)

    def end(name: str, value: Value, stated: Stated, made: Any) -> Value:
        """Appends `to_manual` or `from_manual` (`name`), on its inner side a mark by free axes."""
        dims = tuple(
            contents.atoms(stated.mesh, [ref for ref in refs if ref[0] in names])
            for refs in stated.dims
        )
        free = tuple(tuple(r for r in refs if r[0] not in names) for refs in stated.dims)
        mark = None if scope.is_whole else contents.written(stated._replace(dims=free))
        if name == FROM_MANUAL:
            value = importer.mark(value, mark, loc)
        attrs: Attrs = {"axes": scope.held, "dims": dims}
        value = importer.add(name, value, importer.type(made.type), attrs, loc)
        return importer.mark(value, mark, loc) if name == TO_MANUAL else value

    b, inner = importer.b, dict[Any, Value]()
    b.begin()
    for argument, operand, stated in zip(block.arguments, op.operands, ins, strict=True):
        inner[argument] = end(TO_MANUAL, env[operand], stated, argument)
    importer.scopes.append(scope)
    results = importer.block(block, inner)
    importer.scopes.pop()
    returned = [
        end(FROM_MANUAL, value, stated, result)
        for result, value, stated in zip(op.results, results, outs, strict=True)
    ]
    if not returned:  # ops go by their results: it gets one
        b.append(flag := importer.flag(loc))
        attrs = {"axes": scope.held, "dims": ()}
        returned.append(importer.add(FROM_MANUAL, flag.results[0], FLAG, attrs, loc))
    region = b.end((), returned)
    if not op.results and not any(map(has_effect, region.ops)):
        return
    b.loc, types = loc, [b.types[v] for v in returned]
    made = b.op(MANUAL, (), types, {"axes": scope.axes}, (region,))
    env.update(zip(op.results, made, strict=False))


def _whole(stated: Stated | None, rank: int, loc: Loc) -> Stated:
    """Returns `stated`, or for None an unsplit sharding; UnsupportedOpError if it is partial."""
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


# Collectives in manual regions. Devices are positions in the mesh, flattened row-major: jax numbers
# them so in replica groups, in pairs of a permute and in `partition_id`, whatever ids they have in
# hardware.

BY_USER = "written by the user in shard_map"
BY_PIPELINE = "stages send what they made to the next ones"
"""Texts in reports that say where collectives in manual regions come from."""

Groups = tuple[tuple[int, ...], ...]
"""Groups of devices (positions in the mesh) that exchange data, in the order of their pieces."""

_DIMS = ("all_gather_dim", "concat_dimension", "scatter_dimension", "split_dimension")
_WITH_REPLICAS = ("stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.reduce_scatter")
"""Collectives whose groups number replicas, unless `use_global_device_ids` is set."""


def _collective(importer: Importer, op: Any, env: Env) -> None:
    # A variadic collective, as jax writes for `psum` of a tree, becomes one op for each operand:
    # rules and rewrites know only these, and `combine` joins small ones again.
    loc = importer.loc(op.location)
    scope = importer.scopes[-1] if importer.scopes else None
    attrs = _exchange(op, scope, importer.contents, loc)
    if attrs is None:
        env.update((r, env[v]) for r, v in zip(op.results, op.operands, strict=True))
        return
    if len(op.regions):
        attrs |= importer.bodies(op)
    loc = loc._replace(note=BY_PIPELINE if SHIFT in loc.scope else BY_USER)
    for result, value in zip(op.results, op.operands, strict=True):
        env[result] = importer.add(op.name, env[value], importer.type(result.type), attrs, loc)


def _exchange(
    op: Any, scope: Scope | None, contents: Contents, loc: Loc
) -> dict[str, Attribute] | None:
    """Returns the attributes of a collective in a manual region, its body left out.

    `axes` are the atoms over which it runs. A permute also has `pairs`; others have their dims, and
    `groups` if these are not the mesh's groups along `axes`. None if each device exchanges only
    with itself. UnsupportedOpError: any other collective outside a manual region, axes that are not
    manual, or groups that are not supported.
    """
    attrs = op.attributes
    everyone = tuple(range(scope.mesh.size if scope else contents.partitions))
    has_channel = "channel_handle" in attrs
    channel = hlo.ChannelHandle(attrs["channel_handle"]).handle if has_channel else 0
    permutes = op.name == "stablehlo.collective_permute"
    groups: Groups
    if permutes:
        groups = tuple(map(tuple, np.asarray(attrs["source_target_pairs"]).tolist()))
    else:
        groups = _groups(attrs["replica_groups"], contents) or (everyone,)
        of_replicas = op.name in _WITH_REPLICAS and "use_global_device_ids" not in attrs
        if of_replicas and channel and groups == ((0,),):
            groups = (everyone,)
    alone = [(i, i) for i in everyone]
    if sorted(groups) == alone if permutes else all(len(group) == 1 for group in groups):
        return None
    if scope is None:
        refuse(op.name, loc)
        raise AssertionError(op.name)
    mesh = scope.mesh
    crossed = tuple(  # the atoms along which members of a group differ
        a
        for a in range(len(mesh.atoms))
        if any(len({mesh.coordinate(p, [a]) for p in group}) > 1 for group in groups)
    )
    problem = fix = ""
    if not channel:
        problem, fix = "it exchanges between replicas of the program", "give it a channel handle"
    elif not groups or not {p for group in groups for p in group} <= set(range(mesh.size)):
        problem, fix = f"its devices are not among the {mesh.size} of the mesh", "correct it"
    elif len({len(group) for group in groups}) > 1:
        problem, fix = "its groups differ in size", "use groups of one size"
    elif not set(crossed) <= set(scope.held):
        names = [n for n, a in mesh.axis_atoms.items() if set(a) <= set(scope.held)]
        problem = f"it runs over axes that are not manual here (manual are: {', '.join(names)})"
        fix = "name these axes in the axis_names of shard_map"
    if problem:
        raise refusal(op.name, problem, fix, loc)
    if permutes:
        return {"axes": crossed or scope.axes, "pairs": groups}
    dims = {name: attrs[name].value for name in _DIMS if name in attrs}
    axes = _axes_of_groups(groups, crossed, mesh)
    return {**dims, "axes": crossed, "groups": groups} if axes is None else {**dims, "axes": axes}


def _groups(stated: Any, contents: Contents) -> Groups:
    """Returns a collective's device groups, which a module lists or states as axes of a mesh."""
    if not hlo.ReplicaGroupMeshAxesAttr.isinstance(stated):
        return tuple(tuple(p for p in row if p >= 0) for row in np.asarray(stated).tolist())
    over = hlo.ReplicaGroupMeshAxesAttr(stated)
    named: Any = over.mesh
    is_named = isinstance(named, ir.FlatSymbolRefAttr)
    mesh = contents.meshes[named.value] if is_named else mesh_of(named, hlo)
    if mesh is None:
        return ((0,),)
    refs = refs_of(ir.ArrayAttr(over.axes), hlo)
    groups = mesh.groups([a for ref in refs for a in part_atoms(mesh, mesh, *ref)])
    return tuple(tuple(mesh.device_ids[p] for p in group) for group in groups)


def _axes_of_groups(groups: Groups, crossed: Axes, mesh: Mesh) -> Axes | None:
    """Returns the atoms `crossed`, ordered so that `mesh.groups` of them is `groups`; or None."""

    # The first group tells which atoms vary, and in which order: the major one changes last. On
    # (data=2, model=2), whose devices are 0 1 | 2 3:
    #   (0, 2, 1, 3)   data differs from member 1 on, model from member 2 on: (model, data)
    #   (0, 3)         both differ at once, but groups of both have four members: None
    # The test at the end decides; before it this is a guess.
    def place(atom: int) -> int:
        first = [mesh.coordinate(position, [atom]) for position in groups[0]]
        return next((i for i, coordinate in enumerate(first) if coordinate != first[0]), 0)

    axes = tuple(sorted(crossed, key=lambda atom: -place(atom)))
    return axes if set(mesh.groups(axes)) == set(groups) else None


# Shardy's other ops: marks and named computations.


def _marks(importer: Importer, op: Any, env: Env) -> None:
    """Imports a Shardy op that only reshards as a mark, or without a sharding as its operand."""
    # Whatever such an op exchanges, the value is the same. It is a mark, and what is sent for it is
    # planned as for any other.
    value, loc = env[op.operands[0]], importer.loc(op.location)
    name = next((name for name in ("sharding", "out_sharding") if name in op.attributes), None)
    rank = importer.b.types[value].rank
    stated = importer.contents.mark(op.attributes[name], rank) if name else None
    marked = importer.mark(value, stated, loc)
    env[op.results[0]] = marked
    if next(iter(op.results[0].uses), None) is None:  # of a constraint, which speaks of its operand
        env[op.operands[0]] = marked


def _named(importer: Importer, op: Any, env: Env) -> None:
    """Imports the ops in an `sdy.named_computation`, with marks by its in and out shardings."""

    def marks(name: str, values: Sequence[Any]) -> Marks:
        if name not in op.attributes:
            return [None] * len(values)
        pairs = zip(shardings_of(op.attributes[name]), values, strict=True)
        return [importer.contents.mark(attr, importer.type(v.type).rank) for attr, v in pairs]

    ends = marks("in_shardings", op.operands), marks("out_shardings", op.results)
    _written_out(importer, op, env, op, ends, importer.loc(op.location))


HANDLERS: Mapping[str, Handler] = MappingProxyType(
    {
        "func.call": _inline,
        "stablehlo.composite": _composite,
        "stablehlo.custom_call": _any_custom_call,
        "stablehlo.get_tuple_element": _tuple,
        "stablehlo.tuple": _tuple,
        **LEGALIZED,
        **{f"stablehlo.{kind}": _collective for kind in RESIZED},
        "sdy.manual_computation": _manual,
        **dict.fromkeys(SAME, _marks),
        "sdy.constant": lambda importer, op, env: importer.op(op, env, "stablehlo.constant"),
        "sdy.named_computation": _named,
        # It has no results, and only guides Shardy's own propagation.
        "sdy.sharding_group": lambda *_: None,
    }
)
