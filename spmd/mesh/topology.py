"""`Topology`: what the hardware can do. Peaks, memory, and the link behind each mesh axis."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from spmd.errors import MeshError
from spmd.mesh.mesh import Mesh


class Link(NamedTuple):
    """One device's connection to its neighbours along a mesh axis.

    Attributes:
      bandwidth: bytes/s that one device can send while it receives as much.
      latency: seconds until the first byte of a message arrives.
    """

    bandwidth: float
    latency: float


class Measured(NamedTuple):
    """What collectives of one kind among so many devices behind a switch were seen to take.

    Attributes:
      kind: as in `spmd.planning.comm.KINDS`.
      devices: how many exchange with one another.
      latency: seconds of one that moves next to nothing.
      bandwidth: bytes/s that each device sends in large ones, counted as for a ring.
    """

    kind: str
    devices: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Chip:
    """One accelerator and its links; every figure is per device.

    Attributes:
      name: as in `Topology("name:shape")`.
      flops: (dtype, operations/s) of dense matrix products at best; the dtypes are `DTYPES`.
      hbm_bytes: device memory, bytes.
      hbm_bandwidth: bytes/s from device memory.
      ici: torus chips: one link to one neighbour, one way. Switched chips: all that one device can
        send to the others of its host.
      dcn: to other slices (torus) or other hosts (switched).
      torus_dims: 0 for chips behind a switch.
      wrap: the torus dims whose size is a multiple of this are closed into rings.
      per_host: devices that share a host.
      cores: devices at each point of the torus, joined by `core`.
      core: what one device can send to the other of its chip.
      measured: of switched chips, inside a host: what takes the place of `ici` for collectives.
      overlap: how much of the time of a collective that runs beside arithmetic is won by that. The
        rest is lost: both share cores and memory, and the backend's schedule is not the predicted.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    hbm_bytes: int
    hbm_bandwidth: float
    ici: Link
    dcn: Link
    torus_dims: int = 0
    wrap: int = 0
    per_host: int = 8
    cores: int = 1
    core: Link | None = None
    measured: tuple[Measured, ...] = ()
    overlap: float = 1.0


DTYPES = ("f32", "bf16", "f16", "i8", "fp8")
"""The dtypes that a chip's peak is given for."""


def _peaks(*teraflops: float) -> tuple[tuple[str, float], ...]:
    return tuple(zip(DTYPES, (t * 1e12 for t in teraflops), strict=True))


_TPU_DCN_LATENCY = 20e-6
_GPU_DCN_LATENCY = 10e-6
_ICI_LATENCY = 1e-6
_NVLINK_LATENCY = 4e-6

