"""`Topology`: devices of one kind and how they are wired."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from spmd.errors import MeshError
from spmd.mesh.chips import (
    CHIPS,
    DEVICE_KINDS,
    Chip,
    Link,
    Measured,
    chip_from_json,
    chip_to_json,
)
from spmd.mesh.links import detour_of, links_of
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
        sizes = _parse_shape(name, shape, chip)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "chip", chip)
        object.__setattr__(self, "shape", sizes)

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
        """The backend that such devices belong to, `tpu`, `cuda` or `cpu`; None for unknown chips.

        Chips that are not in the table say nothing of themselves but their figures.
        """
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
        """The link behind mesh axis number `axis`: its slowest part.

        An axis that matches whole torus dims has all their links; one that closes into a ring sends
        both ways at once. Behind a switch every axis has all of a device's bandwidth.
        """
        links = [
            link
            for atom, link in zip(mesh.atoms, self.atom_links(mesh), strict=True)
            if atom.axis == axis
        ]
        if not links:  # an axis of size 1: nothing is ever sent along it
            return self.chip.ici
        return Link(min(x.bandwidth for x in links), max(x.latency for x in links))

    def atom_links(self, mesh: Mesh) -> tuple[Link, ...]:
        """The link behind each atom of the mesh; an axis's major atoms are its slow part."""
        return _atom_links(self, mesh)

    def detour(self, mesh: Mesh, axis: int) -> float:
        """How much longer messages of all to all along a mesh axis take than to neighbours.

        In a torus they pass through the devices in between; behind a switch it is 1.
        """
        return detour_of(self.chip, self.shape, mesh, axis)

    def measured(self, kind: str, devices: int) -> Measured | None:
        """The measurement of a kind of collective among `devices` devices of one host.

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
        for pattern, name in DEVICE_KINDS:
            if re.search(pattern, kind, re.IGNORECASE):
                return Topology(f"{name}:{'x'.join(map(str, _device_shape(devices, name)))}")
        raise MeshError(
            f"no figures are known for devices of kind {kind!r}",
            required=f"one of {', '.join(CHIPS)}",
            fix="pass a topology: Topology(name, chip=Chip(...)) or Topology.load(path)",
        )


def _parse_shape(name: str, text: str, chip: Chip) -> tuple[int, ...]:
    fits = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) is not None
    sizes = tuple(int(part) for part in text.split("x")) if fits else ()
    dims = chip.torus_dims
    if not sizes or (dims and len(sizes) != dims) or (not dims and len(sizes) != 1):
        example = "x".join("444"[:dims]) if dims else "8"
        raise MeshError(
            f"{name!r} is not a topology of {chip.name}",
            required=f"{max(dims, 1)} size{'s' if dims > 1 else ''}, as in {chip.name}:{example}",
            fix="write the chip, a colon, and the sizes joined by x",
        )
    return sizes


def _device_shape(devices: Sequence[Any], name: str) -> tuple[int, ...]:
    dims = CHIPS[name].torus_dims
    if not dims:
        return (len(devices),)
    # Coordinates start anywhere: any 2x2 part of a v5e has a box of 2 x 2. Devices that leave holes
    # in their box count as one line.
    coords = [tuple(device.coords)[:dims] for device in devices]
    box = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
    slices = {getattr(device, "slice_index", 0) for device in devices}
    per_slice = len(devices) // len(slices) // CHIPS[name].cores
    return box if math.prod(box) == per_slice else (per_slice,) + (1,) * (dims - 1)


@lru_cache(maxsize=256)
def _atom_links(topology: Topology, mesh: Mesh) -> tuple[Link, ...]:
    return links_of(topology.chip, topology.shape, mesh)
