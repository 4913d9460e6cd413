"""`Mesh`: devices arranged along named axes; `Atom`: a prime-sized part of an axis."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from spmd.errors import MeshError


@dataclass(frozen=True, slots=True)
class Atom:
    """A prime-sized part of a mesh axis: the smallest part that can split a dim of a tensor.

    Axis `data` of size 4 has the atoms `data:(1)2`, its halves, and `data:(2)2`, the two places in
    a half; in brackets is `pre`.
    """

    axis: int  # index of the mesh axis
    pre: int  # product of the sizes of the same axis's more major atoms
    size: int  # a prime
    stride: int  # how far apart in the flattened mesh two neighbours along this atom are


@dataclass(frozen=True, init=False)
class Mesh(jax.sharding.Mesh):
    """Devices arranged along named axes.

    It is a mesh of jax, too, with Auto axes: `jax.set_mesh` and `NamedSharding` take it. Its
    devices are looked for when they are needed: to plan, they need not be here.

    Args:
      device_ids: jax's id of each device, in row-major order of `shape`; `None` for 0, 1, 2, ...
      shape: size of each axis.
      axis_names: name of each axis, major first.
      dcn_shape: size of each axis across slices of machines (its `dcn` in `HybridMesh`), a divisor
        of its size in `shape`; 1 for each if left out.
      topology: the machine that it is a mesh of, as `make_mesh` says; the devices here if left out.

    Raises:
      MeshError: sizes, names, ids or `dcn_shape` that don't match, a repeated name or device.

    Example:
      >>> Mesh(range(8), (4, 2), ("data", "model"))
      Mesh(device_ids=range(8), shape=(4, 2), axis_names=('data', 'model'))
    """

    device_ids: tuple[int, ...]  # type: ignore[assignment]
    sizes: tuple[int, ...]
    axis_names: tuple[str, ...]
    dcn_sizes: tuple[int, ...] = field(default=(), repr=False)
    topology: Any = field(default=None, repr=False)  # a `Topology`, whose module has this one

    def __new__(cls, *_: Any, **__: Any) -> "Mesh":
        """Returns a mesh without fields, for `__init__` to fill: jax's `__new__` wants devices."""
        return object.__new__(cls)

    def __init__(
        self,
        device_ids: Iterable[int] | Any | None,
        shape: Sequence[int],
        axis_names: Sequence[str],
        dcn_shape: Sequence[int] = (),
        topology: Any = None,
    ) -> None:
        sizes = tuple(int(size) for size in shape)
        names = tuple(axis_names)
        check_axes(sizes, names)
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
        over = zip(sizes, dcn_sizes, strict=False)
        if len(dcn_sizes) != len(sizes) or any(n < 1 or size % n for size, n in over):
            raise MeshError(
                f"dcn_shape {dcn_sizes} does not say how much of each axis crosses slices",
                actual=f"({describe_axes(names, sizes)})",
                required="one number for each axis, which divides its size",
                fix="write 1 for an axis within slices",
            )
        vars(self).update(device_ids=ids, sizes=sizes, axis_names=names, dcn_sizes=dcn_sizes)
        pairs, types = tuple(zip(names, sizes, strict=True)), (AxisType.Auto,) * len(sizes)
        vars(self).update(topology=topology, shape_tuple=pairs, axis_types=types)

    @cached_property
    def _hash(self) -> int:
        return hash(self.__reduce__()[1])

    def __hash__(self) -> int:
        return self._hash  # made once: every cache asks for it, and there may be thousands of ids

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew elsewhere: another process hashes strings in another way.
        return Mesh, (self.device_ids, self.sizes, self.axis_names, self.dcn_sizes, self.topology)

    def __repr__(self) -> str:
        every = range(self.size)
        ids = every if self.device_ids == tuple(every) else self.device_ids
        return f"Mesh(device_ids={ids}, shape={self.sizes}, axis_names={self.axis_names})"

    def __str__(self) -> str:
        return describe_axes(self.axis_names, self.sizes)

    @cached_property
    def is_here(self) -> bool:
        """Whether this process sees all devices, and on the topology's platform if it has one."""
        known, topology = devices_by_id(), self.topology
        kind = str(next(iter(known.values())).platform).replace("gpu", "cuda")
        is_it = topology is None or topology.platform in (None, kind)
        return is_it and all(i in known for i in self.device_ids)

    @cached_property
    def in_jax(self) -> jax.sharding.Mesh | AbstractMesh:
        """The mesh of jax over these devices, or an `AbstractMesh` if they are not here."""
        if self.is_here:
            return jax.sharding.Mesh(self.devices, self.axis_names, self.axis_types)
        return AbstractMesh(self.sizes, self.axis_names, self.axis_types)

    @cached_property
    def devices(self) -> np.ndarray[Any, Any]:  # type: ignore[override]
        """The jax devices, an array in the shape of the mesh; MeshError unless `is_here`."""
        known, topology = devices_by_id(), self.topology
        if not self.is_here:
            missing = [i for i in self.device_ids if i not in known]
            uses = f"is one of {topology}" if topology else f"uses device {missing[0]}"
            raise MeshError(
                f"the mesh ({self}) {uses}, which is not visible here",
                actual=f"{len(known)} devices: {next(iter(known.values())).device_kind}",
                required=f"{self.size} devices",
                fix="to plan and to compile ahead, call lower or compile, with "
                "jax.ShapeDtypeStructs in place of arrays; to run, "
                + (
                    "make the mesh without topology="
                    if topology
                    else f"use a smaller mesh, or on a CPU {on_cpu(self.size)}"
                ),
            )
        array = np.empty(self.size, dtype=object)
        array[:] = [known[i] for i in self.device_ids]
        array.setflags(write=False)
        return array.reshape(self.sizes)

    # What else jax asks of a mesh; None for the list of devices of an `AbstractMesh`.

    axis_sizes = property(lambda self: self.sizes)
    abstract_mesh = property(lambda self: self.in_jax.abstract_mesh)
    _internal_device_list = property(lambda self: self.in_jax._internal_device_list)

    @cached_property
    def shape(self) -> Mapping[str, int]:  # type: ignore[override]
        """Maps the name of each axis to its size, major axis first."""
        return MappingProxyType(dict(self.shape_tuple))

    @cached_property
    def size(self) -> int:  # type: ignore[override]
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
        """Returns axis -> the axes of `refined()` that replace it: `{"m": ("m.0", "m.1")}`."""
        return {
            name: tuple(f"{name}.{i}" for i in range(len(atoms))) if len(atoms) > 1 else (name,)
            for name, atoms in self.axis_atoms.items()
        }

    def refined(self) -> "Mesh":
        """Returns a mesh of the same devices in which every atom is an axis.

        `model=4` becomes `model.0=2, model.1=2`. So a spec, which names whole axes, can split 2 key
        heads over `model.0` alone. An axis of a prime size, or of size 1, stays as it is.
        """
        pieces = self.pieces()
        sizes, dcn_sizes = [], []
        for name, crossing in zip(self.axis_names, self.dcn_sizes, strict=True):
            atoms = [self.atoms[i] for i in self.axis_atoms[name]]
            sizes += [a.size for a in atoms] or [1]
            dcn_sizes += [a.size if a.pre < crossing else 1 for a in atoms] or [1]
        names = [piece for name in self.axis_names for piece in pieces[name]]
        return Mesh(self.device_ids, sizes, names, dcn_sizes, self.topology)

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


def describe_axes(names: Sequence[str], sizes: Sequence[int]) -> str:
    """Writes axes as `data=4, model=2`."""
    return ", ".join(f"{n}={s}" for n, s in zip(names, sizes, strict=True))


@lru_cache(maxsize=64)
def devices_by_id() -> dict[int, Any]:
    """Returns jax's id -> device, of the devices that are visible to this process."""
    return {device.id: device for device in jax.devices()}


def on_cpu(count: int) -> str:
    """Returns advice for an error's text: the flag with which a process has `count` CPU devices."""
    return f"set XLA_FLAGS=--xla_force_host_platform_device_count={count} before jax starts"


def check_axes(sizes: Sequence[int], names: Sequence[str]) -> None:
    """Raises MeshError unless each size is at least 1, and has a name of its own, not empty."""
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
            actual=f"({describe_axes(names, sizes)})",
            fix="give every axis its own name",
        )
