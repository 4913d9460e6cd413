"""Turns users' meshes and partition specs into those of `spmd`, and shardings into jax's."""

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from spmd.errors import MeshError, SpecError, described
from spmd.mesh.mesh import Mesh, devices_by_id
from spmd.mesh.sharding import Axes, Sharding, axis_refs, parse_axes
from spmd.mesh.topology import Topology

OPEN = PartitionSpec.UNCONSTRAINED
"""An entry of a spec: the compiler decides how this dim is split. `...` means the same."""


def as_mesh(mesh: Any) -> Mesh:
    """Returns a mesh (`spmd.Mesh`, jax `Mesh`, `AbstractMesh`) as a `spmd.Mesh`; else MeshError."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, jax.sharding.Mesh):
        devices = list(mesh.devices.flat)
        # Those that jax describes for compiling ahead have numbers of their own.
        is_known = devices_by_id().get(devices[0].id) is devices[0]
        topology = None if is_known else Topology.for_devices(devices)
        ids = [device.id for device in devices]
        return Mesh(ids, mesh.devices.shape, mesh.axis_names, topology=topology)
    if isinstance(mesh, AbstractMesh):
        return Mesh(None, mesh.axis_sizes, mesh.axis_names)
    raise MeshError(
        f"{described(mesh)} is not a mesh",
        required="a spmd.Mesh, jax.sharding.Mesh or jax.sharding.AbstractMesh",
        fix=f"make one with spmd.make_mesh(data={jax.device_count()})",
    )


def numbered_as(given: Any, mesh: Mesh) -> Mesh:
    """Returns a mesh, ours or jax's, as a `Mesh` whose device ids are those of `mesh`.

    It keeps its own ids if the devices of both are here, or if the two meshes differ in size.
    """
    other = as_mesh(given)
    are_here = other.is_here and mesh.is_here and not isinstance(given, AbstractMesh)
    if are_here or other.size != mesh.size:
        return other
    return Mesh(mesh.device_ids, other.sizes, other.axis_names, other.dcn_sizes, mesh.topology)


def jax_mesh(
    mesh: Mesh, devices: Any = None, axis_types: Sequence[AxisType] | None = None
) -> jax.sharding.Mesh:
    """Returns `mesh` as a jax mesh, over its own devices: MeshError if one is not visible here.

    Given `devices`, jax's in the mesh's order, take their place. Types are Auto by default.
    """
    array = np.asarray(mesh.devices if devices is None else devices, dtype=object)
    types = tuple(axis_types or mesh.axis_types)
    return jax.sharding.Mesh(array.reshape(mesh.sizes), mesh.axis_names, types)


def processes_of(mesh: Mesh) -> list[int]:
    """Returns numbers of a mesh's processes; [0] for one device, or if some are not visible."""
    if mesh.size == 1 or not mesh.is_here or jax.process_count() == 1:
        return [0]
    return sorted({device.process_index for device in jax_mesh(mesh).devices.flat})


def mesh_around() -> Any:
    """Returns the mesh set by `jax.set_mesh` or `jax.sharding.use_abstract_mesh`; None if unset."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # within traced code
        return abstract
    return abstract if concrete.empty else concrete


def has_explicit_axes(mesh: Any) -> bool:
    """Whether a jax mesh has an axis of jax's type Explicit (arrays' types say what it splits)."""
    return AxisType.Explicit in getattr(mesh, "axis_types", ())


def platform_of(mesh: Mesh | None) -> str:
    """Returns `cpu`, `cuda` or `tpu`: of the topology, else of devices if here, else of jax."""
    if mesh is not None and mesh.topology is not None and mesh.topology.platform:
        return str(mesh.topology.platform)
    if mesh is None or not mesh.is_here:
        return str(jax.default_backend()).replace("gpu", "cuda")
    return str(mesh.devices.flat[0].platform).replace("gpu", "cuda")


def partition_spec(sharding: Sharding, mesh: Mesh) -> PartitionSpec:
    """Returns a sharding's dims as a `PartitionSpec`; they have to be split over whole axes."""
    dims = (tuple(ref.name for ref in axis_refs(axes, mesh)) for axes in sharding.dims)
    return PartitionSpec(*dims)


def named_sharding(sharding: Sharding, mesh: Mesh, where: jax.sharding.Mesh) -> NamedSharding:
    """Returns a sharding on `mesh` as one of jax; `where` is the jax mesh of the same devices.

    If it splits over a part of an axis, the result is on a jax mesh like `mesh.refined()`.
    """
    if has_parts(sharding, mesh):
        mesh = mesh.refined()
        devices = where.devices.reshape(mesh.sizes)
        where = jax.sharding.Mesh(devices, mesh.axis_names, (AxisType.Auto,) * len(mesh.sizes))
    return NamedSharding(where, partition_spec(sharding, mesh))


def has_parts(sharding: Sharding, mesh: Mesh) -> bool:
    """Whether a sharding splits some dim over a part of an axis, not over whole axes only."""
    return not all(ref.whole for axes in sharding.dims for ref in axis_refs(axes, mesh))


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """Returns the first pattern that equals the name or matches it as a glob, else None."""
    return next((p for p in patterns if p == name or fnmatch.fnmatchcase(name, p)), None)


