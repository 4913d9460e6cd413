"""What a module says about manual regions and the collectives in them, as plain data.

Devices are positions in the mesh, flattened row-major: so jax numbers them in replica groups, in
pairs of a permute and in `partition_id`, whatever ids they have in hardware.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir

from spmd.errors import UnsupportedOpError
from spmd.frontend.unsupported import refuse
from spmd.ir.legality import COLLECTIVES
from spmd.ir.program import Loc
from spmd.ir.types import Attribute, ShardingAttr
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes

BY_USER = "written by the user in shard_map"
"""Why a collective of a manual region is there."""

Groups = tuple[tuple[int, ...], ...]
"""Devices that exchange with one another, in the order of what they exchange."""

_DIMS = ("all_gather_dim", "concat_dimension", "scatter_dimension", "split_dimension")
_WITH_REPLICAS = ("stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.reduce_scatter")
"""Collectives whose groups are of replicas, unless `use_global_device_ids` says otherwise."""


class Scope(NamedTuple):
    """A manual region.

    Attributes:
      mesh: its mesh, as the module states it.
      axes: the atoms of its own axes.
      held: these and those of the regions around it.
    """

    mesh: Mesh
    axes: Axes
    held: Axes

    def split(self, sharding: ShardingAttr) -> tuple[tuple[Axes, ...], ShardingAttr | None]:
        """What a sharding of the boundary says of manual axes, and of the others, if anything."""
        own = {name for name, atoms in self.mesh.axis_atoms.items() if set(atoms) <= set(self.axes)}
        fixed = tuple(
            self.mesh.atoms_of(name for name, _, _ in dim if name in own) for dim in sharding.dims
        )
        free = tuple(tuple(ref for ref in dim if ref[0] not in own) for dim in sharding.dims)
        all_manual = len(self.held) == len(self.mesh.atoms)
        rest = ShardingAttr(free, sharding.open)
        return fixed, None if all_manual or says_nothing(rest) else rest


def scope_of(names: Sequence[str], mesh: Mesh, outer: Scope | None) -> Scope:
    """The manual region over some axes inside another one."""
    axes = mesh.atoms_of(name for name in mesh.axis_names if name in names)
    return Scope(mesh, axes, (outer.held if outer else ()) + axes)


def says_nothing(sharding: ShardingAttr) -> bool:
    """Whether a sharding leaves everything open: jax states such inside manual regions."""
    return not any(sharding.dims) and all(sharding.open)


def manual_axes(attr: Any) -> tuple[str, ...]:
    """The names in `#sdy<manual_axes{"x", "y"}>`."""
    quoted = re.findall(r'"((?:[^"\\]|\\.)*)"', str(attr))
    return tuple(re.sub(r"\\(.)", r"\1", name) for name in quoted)


# ---------------------------------------------------------------------------------------------
# Collectives.


def collective(
    op: Any, scope: Scope | None, meshes: Mapping[str, Mesh], loc: Loc, partitions: int
) -> dict[str, Attribute] | None:
    """The attributes of a collective, its body left out.

    `axes` are the atoms over which it runs, and `groups` its groups where these are not just those
    of the axes.

    Args:
      op: a collective of StableHLO.
      scope: the manual region that it is in.
      meshes: the module's meshes.
      loc: where it comes from.
      partitions: for how many devices the module says it is.

    Returns:
      None for a collective that does nothing: every device exchanges with itself alone.

    Raises:
      UnsupportedOpError: it is outside any manual region, or runs over axes that are not manual.
    """
    name = op.name
    if name == "stablehlo.collective_permute":
        pairs = _rows(op.attributes["source_target_pairs"])
        everyone = scope.mesh.size if scope else partitions
        if sorted(pairs) == [(i, i) for i in range(everyone)]:
            return None
        exchanges: Groups = pairs
    else:
        exchanges = _groups(op, scope, meshes, partitions)
        if all(len(group) == 1 for group in exchanges):
            return None
    if scope is None:
        refuse(name, loc)
        raise AssertionError(name)
    _check(op, exchanges, scope, loc)
    attrs = {n: int(ir.IntegerAttr(op.attributes[n]).value) for n in _DIMS if n in op.attributes}
    crossed = _crossed(exchanges, scope.mesh)
    if name == "stablehlo.collective_permute":
        return {"axes": crossed or scope.axes, "pairs": exchanges}
    axes = axes_of_groups(exchanges, scope.mesh)
    if axes is not None:
        return {**attrs, "axes": axes}
    return {**attrs, "axes": crossed, "groups": exchanges}


def axes_of_groups(groups: Groups, mesh: Mesh) -> Axes | None:
    """The atoms whose groups these are, in the order of their members; None if there are none."""
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


def _check(op: Any, groups: Groups, scope: Scope, loc: Loc) -> None:
    """Groups are of one size, of replicas of one program, and stay within the manual axes."""
    problem = fix = ""
    devices = {p for group in groups for p in group}
    if not _has_channel(op):
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
            f"{op.name} cannot be partitioned: {problem}",
            op=op.name,
            source=loc.source,
            fix=fix,
        )


def _groups(op: Any, scope: Scope | None, meshes: Mapping[str, Mesh], partitions: int) -> Groups:
    everyone = tuple(range(scope.mesh.size if scope else partitions))
    attr = op.attributes["replica_groups"]
    if "replica_group_mesh_axes" in str(attr):
        return _mesh_groups(str(attr), meshes)
    groups = tuple(tuple(p for p in row if p >= 0) for row in _rows(attr)) or (everyone,)
    of_replicas = op.name in _WITH_REPLICAS and "use_global_device_ids" not in op.attributes
    if of_replicas and _has_channel(op) and groups == ((0,),):
        return (everyone,)
    return groups


def _mesh_groups(text: str, meshes: Mapping[str, Mesh]) -> Groups:
    """`#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<..>]>`."""
    symbol = re.search(r"mesh = @(\"[^\"]*\"|[\w.$-]+)", text)
    assert symbol is not None, text
    mesh = meshes[symbol[1].strip('"')]
    atoms: Axes = ()
    for name, rest in re.findall(r'name = "((?:[^"\\]|\\.)*)"([^<>]*(?:<[^<>]*>)?)', text):
        found = mesh.axis_atoms[name]
        sub = re.search(r"pre_size = (\d+), size = (\d+)|\((\d+)\)(\d+)", rest)
        if sub is not None:
            pre, size = (int(n) for n in sub.groups() if n is not None)
            found = tuple(a for a in found if pre <= mesh.atoms[a].pre < pre * size)
        atoms += found
    return mesh.groups(atoms)


def _rows(attr: Any) -> Groups:
    array = np.asarray(attr)
    return tuple(tuple(int(n) for n in row) for row in array.reshape(len(array), -1))


def _has_channel(op: Any) -> bool:
    if "channel_handle" not in op.attributes:
        return False
    found = re.search(r"handle = (\d+)", str(op.attributes["channel_handle"]))
    return found is not None and int(found[1]) > 0


assert set(_WITH_REPLICAS) < set(COLLECTIVES)
