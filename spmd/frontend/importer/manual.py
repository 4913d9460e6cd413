"""Manual regions and the collectives in them, as plain data.

Devices are positions in the mesh, flattened row-major: jax numbers them so in replica groups, in
pairs of a permute and in `partition_id`, whatever ids they have in hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spmd.errors import SpecError, UnsupportedOpError
from spmd.frontend.importer.shardings import AxisRef
from spmd.frontend.importer.unsupported import refuse
from spmd.ir.program import Loc
from spmd.ir.types import Attribute, ShardingAttr
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, format_axes

BY_USER = "written by the user in shard_map"
BY_PIPELINE = "stages send what they made to the next ones"
"""Note of the collectives in manual regions."""

Groups = tuple[tuple[int, ...], ...]
"""Groups of devices that exchange with one another, in the order of their pieces."""

Refs = tuple[AxisRef, ...]  # axes and parts of axes, major to minor

COLLECTIVE_DIMS = ("all_gather_dim", "concat_dimension", "scatter_dimension", "split_dimension")
_WITH_REPLICAS = ("stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.reduce_scatter")
"""Collectives whose groups are of replicas, unless `use_global_device_ids` says otherwise."""


class Scope(NamedTuple):
    """A manual region."""

    # mesh, own: the mesh that the program is compiled for, and that the region is written for
    mesh: Mesh
    own: Mesh
    # names, axes: its manual axes on `own`, and the atoms of `mesh` that these are, ascending
    names: tuple[str, ...]
    axes: Axes
    held: Axes  # these, and those of the regions around it

    @property
    def is_whole(self) -> bool:
        """Whether no axis is free: what is inside is one device's program and nothing else."""
        return len(self.held) == len(self.mesh.atoms)

    def check_free(self, sharding: ShardingAttr, loc: Loc) -> None:
        """Holds that a mark inside splits nothing over manual axes; SpecError if it does."""
        used = {a for refs in sharding.dims for a in atoms_of_refs(refs, self.mesh)}
        held = used & set(self.held)
        if held:
            raise SpecError(
                "a mark inside a jax.shard_map splits over an axis that is manual there",
                source=loc.source,
                actual=f"{format_axes(tuple(sorted(held)), self.mesh)} of the mesh ({self.mesh})",
                fix="mark the other axes alone, or mark outside of shard_map",
            )

    def split(self, dims: Sequence[Refs]) -> tuple[tuple[Refs, ...], tuple[Refs, ...]]:
        """For each dim its manual axes, and the others."""
        manual = tuple(tuple(ref for ref in dim if ref[0] in self.names) for dim in dims)
        return manual, tuple(tuple(ref for ref in dim if ref[0] not in self.names) for dim in dims)


def says_nothing(sharding: ShardingAttr) -> bool:
    """Whether a sharding names no axis and leaves every dim open."""
    return not any(sharding.dims) and all(sharding.open)


def atoms_of_refs(refs: Iterable[AxisRef], mesh: Mesh) -> Axes:
    """The atoms of axes and of parts of axes, in their order."""
    return tuple(
        a
        for name, pre, size in refs
        for a in mesh.axis_atoms[name]
        if not size or pre <= mesh.atoms[a].pre < pre * size
    )


# ---------------------------------------------------------------------------------------------
# Collectives.


class StatedCollective(NamedTuple):
    """A collective as the module states it."""

    name: str
    dims: Mapping[str, int]  # the attributes that name dims, as `all_gather_dim`
    rows: Groups  # its replica groups, padded with -1, or the pairs of a permute
    # mesh, axes: of `#stablehlo.replica_group_mesh_axes`, if it has that in place of groups; the
    # mesh by name, or itself
    mesh: str | Mesh
    axes: tuple[AxisRef, ...]
    channel: int  # the number of its channel; 0 if it has none
    global_ids: bool  # whether `use_global_device_ids` is set


