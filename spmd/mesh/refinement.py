"""Axes of one mesh in the atoms of another that arranges the same devices otherwise.

On (data=4, model=2), whose atoms are data:(1)2, data:(2)2 and model:

    (x=2, y=4)                 x is data:(1)2, y is data:(2)2 and model
    (all=8)                    all is data and model
    (m=2, d=4), transposed     m is model, d is data; its devices are 0 2 4 6 1 3 5 7
    (x=8), ids 0 2 1 3 ...     x is data:(1)2, model and data:(2)2

Meshes whose axes have no common parts, such as (a=2, b=3) and (x=3, y=2), have no such form.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from spmd.errors import MeshError
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes

_MOST_IDS = 16  # how many device ids an error lists


@lru_cache(maxsize=1024)
def part_atoms(mesh: Mesh, other: Mesh, name: str, pre: int = 1, size: int = 0) -> Axes:
    """The atoms of `mesh` that an axis of another mesh, or a part of one, consists of.

    The part has this size behind parts of the size `pre`; size 0 is the whole axis. MeshError if
    the meshes have other devices, or there are no such atoms.
    """
    if set(mesh.device_ids) != set(other.device_ids):
        raise MeshError(
            "two different meshes in one program: they are not over the same devices",
            actual=f"the mesh {_described(other)}",
            required=f"the devices of the mesh {_described(mesh)}",
            fix="make all meshes of a program of the devices that it is compiled for",
        )
    whole = other.shape[name]
    size = size or whole
    if whole % (pre * size):
        raise MeshError(f"axis {name!r} of the mesh ({other}) has no part :({pre}){size}")
    # The coordinate along the part for each device, in the order of `mesh`. Its most major digit
    # has to be the coordinate along some atom, the rest along others:
    #   (all=6) on (x=3, y=2)    0 1 2 3 4 5 = 2 * (0 0 1 1 2 2) + (0 1 0 1 0 1), which is x and y
    place = {device: position for position, device in enumerate(other.device_ids)}
    positions = np.array([place[device] for device in mesh.device_ids])
    axis = other.axis_names.index(name)
    stride = int(np.prod(other.sizes[axis + 1 :], dtype=np.int64)) * (whole // (pre * size))
    index = positions // stride % size
    own = [mesh.coordinates([a]) for a in range(len(mesh.atoms))]
    found: list[int] = []
    while size > 1:
        fits = (
            a
            for a, atom in enumerate(mesh.atoms)
            if size % atom.size == 0 and np.array_equal(index // (size // atom.size), own[a])
        )
        a = next(fits, None)
        if a is None:
            raise MeshError(
                f"two different meshes in one program: axis {name!r} of ({other}) is not made of "
                f"axes, or parts of axes, of ({mesh})",
                actual=f"the mesh {_described(other)}",
                required=f"axes along which devices lie as along those of the mesh "
                f"{_described(mesh)}",
                fix="mark and compile with one and the same mesh, or order axes and devices alike",
            )
        found.append(a)
        size //= mesh.atoms[a].size
        index = index % size
    return tuple(found)


def _described(mesh: Mesh) -> str:
    """`(x=2, y=4)`, with its devices where these are not 0, 1, 2, ..."""
    if mesh.device_ids == tuple(range(mesh.size)):
        return f"({mesh}) of {mesh.size} devices"
    more = ", ..." if mesh.size > _MOST_IDS else ""
    return f"({mesh}) with the devices {', '.join(map(str, mesh.device_ids[:_MOST_IDS]))}{more}"