def match_patterns(
    patterns: Collection[str], names: Sequence[str], *, what: str, source: str | None = None
) -> list[str | None]:
    """Returns, for each name, the first pattern that is or (as a glob) matches it; else None.

    `*` matches `/`, too. SpecError for a pattern that matches no name: its text calls names `what`
    and points to the user's line `source`.
    """
    for pattern in patterns:
        if not any(first_match(name, (pattern,)) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:8]
            raise SpecError(
                f"{pattern!r} matches no {what}",
                source=source,
                actual=f"there are {', '.join(close)}{', ...' if len(names) > len(close) else ''}",
                fix="correct the name or the pattern, or remove its spec",
            )
    return [first_match(name, patterns) for name in names]


def spec_entries(
    spec: Any, rank: int, mesh: Mesh, *, what: str, source: str | None = None
) -> tuple[tuple[str, ...] | None, ...]:
    """Checks a user's spec; returns, for each dim, its axis names, () if not split, None if open.

    An entry of a spec is the name or index of a mesh axis, a tuple of these (major to minor), None
    (not split), or `...` or `OPEN` (open). Dims without an entry are not split. SpecError for a
    spec that is too long or unreduced, a jax Sharding, an unknown axis, or one used twice: it says
    `what` the spec is of, and the user's line `source`.
    """
    error = partial(SpecError, source=source)
    if isinstance(spec, jax.sharding.Sharding):
        raise error(
            f"a {type(spec).__name__} stands where the spec of {what} belongs",
            actual=described(spec),
            required="the spec alone; the mesh is told once",
            fix=f"pass its spec: {getattr(spec, 'spec', 'one entry for each dim')}",
        )
    if spec is None:
        spec = ()
    if isinstance(spec, PartitionSpec):
        check_reduced(spec.unreduced, what, source)
        spec = spec.partitions  # a value of which jax says `reduced` lies as without
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        spec = (spec,)
    if len(spec) > rank:
        dims, has = (f"{n} dim{'' if n == 1 else 's'}" for n in (len(spec), rank))
        raise error(
            f"the spec of {what} is for {dims}, and the tensor has {has}",
            actual=f"spec {tuple(spec)}",
            required=f"at most {rank} entries, one for each dim",
            fix=f"drop {len(spec) - rank} of them; one dim over several axes is a tuple of names",
        )

    def axis_name(entry: Any) -> str:
        if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < len(mesh.sizes):
            return mesh.axis_names[entry]
        if isinstance(entry, str) and entry in mesh.axis_names:
            return entry
        close = difflib.get_close_matches(str(entry), mesh.axis_names, n=1)
        raise error(
            f"unknown axis {entry!r} in the spec of {what}",
            actual=f"spec {tuple(spec)}, mesh ({mesh})",
            required=f"one of {', '.join(map(repr, mesh.axis_names))}",
            fix=f"use {close[0]!r}" if close else "use an axis of the mesh, None or ...",
        )

    entries: list[tuple[str, ...] | None] = []
    for entry in spec:
        alone = () if entry is None else (entry,)
        parts = entry if isinstance(entry, tuple | list) else alone
        is_open = entry is ... or entry is OPEN
        entries.append(None if is_open else tuple(map(axis_name, parts)))
    names = [name for entry in entries if entry for name in entry]
    for name in names:
        if names.count(name) > 1:
            raise error(
                f"axis {name!r} is used twice in the spec of {what}",
                actual=f"spec {tuple(spec)}",
                required="each mesh axis splits at most one dim",
                fix=f"keep {name!r} in one place",
            )
    return tuple(entries) + ((),) * (rank - len(entries))


def check_reduced(unreduced: Iterable[str], what: str, source: str | None = None) -> None:
    """Raises SpecError if `unreduced` has any axis; its text names `what` and the line `source`."""
    if axes := ", ".join(sorted(unreduced)):
        raise SpecError(
            f"{what} is unreduced over {axes}: each device would have one term of it",
            source=source,
            required="whole values where they are passed, returned or marked",
            fix="add it up: call jax.sharding.reshard with its spec without `unreduced`, before it "
            "is passed or where it is returned",
        )


def dims_of(
    entries: Sequence[tuple[str, ...] | None],
    shape: Sequence[int],
    mesh: Mesh,
    *,
    what: str,
    source: str | None = None,
    even: bool = True,
) -> tuple[tuple[Axes, ...], tuple[bool, ...]]:
    """Returns (the atoms of each dim, whether each dim is open) for entries of `spec_entries`.

    SpecError (of `what`, at line `source`), if `even`, for a dim whose size its axes don't divide.
    """
    dims: list[Axes] = []
    for d, (entry, size) in enumerate(zip(entries, shape, strict=True)):
        atoms = parse_axes(", ".join(entry or ()), mesh)
        extent = mesh.extent(atoms)
        if even and size % extent:
            axes = " x ".join(f"{name}={mesh.shape.get(name, 'part')}" for name in entry or ())
            padded = -(-size // extent) * extent
            raise SpecError(
                f"dim {d} of {what} has size {size}, which {axes} does not divide",
                source=source,
                actual=f"shape {tuple(shape)}, {size} / {extent} leaves {size % extent}",
                required=f"a multiple of {extent}",
                fix=f"pad the dim to {padded}, split another dim, or leave this one open with ...",
            )
        dims.append(atoms)
    return tuple(dims), tuple(entry is None for entry in entries)