# Peaks, capacities and bandwidths are the vendors' published ones; latencies are rounded guesses of
# what one step of a collective costs. Peaks are what `jax.numpy.dot` can reach at its default
# precision: on TPU an f32 product is one bf16 pass, on GPU it is TF32. A chip without fp8 or f16
# units computes in bf16.
#
# TPU: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. An ICI port's figure is the chip's
#   bidirectional ICI bandwidth / ports / 2; dcn is the host's network bandwidth / chips per host.
#   A TPU7x chip is two devices, each with half of its figures; the link between them is published
#   as six times as fast as one ICI port.
# GPU: NVIDIA A100 80GB, H100 and H200 SXM datasheets, dense (without sparsity). NVLink's figure is
#   half of its total; dcn is the DGX A100 / DGX H100 compute network, one adapter per GPU.
#   What H200s behind one switch take was measured with `scripts/calibrate` on four of them, jax
#   0.11.2: the latency is the median of all. H100s have the same links. Of the data sheet's peaks,
#   large products reach 80% there and copies 90%, and of what could be hidden behind arithmetic a
#   fifth is: so eleven plans of one training step are predicted within 7% (docs/benchmarks.md).
# CPU: a stand-in, so that plans can be made for hosts without accelerators.
_IN_PROGRAM = 55e-6  # the spread among kinds and numbers of devices is that of the measurement
_HOPPER = (
    Measured("all_gather", 2, _IN_PROGRAM, 178e9),
    Measured("all_reduce", 2, _IN_PROGRAM, 250e9),
    Measured("all_to_all", 2, _IN_PROGRAM, 181e9),
    Measured("collective_permute", 2, _IN_PROGRAM, 195e9),
    Measured("reduce_scatter", 2, _IN_PROGRAM, 183e9),
    Measured("all_gather", 4, _IN_PROGRAM, 227e9),
    Measured("all_reduce", 4, _IN_PROGRAM, 280e9),
    Measured("all_to_all", 4, _IN_PROGRAM, 208e9),
    Measured("collective_permute", 4, _IN_PROGRAM, 196e9),
    Measured("reduce_scatter", 4, _IN_PROGRAM, 262e9),
)
_CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v4",
            _peaks(275, 275, 275, 275, 275),
            32 * 2**30,
            1.2e12,
            Link(50e9, _ICI_LATENCY),
            Link(6.25e9, _TPU_DCN_LATENCY),
            torus_dims=3,
            wrap=4,
            per_host=4,
        ),
        Chip(
            "v5e",
            _peaks(197, 197, 197, 393, 197),
            16 * 2**30,
            819e9,
            Link(50e9, _ICI_LATENCY),
            Link(3.125e9, _TPU_DCN_LATENCY),
            torus_dims=2,
            wrap=16,
            per_host=8,
        ),
        Chip(
            "v5p",
            _peaks(459, 459, 459, 918, 459),
            95 * 2**30,
            2.765e12,
            Link(100e9, _ICI_LATENCY),
            Link(6.25e9, _TPU_DCN_LATENCY),
            torus_dims=3,
            wrap=4,
            per_host=4,
        ),
        Chip(
            "v6e",
            _peaks(918, 918, 918, 1836, 918),
            32 * 2**30,
            1.64e12,
            Link(100e9, _ICI_LATENCY),
            Link(12.5e9, _TPU_DCN_LATENCY),
            torus_dims=2,
            wrap=16,
            per_host=8,
        ),
        Chip(
            "tpu7x",
            _peaks(1153.5, 1153.5, 1153.5, 1153.5, 2307),
            96 * 10**9,
            3.69e12,
            Link(50e9, _ICI_LATENCY),
            Link(6.25e9, _TPU_DCN_LATENCY),
            torus_dims=3,
            wrap=4,
            per_host=8,
            cores=2,
            core=Link(600e9, _ICI_LATENCY),
        ),
        Chip(
            "a100",
            _peaks(156, 312, 312, 624, 312),
            80 * 10**9,
            2.039e12,
            Link(300e9, _NVLINK_LATENCY),
            Link(25e9, _GPU_DCN_LATENCY),
            overlap=0.2,
        ),
        Chip(
            "h100",
            _peaks(395.8, 791.5, 791.5, 1583, 1583),
            80 * 10**9,
            3.02e12,
            Link(450e9, _NVLINK_LATENCY),
            Link(50e9, _GPU_DCN_LATENCY),
            measured=_HOPPER,
            overlap=0.2,
        ),
        Chip(
            "h200",
            _peaks(395.8, 791.5, 791.5, 1583, 1583),
            141 * 10**9,
            4.32e12,
            Link(450e9, _NVLINK_LATENCY),
            Link(50e9, _GPU_DCN_LATENCY),
            measured=_HOPPER,
            overlap=0.2,
        ),
        Chip(
            "cpu",
            _peaks(0.1, 0.1, 0.1, 0.1, 0.1),
            8 * 2**30,
            20e9,
            Link(5e9, 10e-6),
            Link(1e9, 50e-6),
            per_host=64,
        ),
    )
}

# Patterns of `device.device_kind`, most specific first.
_DEVICE_KINDS = (
    (r"TPU v4", "v4"),
    (r"TPU v5 ?lite|TPU v5e", "v5e"),
    (r"TPU v5", "v5p"),
    (r"TPU v6", "v6e"),
    (r"TPU ?7", "tpu7x"),
    (r"A100", "a100"),
    (r"H200", "h200"),
    (r"H100", "h100"),
    (r"cpu", "cpu"),
)


@dataclass(frozen=True, init=False)
class Topology:
    """Devices of one kind and how they are wired: what time and memory are predicted from.

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
    _hash: int = field(repr=False, compare=False)

    def __init__(self, name: str, chip: Chip | None = None) -> None:
        kind, _, shape = name.partition(":")
        chip = chip or _known_chip(kind)
        sizes = _parse_shape(name, shape, chip)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "chip", chip)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "_hash", hash((name, chip)))

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
        if kind not in _CHIPS:
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
        """The link behind each atom of the mesh (the slow part of an axis are its major atoms)."""
        return _atom_links(self, mesh)

    def measured(self, kind: str, devices: int) -> Measured | None:
        """What was measured of collectives among so many devices of a host, or the next more."""
        known = [m for m in self.chip.measured if m.kind == kind]
        larger = [m for m in known if m.devices >= devices]
        if larger:
            return min(larger, key=lambda m: m.devices)
        return max(known, key=lambda m: m.devices, default=None)

    def save(self, path: str | Path) -> None:
        """Writes the topology as JSON, to be edited and read back with `load`."""
        text = json.dumps({"name": self.name, "chip": _chip_to_json(self.chip)}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Topology:
        """Reads what `save` wrote.

        Raises:
          MeshError: a file that is not a topology.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return Topology(data["name"], _chip_from_json(data["chip"]))
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
        for pattern, name in _DEVICE_KINDS:
            if re.search(pattern, kind, re.IGNORECASE):
                return Topology(f"{name}:{'x'.join(map(str, _device_shape(devices, name)))}")
        raise MeshError(
            f"no figures are known for devices of kind {kind!r}",
            required=f"one of {', '.join(_CHIPS)}",
            fix="pass a topology: Topology(name, chip=Chip(...)) or Topology.load(path)",
        )


