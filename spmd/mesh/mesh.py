"""`Mesh`: devices arranged along named axes; `Atom`: a prime-sized part of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from spmd.errors import MeshError


@dataclass(frozen=True, slots=True)
class Atom:
    """A prime-sized part of a mesh axis: the smallest part that can split a dim of a tensor.

    Axis `data` of size 4 has the atoms `data:(1)2`, its halves, and `data:(2)2`, the two places in
    a half; in brackets is the product of the sizes of the axis's atoms before it.
    """

    axis: int  # index of the mesh axis
    pre: int  # product of the sizes of the same axis's more major atoms
    size: int  # a prime
    stride: int  # how far apart in the flattened mesh two neighbours along this atom are


@dataclass(frozen=True)
class Mesh:
    """Devices arranged along named axes.

    Args:
      device_ids: jax's id of each device, in row-major order of `shape`; `None` for 0, 1, 2, ...
      shape: size of each axis.
      axis_names: name of each axis, major first.
      dcn_shape: for each axis, over how many slices (machines that a data-centre network joins)
        it goes, as `dcn` of `HybridMesh`; 1 for each if left out.

    Raises:
      MeshError: sizes and names that don't match, a repeated name or a repeated device.

    Example:
      >>> Mesh(range(8), (4, 2), ("data", "model"))
      Mesh(device_ids=range(8), shape=(4, 2), axis_names=('data', 'model'))
    """

    device_ids: tuple[int, ...]
    sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    dcn_sizes: tuple[int, ...] = field(default=(), repr=False)

    def __init__(
        self,
        device_ids: Iterable[int] | Any | None,
        shape: Sequence[int],
        axis_names: Sequence[str],
        dcn_shape: Sequence[int] = (),
    ) -> None:
        sizes = tuple(int(size) for size in shape)
        names = tuple(axis_names)
        _check_axes(sizes, names)
        count = math.prod(sizes)
        given = range(count) if device_ids is None else np.asarray(tuple(device_ids)).reshape(-1)
        ids = tuple(int(i) for i in given)
        if len(ids) != count:
            raise MeshError(
                f"shape {sizes} needs {count} devices and {len(ids)} ids were given",
                fix="give one id for each device",
            )
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise MeshError(f"device {twice} appears twice in the mesh", fix="use each device once")
        dcn_sizes = tuple(dcn_shape) or (1,) * len(sizes)
        vars(self).update(device_ids=ids, sizes=sizes, axis_names=names, dcn_sizes=dcn_sizes)

    @cached_property
    def _hash(self) -> int:
        return hash((self.device_ids, self.sizes, self.axis_names, self.dcn_sizes))

    def __hash__(self) -> int:
        return self._hash  # made once: every cache asks for it, and there may be thousands of ids

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew elsewhere: another process hashes strings in another way.
        return Mesh, (self.device_ids, self.sizes, self.axis_names, self.dcn_sizes)

    def __repr__(self) -> str:
        every = range(self.size)
        ids = every if self.device_ids == tuple(every) else self.device_ids
        return f"Mesh(device_ids={ids}, shape={self.sizes}, axis_names={self.axis_names})"

    def __str__(self) -> str:
        return _describe(self.axis_names, self.sizes)

    @cached_property
    def shape(self) -> Mapping[str, int]:
        """Maps the name of each axis to its size, major axis first."""
        return MappingProxyType(dict(zip(self.axis_names, self.sizes, strict=True)))

    @cached_property
    def size(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(self.sizes)

    @cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """The atoms of all axes, major first; elsewhere an atom is its index in this tuple."""
        # Devices lie in row-major order, so strides shrink from axis to axis. (data=4, model=2):
        #   data:(1)2  stride 4        position = 4 * i + 2 * j + k
        #   data:(2)2  stride 2        for coordinates i, j, k along the three atoms
        #   model      stride 1
        found: list[Atom] = []
        stride = self.size
        for axis, size in enumerate(self.sizes):
            pre = 1
            for prime in prime_factors(size):
                stride //= prime
                found.append(Atom(axis, pre, prime, stride))
                pre *= prime
        return tuple(found)

    @cached_property
    def atom_sizes(self) -> tuple[int, ...]:
        """The size, a prime, of each atom of `atoms`."""
        return tuple(atom.size for atom in self.atoms)

    @cached_property
    def axis_atoms(self) -> Mapping[str, tuple[int, ...]]:
        """Maps the name of each axis to its atoms (indices into `atoms`), major first."""
        return {
            name: tuple(i for i, atom in enumerate(self.atoms) if atom.axis == axis)
            for axis, name in enumerate(self.axis_names)
        }

    def pieces(self) -> dict[str, tuple[str, ...]]:
        """Maps each axis to the axes of `refined()` that replace it: `{"m": ("m.0", "m.1")}`."""
        return {
            name: tuple(f"{name}.{i}" for i in range(len(atoms))) if len(atoms) > 1 else (name,)
            for name, atoms in self.axis_atoms.items()
        }

    def refined(self) -> Mesh:
        """Returns a mesh of the same devices in which every atom is an axis.

        `model=4` becomes `model.0=2, model.1=2`. So a spec, which names whole axes, can split 2 key
        heads over `model.0` alone. An axis of a prime size, or of size 1, stays as it is.
        """
        pieces = self.pieces()
        sizes, dcn_sizes = [], []
        for name, crossing in zip(self.axis_names, self.dcn_sizes, strict=True):
            atoms = [self.atoms[i] for i in self.axis_atoms[name]]
            sizes += [a.size for a in atoms] or [1]
            dcn_sizes += [a.size if a.pre * a.size <= crossing else 1 for a in atoms] or [1]
        names = [piece for name in self.axis_names for piece in pieces[name]]
        return Mesh(self.device_ids, sizes, names, dcn_sizes)

    def atoms_of(self, axes: Iterable[str]) -> tuple[int, ...]:
        """Returns the atoms (indices into `atoms`) of whole axes, in the order of `axes`."""
        return tuple(atom for name in axes for atom in self.axis_atoms[name])

    def extent(self, atoms: Iterable[int]) -> int:
        """Returns into how many pieces some atoms split a dim: the product of their sizes."""
        sizes = self.atom_sizes
        return math.prod([sizes[a] for a in atoms])

    def coordinate(self, position: int, atoms: Sequence[int]) -> int:
        """Returns the index of device_ids[position]'s piece of a dim that is split over `atoms`."""
        index = 0
        for a in atoms:
            atom = self.atoms[a]
            index = index * atom.size + position // atom.stride % atom.size
        return index

    def coordinates(self, atoms: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns integers (size,): `coordinate` of each device, in the order of `device_ids`."""
        positions: Any = np.arange(self.size)
        index: np.ndarray[Any, np.dtype[np.int64]] = 0 * positions
        return index + self.coordinate(positions, atoms)

    def groups(self, atoms: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns the replica groups of a collective over some atoms.

        A group is a tuple of indices into `device_ids`, ordered by the devices' `coordinate` along
        `atoms`; groups are ordered by their first member.
        """
        # On (data=4, model=2), whose atoms are 0, 1 and 2 with strides 4, 2 and 1:
        #   groups((0, 2)) == ((0, 1, 4, 5), (2, 3, 6, 7))
        #   groups((2, 0)) == ((0, 4, 1, 5), (2, 6, 3, 7))     the order of atoms is that of members
        # A gather joins pieces in the order of members, so this order is part of its meaning.
        rest = [a for a in range(len(self.atoms)) if a not in atoms]
        members = np.lexsort((self.coordinates(atoms), self.coordinates(rest)))
        rows = members.reshape(-1, self.extent(atoms))
        return tuple(map(tuple, rows[np.argsort(rows[:, 0])].tolist()))


def make_mesh(*shape_and_names: Any, devices: Any = None, **axes: int) -> Mesh:
    """Returns a mesh over the visible devices, with one axis for each keyword, major axis first.

    The device order comes from `jax.experimental.mesh_utils`, which places neighbours along the
    minor axes on the fastest links.

    Args:
      *shape_and_names: sizes and names of the axes, as `jax.make_mesh` takes them, in place of the
        keywords.
      devices: jax devices, the first of which are used, as many as the axes need; the visible
        ones when left out.
      **axes: size of each axis.

    Returns:
      A `Mesh`.

    Raises:
      MeshError: the axes need more devices than there are, or are given in none of the two forms.

    Example:
      >>> mesh = make_mesh(data=4, model=2)
      >>> mesh = make_mesh((4, 2), ("data", "model"))
    """
    from jax.experimental import mesh_utils

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
    _check_axes(sizes, names)
    used = _first_devices(devices, names, sizes)
    arranged = mesh_utils.create_device_mesh(sizes, devices=used, allow_split_physical_axes=True)
    return Mesh([device.id for device in arranged.flat], sizes, names)


def HybridMesh(
    ici: Mapping[str, int], dcn: Mapping[str, int], *, devices: Sequence[Any] | None = None
) -> Mesh:
    """Returns a mesh over several slices: each axis has the size dcn[axis] (major) * ici[axis].

    Args:
      ici: axis -> size within a slice (fast links).
      dcn: axis -> size across slices (data-centre network); axes left out have size 1.
      devices: as for `make_mesh`.

    Returns:
      A `Mesh` whose `dcn_sizes` has the `dcn` size of each axis.

    Raises:
      MeshError: an axis of `dcn` that `ici` lacks, or more devices than there are.

    Example:
      >>> mesh = HybridMesh(ici={"data": 4, "model": 4}, dcn={"data": 2})   # data=8, model=4
    """
    from jax.experimental import mesh_utils

    unknown = [name for name in dcn if name not in ici]
    if unknown:
        raise MeshError(
            f"axis {unknown[0]!r} of `dcn` is not among the axes of `ici`",
            actual=f"ici: {', '.join(ici)}",
            fix=f"add {unknown[0]!r}: 1 to `ici` if it only crosses slices",
        )
    names = tuple(ici)
    inner = tuple(ici.values())
    outer = tuple(dcn.get(name, 1) for name in names)
    sizes = tuple(i * o for i, o in zip(inner, outer, strict=True))
    _check_axes(sizes, names)
    used = _first_devices(devices, names, sizes)
    slices = {getattr(device, "slice_index", None) for device in used}
    if len(slices) == math.prod(outer) > 1:
        arranged = mesh_utils.create_hybrid_device_mesh(inner, outer, devices=used)
    else:  # one slice, or devices without slices: the same logical layout over what there is
        blocks = np.asarray(used, dtype=object).reshape(outer + inner)
        order = [k for i in range(len(names)) for k in (i, i + len(names))]
        arranged = blocks.transpose(order).reshape(sizes)
    return Mesh([device.id for device in arranged.flat], sizes, names, dcn_shape=outer)


def prime_factors(number: int) -> tuple[int, ...]:
    """Returns prime factors, ascending: 12 -> (2, 2, 3). A major 2 divides more dims than a 3."""
    found: list[int] = []
    prime = 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return tuple(found)


def _describe(names: Sequence[str], sizes: Sequence[int]) -> str:
    return ", ".join(f"{n}={s}" for n, s in zip(names, sizes, strict=True))


def _first_devices(devices: Any, names: Sequence[str], sizes: Sequence[int]) -> list[Any]:
    import jax

    needed = math.prod(sizes)
    available = list(jax.devices() if devices is None else devices)
    if needed > len(available):
        raise MeshError(
            f"mesh ({_describe(names, sizes)}) needs {needed} devices",
            actual=f"{len(available)} {available[0].platform} devices are visible",
            required=f"{needed} = {' x '.join(map(str, sizes))}",
            fix="make the mesh smaller, or, to try things on a CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax starts",
        )
    return available[:needed]


def _check_axes(sizes: Sequence[int], names: Sequence[str]) -> None:
    if len(sizes) != len(names):
        raise MeshError(
            f"a mesh needs one name for each axis: {len(sizes)} sizes and {len(names)} names",
            actual=f"shape {tuple(sizes)}, axis_names {tuple(names)}",
            fix="give as many names as sizes",
        )
    for name, size in zip(names, sizes, strict=True):
        if not isinstance(name, str) or not name:
            raise MeshError(f"axis name {name!r} is not a non-empty string", fix="name the axis")
        if size < 1:
            raise MeshError(
                f"axis {name!r} has size {size}",
                required="a size of at least 1; sizes are not inferred",
                fix=f"write the size out: {name}=2",
            )
    repeated = {name for name in names if list(names).count(name) > 1}
    if repeated:
        raise MeshError(
            f"axis name {sorted(repeated)[0]!r} is used twice in one mesh",
            actual=f"({_describe(names, sizes)})",
            fix="give every axis its own name",
        )
