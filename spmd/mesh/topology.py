"""`Topology`: devices of one kind, how they are wired, and the link behind each atom of a mesh."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from spmd.errors import MeshError
from spmd.mesh.chips import (
    CHIPS,
    DEVICE_KINDS,
    Chip,
    CollectiveSpeed,
    Link,
    chip_from_json,
    chip_to_json,
)
from spmd.mesh.mesh import Mesh


@dataclass(frozen=True, init=False)
class Topology:
    """Devices of one kind and how they are wired; predictions of time and memory start from it.

    Args:
      name: `chip:shape`, as `v5e:4x4`, `v4:4x4x8` or `h200:8`.
      chip: the figures of a chip that is not in the table, or a correction of one that is.

    Raises:
      MeshError: an unknown chip, or a shape that it cannot have.

    Example:
      >>> Topology("v5e:4x4").count
      16
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    def __init__(self, name: str, chip: Chip | None = None) -> None:
        kind, _, shape = name.partition(":")
        if chip is None and kind not in CHIPS:
            raise MeshError(
                f"unknown chip {kind!r}",
                required=f"one of {', '.join(CHIPS)}, as in v5e:4x4 or h200:8",
                fix="use one of these, or pass the figures: Topology(name, chip=Chip(...))",
            )
        chip = chip or CHIPS[kind]
        fits = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) is not None
        sizes = tuple(int(part) for part in shape.split("x")) if fits else ()
        dims = chip.torus_dims
        if len(sizes) != max(dims, 1):
            example = "x".join("444"[:dims]) if dims else "8"
            raise MeshError(
                f"{name!r} is not a topology of {chip.name}",
                required=f"{max(dims, 1)} size{'s' if dims > 1 else ''}, as in {chip.name}:"
                f"{example}",
                fix="write the chip, a colon, and the sizes joined by x",
            )
        vars(self).update(name=name, chip=chip, shape=sizes)

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.chip))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return self.name

    @cached_property
    def count(self) -> int:
        """Number of devices."""
        return math.prod(self.shape) * self.chip.cores

    @property
    def platform(self) -> str | None:
        """Returns the devices' backend: `tpu`, `cuda` or `cpu`; None for chips not in the table."""
        kind = self.name.partition(":")[0]
        if kind not in CHIPS:
            return None
        if self.chip.torus_dims:
            return "tpu"
        return "cpu" if kind == "cpu" else "cuda"

    @property
    def hbm_bytes(self) -> int:
        """Memory of one device, bytes."""
        return self.chip.hbm_bytes

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes/s between one device and its memory."""
        return self.chip.hbm_bandwidth

    def peak_flops(self, dtype: str) -> float:
        """Peak operations/s of one device for an MLIR element type (`bf16`, `f8E4M3FN`, `i8`)."""
        peaks = dict(self.chip.flops)
        if dtype in peaks:
            return peaks[dtype]
        if dtype.startswith("f8") or dtype.startswith("f4"):
            return peaks["fp8"]
        if dtype in ("ui8", "i4", "ui4", "i2", "ui2"):
            return peaks["i8"]
        return peaks["f32"]

    def arithmetic_seconds(self, flops: float, dtype: str, kernel: str = "") -> float:
        """Time of so many operations on one device.

        Args:
          flops: how many.
          dtype: the MLIR element type of what is computed with.
          kernel: the kind of kernel, as in `Chip.efficiency`; empty for matrix products.
        """
        return flops / (self.peak_flops(dtype) * dict(self.chip.efficiency).get(kernel, 1.0))

    def link(self, mesh: Mesh, axis: int) -> Link:
        """Returns the link along mesh axis number `axis`: the slowest of its atoms' links.

        An axis that matches whole torus dims has all their links; one that closes into a ring sends
        both ways at once. Behind a switch every axis has all of a device's bandwidth.
        """
        pairs = zip(mesh.atoms, self.atom_links(mesh), strict=True)
        links = [link for atom, link in pairs if atom.axis == axis]
        if not links:  # an axis of size 1: nothing is ever sent along it
            return self.chip.ici
        return Link(min(x.bandwidth for x in links), max(x.latency for x in links))

    def atom_links(self, mesh: Mesh) -> tuple[Link, ...]:
        """The link behind each atom of the mesh; an axis's major atoms are its slow part."""
        return _atom_links(self, mesh)

    def detour(self, mesh: Mesh, axis: int) -> float:
        """Returns how much longer an all-to-all along a mesh axis takes than sends to neighbours.

        Behind a switch it is 1. In a torus a message passes a quarter of a ring on its way, or as
        much of a line, so in a dim of 8 chips each link carries twice what a chip sends into it. It
        is 1, too, for an axis that covers no torus dims.
        """
        if not self.chip.torus_dims:
            return 1.0
        dims = _torus_dims(self, mesh)[axis]
        sizes = [self.shape[dim] for dim in dims if dim < len(self.shape)]
        each = [_ways(self.chip, size) for size in sizes]
        return max([1.0, *(sum(each) * s / 4 / w for s, w in zip(sizes, each, strict=True))])

    def measured(self, kind: str, devices: int) -> CollectiveSpeed | None:
        """Returns the measured speed of a kind of collective among `devices` of one host, if any.

        For a count that was not measured: that of the next larger one, else of the largest.
        """
        known = [m for m in self.chip.measured if m.kind == kind]
        larger = [m for m in known if m.devices >= devices]
        if larger:
            return min(larger, key=lambda m: m.devices)
        return max(known, key=lambda m: m.devices, default=None)

    def save(self, path: str | Path) -> None:
        """Writes the topology as JSON, to be edited and read back with `load`."""
        text = json.dumps({"name": self.name, "chip": chip_to_json(self.chip)}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Topology:
        """Reads what `save` wrote.

        Raises:
          MeshError: a file that is not a topology.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return Topology(data["name"], chip_from_json(data["chip"]))
        except (KeyError, TypeError, ValueError) as error:
            raise MeshError(
                f"{path} does not hold a topology: {error}",
                fix='write one with Topology("v5e:4x4").save(path) and edit that',
            ) from error

    @staticmethod
    def for_devices(devices: Sequence[Any]) -> Topology:
        """Guesses the topology of jax devices from their kind and coordinates.

        Raises:
          MeshError: a kind of device that is not in the table.
        """
        kind = str(getattr(devices[0], "device_kind", None) or devices[0].platform)
        found = (name for text, name in DEVICE_KINDS if re.search(text, kind, re.IGNORECASE))
        name = next(found, None)
        if name is None:
            raise MeshError(
                f"no figures are known for devices of kind {kind!r}",
                required=f"one of {', '.join(CHIPS)}",
                fix="pass a topology: Topology(name, chip=Chip(...)) or Topology.load(path)",
            )
        dims = CHIPS[name].torus_dims
        if not dims:
            return Topology(f"{name}:{len(devices)}")
        # Coordinates start anywhere: any 2x2 part of a v5e has a box of 2 x 2. Devices that leave
        # holes in their box count as one line.
        coords = [tuple(device.coords)[:dims] for device in devices]
        box = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
        slices = {getattr(device, "slice_index", 0) for device in devices}
        per_slice = len(devices) // len(slices) // CHIPS[name].cores
        shape = box if math.prod(box) == per_slice else (per_slice,) + (1,) * (dims - 1)
        return Topology(f"{name}:{'x'.join(map(str, shape))}")


@lru_cache(maxsize=256)
def _atom_links(topology: Topology, mesh: Mesh) -> tuple[Link, ...]:
    chip, torus = topology.chip, topology.chip.torus_dims
    dims = _torus_dims(topology, mesh) if torus else []
    links = []
    for atom in mesh.atoms:
        # The major part of an axis crosses slices: of data=8 with dcn_sizes 2, atom data:(1)2 does,
        # data:(2)2 and data:(4)2 don't.
        far = atom.pre < mesh.dcn_sizes[atom.axis]
        if not torus:  # behind a switch: whether any two neighbours have two hosts
            hosts = np.asarray(mesh.device_ids) // chip.per_host
            along = hosts.reshape(-1, atom.size, atom.stride)
            far = far or bool((along != along[:, :1]).any())
        link = chip.dcn if far else chip.ici
        if torus and not far:  # of all the torus dims that the axis covers, and of cores behind
            covered = dims[atom.axis]
            if chip.core is not None and covered == (len(topology.shape),):
                link = chip.core
            else:
                rings = (topology.shape[dim] for dim in covered if dim < len(topology.shape))
                ways = max(sum(_ways(chip, size) for size in rings), 1)
                link = Link(link.bandwidth * ways, link.latency)
        links.append(link)
    return tuple(links)


def _torus_dims(topology: Topology, mesh: Mesh) -> list[tuple[int, ...]]:
    """Returns for each mesh axis the fewest torus dims whose sizes multiply to its own, if any."""
    # Minor axes choose first, as in jax's mesh_utils: they are expected to communicate most.
    # On v5e:4x4 with data=4, model=4, `model` takes torus dim 1 and `data` dim 0. With data=2,
    # model=8, no set of dims multiplies to 8 or 2: such axes count on one port in one direction.
    cores = topology.chip.cores
    all_dims = (*topology.shape, cores) if cores > 1 else topology.shape
    free = list(range(len(all_dims)))
    found: list[tuple[int, ...]] = [()] * len(mesh.sizes)
    for axis in reversed(range(len(mesh.sizes))):
        size = mesh.sizes[axis] // mesh.dcn_sizes[axis]
        sets = (
            dims
            for count in range(1, len(free) + 1)
            for dims in combinations(reversed(free), count)
            if math.prod(all_dims[dim] for dim in dims) == size
        )
        dims = found[axis] = next(sets, ()) if size > 1 else ()
        free = [dim for dim in free if dim not in dims]
    return found


def _ways(chip: Chip, size: int) -> int:
    """Returns 2 for a torus dim that is a ring and sends both ways at once, 1 for a line."""
    return 2 if size % chip.wrap == 0 else 1
