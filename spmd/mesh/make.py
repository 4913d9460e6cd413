"""`make_mesh` and `HybridMesh`: meshes over the devices here, or of a machine that is not here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from spmd.errors import MeshError, described
from spmd.mesh.mesh import Mesh, check_axes, describe_axes, on_cpu
from spmd.mesh.topology import Topology, as_topology


def make_mesh(
    *shape_and_names: Any, devices: Any = None, topology: Any = None, **axes: int
) -> Mesh:
    """Returns a mesh over the visible devices, or over another machine's; one keyword an axis.

    The order of devices that are here comes from `jax.experimental.mesh_utils`, which places
    neighbours along the minor axes on the fastest links.

    Args:
      *shape_and_names: sizes and names of the axes, as `jax.make_mesh` takes them, in place of the
        keywords.
      devices: jax devices, of which the first are used, as many as the axes need; by default all
        visible ones.
      topology: in place of `devices` a machine that need not be here, a `Topology` or its name:
        programs are planned for it, and compiled where its compiler is installed.
      **axes: size of each axis, major first.

    Returns:
      A `Mesh`.

    Raises:
      MeshError: axes that no mesh has, of more devices than there are, or not of just those of the
        topology; devices that are not jax's, or beside a topology.

    Example:
      >>> mesh = make_mesh(data=4, model=2)
      >>> mesh = make_mesh((4, 2), ("data", "model"))
      >>> mesh = make_mesh(data=32, model=4, topology="v5p-256")   # 256 cores, 128 chips
    """
    given = shape_and_names or (tuple(axes.values()), tuple(axes))
    is_fit = len(given) == 2 and all(isinstance(part, tuple | list) for part in given)
    if not is_fit or (shape_and_names and axes):
        stated = [*map(repr, shape_and_names), *(f"{name}={size}" for name, size in axes.items())]
        raise MeshError(
            "make_mesh takes one keyword for each axis, or a tuple of sizes and one of names",
            actual=f"make_mesh({', '.join(stated)})",
            fix="write make_mesh(data=4, model=2), or make_mesh((4, 2), ('data', 'model'))",
        )
    sizes, names = map(tuple, given)
    return _made(names, sizes, (1,) * len(sizes), devices, topology)


def HybridMesh(
    ici: Mapping[str, int],
    dcn: Mapping[str, int],
    *,
    devices: Sequence[Any] | None = None,
    topology: Topology | str | None = None,
) -> Mesh:
    """Returns a mesh over several slices: an axis is its `dcn` part (major) times its `ici` part.

    Args:
      ici: axis -> size within a slice (fast links).
      dcn: axis -> size across slices (data-centre network); axes left out have size 1.
      devices: jax devices, by default all visible ones; equal runs are slices where none are known.
      topology: what one slice is, of a machine that need not be here, as for `make_mesh`.

    Returns:
      A `Mesh` whose `dcn_sizes` are the sizes of its axes across slices, as in `dcn`.

    Raises:
      MeshError: an axis of `dcn` that `ici` lacks, and as for `make_mesh`.

    Example:
      >>> mesh = HybridMesh(ici={"data": 4, "model": 4}, dcn={"data": 2})   # data=8, model=4
    """
    unknown = [name for name in dcn if name not in ici]
    if unknown:
        raise MeshError(
            f"axis {unknown[0]!r} of `dcn` is not among the axes of `ici`",
            actual=f"ici: {', '.join(ici)}",
            fix=f"add {unknown[0]!r}: 1 to `ici` if it only crosses slices",
        )
    outer = tuple(dcn.get(name, 1) for name in ici)
    return _made(tuple(ici), tuple(ici.values()), outer, devices, topology)


def _made(
    names: tuple[str, ...],
    inner: tuple[int, ...],
    outer: tuple[int, ...],
    devices: Any,
    topology: Topology | str | None,
) -> Mesh:
    """Returns a mesh whose axis k has `inner[k]` devices within a slice, and `outer[k]` slices."""
    sizes, slices = tuple(i * o for i, o in zip(inner, outer, strict=True)), math.prod(outer)
    check_axes(sizes, names)
    if topology is None:
        used = _first_devices(devices, names, sizes)
        if slices == 1:
            splits = {"allow_split_physical_axes": True}
            arranged = mesh_utils.create_device_mesh(sizes, devices=used, **splits)
        elif len({getattr(device, "slice_index", None) for device in used}) == slices:
            arranged = mesh_utils.create_hybrid_device_mesh(inner, outer, devices=used)
        else:  # one slice, or devices without slices: the same logical layout over what there is
            blocks = np.asarray(used, dtype=object).reshape(outer + inner)
            order = [k for i in range(len(names)) for k in (i, i + len(names))]
            arranged = blocks.transpose(order).reshape(sizes)
        return Mesh([device.id for device in arranged.flat], sizes, names, outer)
    machine = as_topology(topology)
    if devices is not None:
        raise MeshError("a mesh has devices, which are here, or a topology", fix="give one of them")
    if math.prod(sizes) != machine.count * slices:
        times = f" in each of {slices} slices" if slices > 1 else ""
        raise MeshError(
            f"the mesh ({describe_axes(names, sizes)}) does not fit {machine}",
            actual=f"{math.prod(sizes)} = {' x '.join(map(str, sizes))} devices",
            required=f"{machine.count} devices{times}",
            fix="change the axes or the topology",
        )
    return Mesh(None, sizes, names, outer, machine)


def _first_devices(devices: Any, names: Sequence[str], sizes: Sequence[int]) -> list[Any]:
    needed = math.prod(sizes)
    given = jax.devices() if devices is None else devices
    available = list(np.ravel(list(given))) if isinstance(given, Iterable) else [given]
    if not all(hasattr(device, "id") for device in available):
        raise MeshError(
            "the devices of a mesh are not devices of jax",
            actual=described(devices),
            required="devices that are here, as jax.devices() gives them",
            fix=f'for a machine that is not here pass topology="h200:{needed}", say, in place of '
            "devices; for devices by their numbers write spmd.Mesh(ids, "
            f"{tuple(sizes)}, {tuple(names)})",
        )
    if needed > len(available):
        kind = f"{available[0].platform} devices are visible" if available else "devices are given"
        raise MeshError(
            f"mesh ({describe_axes(names, sizes)}) needs {needed} devices",
            actual=f"{len(available)} {kind}",
            required=f"{needed} = {' x '.join(map(str, sizes))}",
            fix="make the mesh smaller; or, to plan for a machine that is not here, name it: "
            f'topology="h200:{needed}", or a slice of TPUs, as v5p-256; or, to try things on a '
            f"CPU, {on_cpu(needed)}",
        )
    return available[:needed]
