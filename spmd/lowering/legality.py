"""Checks of a local program and its collectives, as a table of small functions."""

from collections.abc import Callable, Mapping

from spmd.ir.dialect.builder import AXIS_INDEX, LOCAL_SLICE
from spmd.ir.dialect.collectives import RESIZED
from spmd.ir.legality import check_program, fail, hold
from spmd.ir.program import Body, Op, Program
from spmd.ir.types import TensorType, local_type
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import format_sharding
from spmd.reshard.comm import group_size

OpCheck = Callable[[Mesh, Op], str | None]
"""Returns in words what is wrong with an op of a program for the mesh; None if nothing is."""


def check_local(partitioned: Partitioned, stage: str, whole: Program | None = None) -> None:
    """Raises LegalityError, which names the check and the op, if a local program is malformed.

    `stage` selects the checks: `local` (partitioned), `optimized` (rewritten) or `expanded`. If
    the global program `whole` is given, types of arguments and results must be those of its pieces.
    """
    check_program(partitioned.program, stage)
    for op in partitioned.program.walk():
        hold(stage, OP_CHECKS.get(op.collective or op.name, ()), op, partitioned.mesh, op)
    body, mesh = partitioned.program.body, partitioned.mesh
    for what, values, shardings, originals in (
        ("argument", body.args, partitioned.arguments, whole.body.args if whole else None),
        ("result", body.results, partitioned.results, whole.body.results if whole else None),
    ):
        if len(values) != len(shardings):
            fail(stage, "boundary", f"{len(shardings)} shardings for {len(values)} {what}s")
        for i, (value, sharding) in enumerate(zip(values, shardings, strict=True)):
            type_, text = partitioned.program.types[value], format_sharding(sharding, mesh)
            original = whole.types[originals[i]] if whole and originals else None
            problem = ""
            if sharding.rank != type_.rank:
                problem = f"has another rank than {text}"
            elif sharding.partial:  # the boundary is `jax.shard_map`'s, whose specs know none
                problem = f"is {text}: partial"
            elif original and type_ != local_type(original, sharding, mesh):
                problem = f"is not the piece of {original} in {text}"
            if problem:
                fail(stage, "boundary_fits", f"{what} {i}: {type_} {problem}")


# ---------------------------------------------------------------------------------------------
# Checks of one op.


def axes_are_valid(mesh: Mesh, op: Op) -> str | None:
    """Returns a problem unless `axes` are distinct atoms, at least one except for an axis index."""
    axes = op.kind.attrs.get("axes")
    if type(axes) is not tuple or not all(type(a) is int for a in axes):
        return f"axes = {axes!r} is not a tuple of atoms"
    if len(set(axes)) != len(axes) or not all(0 <= a < len(mesh.atoms) for a in axes):
        return f"axes = {axes} repeats an atom or has one that the mesh ({mesh}) lacks"
    return None if axes or op.name == AXIS_INDEX else "axes are empty"


def groups_are_equal(mesh: Mesh, op: Op) -> str | None:
    """Returns a problem unless `groups`, if given, are disjoint sets of devices, of one size."""
    groups = op.kind.attrs.get("groups")
    if groups is None:
        return None
    devices = [p for group in groups for p in group]
    if len({len(group) for group in groups}) != 1 or len(set(devices)) != len(devices):
        return f"groups = {groups} differ in size or overlap"
    return None if set(devices) <= set(range(mesh.size)) else f"groups = {groups} leave the mesh"


def sizes_follow(mesh: Mesh, op: Op) -> str | None:
    """Returns a problem unless result types follow from operand types and devices per group."""
    grows, shrinks = RESIZED.get(op.collective, ("", op.kind.about.along))
    devices, attrs = group_size(op.kind.attrs, mesh), op.kind.attrs
    if len(op.operands) != len(op.results) or not op.operands:
        return "it has not one result for each operand"
    for before, after in zip(op.kind.operands, op.kind.results, strict=True):
        wanted = before
        for name in filter(None, (grows, shrinks)):
            dim = attrs.get(name)
            if type(dim) is not int or not 0 <= dim < before.rank:
                return f"{before} has no dim {dim}"
            if name == grows:
                wanted = wanted.scaled(dim, devices)
            elif wanted.shape[dim] % devices:
                return f"{before} can't be cut into equal pieces"
            else:
                wanted = wanted.scaled(dim, 1, devices)
        if after != wanted:
            return f"{before} becomes {after} instead of {'x'.join(map(str, wanted.shape))}"
    return None


def reduces_pairs(mesh: Mesh, op: Op) -> str | None:
    """Returns a problem unless a reducing collective's body makes one scalar of two, same dtype."""
    body = op.kind.attrs.get("body")
    if not isinstance(body, Body):
        return "no body says how to reduce"
    for type_ in op.kind.operands:
        scalar = TensorType((), type_.dtype)
        taken = tuple(body.types[v] for v in body.region.args)
        given = tuple(body.types[v] for v in body.region.results)
        if taken != (scalar, scalar) or given != (scalar,):
            return f"its body is not a function of two {scalar}"
    return None


def pairs_permute(mesh: Mesh, op: Op) -> str | None:
    """Returns a problem unless `pairs` has sources and targets, all of them devices, each once."""
    pairs = op.kind.attrs.get("pairs", ())
    for what, devices in (("sources", [p[0] for p in pairs]), ("targets", [p[1] for p in pairs])):
        known = bool(devices) and set(devices) <= set(range(mesh.size))
        if not known or len(set(devices)) != len(devices):
            return f"its {what} are not among the {mesh.size} devices, once each"
    return None


def indexes(mesh: Mesh, op: Op) -> str | None:
    """Returns a problem unless an axis index has no operands and one i32 scalar as its result."""
    fits = not op.operands and op.kind.results == (TensorType((), "i32"),)
    return None if fits else "it is not () -> tensor<i32>"


# ---------------------------------------------------------------------------------------------
# The table.

OP_CHECKS: Mapping[str, tuple[OpCheck, ...]] = {
    name: (axes_are_valid, groups_are_equal, *checks)
    for name, checks in {
        **dict.fromkeys(RESIZED, (sizes_follow,)),
        "all_reduce": (sizes_follow, reduces_pairs),
        "collective_permute": (sizes_follow, pairs_permute),
        "reduce_scatter": (sizes_follow, reduces_pairs),
        LOCAL_SLICE: (sizes_follow,),
        AXIS_INDEX: (indexes,),
    }.items()
}
"""Kind of a collective (`all_gather`), or name of another op with `axes` -> checks of such ops."""