def collective(
    stated: StatedCollective,
    scope: Scope | None,
    meshes: Mapping[str, Mesh | None],
    loc: Loc,
    partitions: int,
) -> dict[str, Attribute] | None:
    """The attributes of a collective in a manual region, its body left out.

    `axes` are the atoms over which it runs, and `groups` its groups where these are not just those
    of the axes. None for one that does nothing: every device exchanges with itself alone.
    UnsupportedOpError outside any manual region, or over axes that are not manual.
    """
    everyone = tuple(range(scope.mesh.size if scope else partitions))
    permutes = stated.name == "stablehlo.collective_permute"
    groups = stated.rows if permutes else _groups(stated, meshes, everyone)
    if permutes and sorted(groups) == [(i, i) for i in everyone]:
        return None
    if not permutes and all(len(group) == 1 for group in groups):
        return None
    if scope is None:
        refuse(stated.name, loc)
        raise AssertionError(stated.name)
    _check(stated, groups, scope, loc)
    crossed = _crossed(groups, scope.mesh)
    if permutes:
        return {"axes": crossed or scope.axes, "pairs": groups}
    axes = axes_of_groups(groups, scope.mesh)
    if axes is not None:
        return {**stated.dims, "axes": axes}
    return {**stated.dims, "axes": crossed, "groups": groups}


def axes_of_groups(groups: Groups, mesh: Mesh) -> Axes | None:
    """The atoms whose `Mesh.groups` are these groups; None if there are no such atoms."""
    # The first group tells which atoms vary, and in which order: the major one changes last. On
    # (data=2, model=2), whose devices are 0 1 | 2 3:
    #   (0, 2, 1, 3)   data differs from member 1 on, model from member 2 on: (model, data)
    #   (0, 3)         both differ at once, but groups of both have four members: None
    # The test at the end decides; before it this is a guess.
    first = groups[0]
    place: dict[int, int] = {}
    for index, position in enumerate(first):
        for a in range(len(mesh.atoms)):
            differs = mesh.coordinate(position, [a]) != mesh.coordinate(first[0], [a])
            if differs and a not in place:
                place[a] = index
    axes = tuple(sorted(place, key=lambda a: -place[a]))
    return axes if set(mesh.groups(axes)) == set(groups) else None


def _crossed(groups: Groups, mesh: Mesh) -> Axes:
    """The atoms along which members of a group differ."""
    return tuple(
        a
        for a in range(len(mesh.atoms))
        if any(len({mesh.coordinate(p, [a]) for p in group}) > 1 for group in groups)
    )


def _check(stated: StatedCollective, groups: Groups, scope: Scope, loc: Loc) -> None:
    """Groups are of one size, of replicas of one program, and stay within the manual axes."""
    problem = fix = ""
    devices = {p for group in groups for p in group}
    if not stated.channel:
        problem, fix = "it exchanges between replicas of the program", "give it a channel handle"
    elif not groups or not devices <= set(range(scope.mesh.size)):
        problem, fix = f"its devices are not among the {scope.mesh.size} of the mesh", "correct it"
    elif len({len(group) for group in groups}) > 1:
        problem, fix = "its groups differ in size", "use groups of one size"
    elif not set(_crossed(groups, scope.mesh)) <= set(scope.held):
        names = [n for n, a in scope.mesh.axis_atoms.items() if set(a) <= set(scope.held)]
        problem = f"it runs over axes that are not manual here (manual are: {', '.join(names)})"
        fix = "name these axes in the axis_names of shard_map"
    if problem:
        raise UnsupportedOpError(
            f"{stated.name} cannot be partitioned: {problem}",
            op=stated.name,
            source=loc.source,
            fix=fix,
        )


def _groups(
    stated: StatedCollective, meshes: Mapping[str, Mesh | None], everyone: tuple[int, ...]
) -> Groups:
    if stated.mesh:
        mesh = stated.mesh if isinstance(stated.mesh, Mesh) else meshes[stated.mesh]
        if mesh is None:
            return ((0,),)
        groups = mesh.groups(atoms_of_refs(stated.axes, mesh))
        return tuple(tuple(mesh.device_ids[p] for p in group) for group in groups)
    groups = tuple(tuple(p for p in row if p >= 0) for row in stated.rows) or (everyone,)
    of_replicas = stated.name in _WITH_REPLICAS and not stated.global_ids
    return (everyone,) if of_replicas and stated.channel and groups == ((0,),) else groups