def _known_chip(kind: str) -> Chip:
    if kind not in _CHIPS:
        raise MeshError(
            f"unknown chip {kind!r}",
            required=f"one of {', '.join(_CHIPS)}, as in v5e:4x4 or h200:8",
            fix="use one of these, or pass the figures: Topology(name, chip=Chip(...))",
        )
    return _CHIPS[kind]


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
    dims = _CHIPS[name].torus_dims
    if not dims:
        return (len(devices),)
    coords = [tuple(device.coords)[:dims] for device in devices]
    box = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
    slices = {getattr(device, "slice_index", 0) for device in devices}
    per_slice = len(devices) // len(slices) // _CHIPS[name].cores
    return box if math.prod(box) == per_slice else (per_slice,) + (1,) * (dims - 1)


def _chip_to_json(chip: Chip) -> dict[str, Any]:
    data = dataclasses.asdict(chip)
    data["flops"] = dict(chip.flops)
    data["ici"] = chip.ici._asdict()
    data["dcn"] = chip.dcn._asdict()
    data["core"] = chip.core._asdict() if chip.core else None
    data["measured"] = [m._asdict() for m in chip.measured]
    return data


def _chip_from_json(data: dict[str, Any]) -> Chip:
    own = ("flops", "ici", "dcn", "core", "measured")
    rest = {k: v for k, v in data.items() if k not in own}
    core = data.get("core")
    return Chip(
        flops=tuple((dtype, float(data["flops"][dtype])) for dtype in DTYPES),
        ici=Link(**data["ici"]),
        dcn=Link(**data["dcn"]),
        core=Link(**core) if core else None,
        measured=tuple(Measured(**m) for m in data.get("measured", ())),
        **rest,
    )


# ---------------------------------------------------------------------------------------------
# Which link an atom of a mesh runs over.


@lru_cache(maxsize=256)
def _atom_links(topology: Topology, mesh: Mesh) -> tuple[Link, ...]:
    chip = topology.chip
    fast = _torus_links(topology, mesh) if chip.torus_dims else (chip.ici,) * len(mesh.sizes)
    links = []
    for atom in mesh.atoms:
        far = atom.pre < mesh.dcn_sizes[atom.axis]
        if not chip.torus_dims:
            far = far or _leaves_host(mesh, atom.stride, atom.size, chip.per_host)
        links.append(chip.dcn if far else fast[atom.axis])
    return tuple(links)


def _leaves_host(mesh: Mesh, stride: int, size: int, per_host: int) -> bool:
    """Whether some two neighbours along an atom sit in different hosts (by device id)."""
    ids = mesh.device_ids
    return any(
        ids[p] // per_host != ids[p + stride * k] // per_host
        for p in range(mesh.size)
        if p // stride % size == 0
        for k in range(1, size)
    )


def _torus_links(topology: Topology, mesh: Mesh) -> tuple[Link, ...]:
    """For each axis: the links of the torus dims that it covers, minor axes first to choose."""
    shape = _all_dims(topology)
    free = list(range(len(shape)))
    links = [_dims_link(topology, ())] * len(mesh.sizes)
    for axis in reversed(range(len(mesh.sizes))):
        size = mesh.sizes[axis] // mesh.dcn_sizes[axis]
        dims = _cover(size, free, shape)
        links[axis] = _dims_link(topology, dims)
        free = [dim for dim in free if dim not in dims]
    return tuple(links)


def _all_dims(topology: Topology) -> tuple[int, ...]:
    """The torus dims, and the cores of a chip as one more where they are devices."""
    cores = topology.chip.cores
    return (*topology.shape, cores) if cores > 1 else topology.shape


def _cover(size: int, free: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The fewest free torus dims whose sizes multiply to `size`, most minor first; () if none."""
    if size == 1:
        return ()
    for count in range(1, len(free) + 1):
        for dims in combinations(reversed(free), count):
            if math.prod(shape[dim] for dim in dims) == size:
                return dims
    return ()


def _dims_link(topology: Topology, dims: Sequence[int]) -> Link:
    """Both directions of every dim that is a ring, one of every dim that is a line."""
    chip = topology.chip
    if chip.core is not None and dims == (len(topology.shape),):
        return chip.core
    dims = [dim for dim in dims if dim < len(topology.shape)]
    ways = sum(2 if topology.shape[dim] % chip.wrap == 0 else 1 for dim in dims)
    return Link(chip.ici.bandwidth * max(ways, 1), chip.ici.latency)
