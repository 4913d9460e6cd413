"""`Topology`: a machine's devices and links. `Chip`: the figures of one kind of device."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import MeshError, described
from spmd.mesh.mesh import Mesh


class Link(NamedTuple):
    """A device's link along a mesh axis: the bytes/s that it can send, and latency in seconds."""

    bandwidth: float  # bytes/s that one device can send while it receives as much
    latency: float  # seconds until the first byte of a message arrives


class CollectiveSpeed(NamedTuple):
    """Measured latency (s), bandwidth (bytes/s) of a collective, among `devices` of one host."""

    kind: str
    devices: int
    latency: float  # seconds that a collective of almost no bytes takes
    bandwidth: float  # bytes/s that each device sends in a large one, counted as a ring does


DTYPES = ("f32", "bf16", "f16", "i8", "fp8")  # the dtypes that a chip's peak is given for


@dataclass(frozen=True)
class Chip:
    """A kind of device: arithmetic, memory, links; in operations/s, bytes, bytes/s of a device."""

    name: str  # as in `Topology("name:shape")`
    flops: tuple[tuple[str, float], ...]  # (one of `DTYPES`, operations/s of matrix products)
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s from device memory
    # Torus chips: one link to one neighbour, one way. Switched chips: all that one device can send
    # to the others of its host.
    ici: Link
    dcn: Link  # to other slices (torus) or other hosts (switched)
    torus_dims: int = 0  # 0 for chips behind a switch
    wrap: int = 0  # torus dims whose size is a multiple of this are closed into rings; 0: none
    per_host: int = 8  # devices that share a host
    cores: int = 1  # devices at each point of the torus, joined by `core`
    core: Link | None = None
    # Switched chips: times of collectives inside a host, used instead of `ici`.
    measured: tuple[CollectiveSpeed, ...] = ()
    # Share of a collective's time that is saved by running it beside arithmetic. The rest is lost:
    # both share cores and memory, and the backend's schedule differs from ours.
    overlap: float = 1.0
    # (kind of kernel, share of a matrix product's speed at which it computes), as measured; kinds
    # that are not listed count as 1.0.
    efficiency: tuple[tuple[str, float], ...] = ()
    # Bytes/s, read and written, at which 8-bit operands of products are transposed; 0 where
    # products read them in any order.
    byte_transpose: float = 0.0
    # seconds of a kernel beside its arithmetic or traffic, in which it fills up and runs dry
    kernel: float = 0.0
    # bytes/s between a device's memory and its host's, one way; a guess (PCIe 4.0) if not stated
    host_bandwidth: float = 25e9


def _peaks(teraflops: tuple[float, ...]) -> tuple[tuple[str, float], ...]:
    """Returns `Chip.flops` from 10^12 operations/s in f32, in bf16 and f16, in i8, and in fp8."""
    f32, half, i8, fp8 = (t * 1e12 for t in teraflops)
    return tuple(zip(DTYPES, (f32, half, half, i8, fp8), strict=True))


_ICI_LATENCY = 1e-6

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
#   What H200s behind one switch take was measured with `tools/run calibrate` on four of them, jax
#   0.11.2; H100s have the same links. Under their power limit products that follow one another
#   reach 70% of the data sheet's peak (fp8 1,380 TFLOP/s), copies 90%, transposes of 8-bit operands
#   a quarter, and three quarters of what could be hidden behind arithmetic is: so steps of 8 and 32
#   layers are predicted within 5% (docs/benchmarks/training.md). cuDNN's attention, both ways
#   together, reaches 63% of what products do, ours over pages half. Of other chips' kernels nothing
#   is known.
#   B200: the DGX B200 data sheet, an eighth of it, dense. MI300X: AMD's data sheet, dense; of its
#   seven links to the others of a host one way each. Nothing was measured on either: what they
#   reach of these figures is less.
# CPU: a stand-in, so that plans can be made for hosts without accelerators.
_IN_PROGRAM = 30e-6  # small ones take 10 to 55, however many devices and of whichever kind
_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
_HOPPER = tuple(
    CollectiveSpeed(kind, devices, _IN_PROGRAM, rate * 1e9)
    for devices, *rates in ((2, 178, 250, 181, 195, 183), (4, 227, 280, 208, 196, 262))
    for kind, rate in zip(_COLLECTIVES, rates, strict=True)
)
_MEASURED: dict[str, Any] = {
    "measured": _HOPPER,
    "efficiency": (("attention", 0.63), ("paged_attention", 0.5)),
    "byte_transpose": 1.2e12,
    "host_bandwidth": 55e9,  # of PCIe 5.0's 63; a guess, too
    "kernel": 1.2e-6,  # 400 of a step of Llama 2 7B for one token: docs/benchmarks/decoding.md
}
_GIB, _GB = 2**30, 10**9


def _tpu(
    name: str, teraflops: tuple[float, ...], memory: int, rate: float, port: float, dcn: float,
    torus_dims: int, wrap: int, per_host: int, **more: Any,
) -> Chip:  # fmt: skip
    links = Link(port, _ICI_LATENCY), Link(dcn, 20e-6)
    return Chip(name, _peaks(teraflops), memory, rate, *links, torus_dims, wrap, per_host, **more)


def _gpu(
    name: str, teraflops: tuple[float, ...], memory: int, rate: float, nvlink: float, dcn: float,
    **more: Any,
) -> Chip:  # fmt: skip
    links = Link(nvlink, 4e-6), Link(dcn, 10e-6)
    return Chip(name, _peaks(teraflops), memory, rate, *links, overlap=0.75, **more)


_HALVES = {"cores": 2, "core": Link(600e9, _ICI_LATENCY)}
_ALL = (
    _tpu("v4", (275, 275, 275, 275), 32 * _GIB, 1.2e12, 50e9, 6.25e9, 3, 4, 4),
    _tpu("v5e", (197, 197, 393, 197), 16 * _GIB, 819e9, 50e9, 3.125e9, 2, 16, 8),
    _tpu("v5p", (459, 459, 918, 459), 95 * _GIB, 2.765e12, 100e9, 6.25e9, 3, 4, 4),
    _tpu("v6e", (918, 918, 1836, 918), 32 * _GIB, 1.64e12, 100e9, 12.5e9, 2, 16, 8),
    _tpu(
        "tpu7x", (1153.5, 1153.5, 1153.5, 2307), 96 * _GB, 3.69e12, 50e9, 6.25e9, 3, 4, 8, **_HALVES
    ),
    _gpu("a100", (156, 312, 624, 312), 80 * _GB, 2.039e12, 300e9, 25e9),
    _gpu("h100", (345, 690, 1380, 1380), 80 * _GB, 3.02e12, 450e9, 50e9, **_MEASURED),
    _gpu("h200", (345, 690, 1380, 1380), 141 * _GB, 4.32e12, 450e9, 50e9, **_MEASURED),
    _gpu("b200", (1125, 2250, 4500, 4500), 180 * _GB, 8e12, 900e9, 50e9),
    _gpu("mi300x", (654, 1307, 2615, 2615), 192 * _GB, 5.3e12, 448e9, 50e9),
    Chip(
        "cpu",
        _peaks((0.1,) * 4),
        8 * _GIB,
        20e9,
        Link(5e9, 10e-6),
        Link(1e9, 50e-6),
        per_host=64,
        overlap=0.0,  # virtual devices send with the cores that compute
    ),
)
CHIPS = {chip.name: chip for chip in _ALL}

# Slices of TPUs as clouds name them: `v5p-256` has 256 cores, which are 128 chips.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
    "16x16x16", "16x16x24",
)  # fmt: skip
_SLICES = {
    "v4": ("v4", 2, _CUBE[:-2]),
    "v5e": ("v5e", 1, _FLAT),
    "v5litepod": ("v5e", 1, _FLAT),
    "v5p": ("v5p", 2, _CUBE),
    "v6e": ("v6e", 1, _FLAT),
}
"""How a slice's name begins: its chip, what each counts in the name, and the shapes there are."""


def slices_of(kind: str) -> dict[str, str]:
    """Returns slice -> topology, as `v5p-256` -> `v5p:4x4x8`, of a kind; {} if it is unknown."""
    chip, counts, shapes = _SLICES.get(kind, ("", 0, ()))
    return {
        f"{kind}-{counts * math.prod(map(int, shape.split('x')))}": f"{chip}:{shape}"
        for shape in shapes
    }


# Patterns of `device.device_kind`, most specific first.
DEVICE_KINDS = (
    (r"TPU v4", "v4"), (r"TPU v5 ?lite|TPU v5e", "v5e"), (r"TPU v5", "v5p"), (r"TPU v6", "v6e"),
    (r"TPU ?7", "tpu7x"), (r"A100", "a100"), (r"H200", "h200"), (r"H100", "h100"), (r"cpu", "cpu"),
)  # fmt: skip


@dataclass(frozen=True, init=False)
class Topology:
    """A machine, for predictions of time and memory: devices of one kind, and how they are wired.

    Args:
      name: `chip:shape`, as `v5e:4x4`, `v4:4x4x8` or `h200:8`, or `h200:16x4` for 16 hosts of 4
        GPUs, where 8 share a host otherwise; or a slice of TPUs as clouds name it, where v4 and v5p
        count cores, two of a chip: `v5p-256` is `v5p:4x4x8`.
      chip: the figures of a chip that is not in the table, or a correction of one that is.

    Raises:
      MeshError: an unknown chip, a shape that it cannot have, or a slice that there is not.

    Example:
      >>> Topology("v5e:4x4").count
      16
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    def __init__(self, name: str, chip: Chip | None = None) -> None:
        if slices := slices_of(name.partition("-")[0]):
            if name not in slices:
                raise MeshError(
                    f"there is no slice {name!r}",
                    required=f"one of {', '.join(slices)}",
                    fix="use one of these, or write chip and shape, as v5p:4x4x8",
                )
            name = slices[name]
        kind, _, shape = name.partition(":")
        if chip is None and kind not in CHIPS:
            raise MeshError(
                f"unknown chip {kind!r}",
                required=f"one of {', '.join(CHIPS)}, as in v5e:4x4 or h200:8; or a slice, as "
                "v5p-256",
                fix="use one of these, or write the figures of another chip into a file that "
                "spmd.Topology('v5e:4x4').save(path) has made, and pass spmd.Topology.load(path)",
            )
        chip = chip or CHIPS[kind]
        fits = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) is not None
        sizes = tuple(int(part) for part in shape.split("x")) if fits else ()
        dims = chip.torus_dims
        if not dims and len(sizes) == 2:
            chip, sizes = replace(chip, per_host=sizes[1]), (math.prod(sizes),)
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
        """The number of devices: that of chips, times the devices of a chip (2 of a tpu7x)."""
        return math.prod(self.shape) * self.chip.cores

    @property
    def platform(self) -> str | None:
        """`tpu`, `cuda`, `rocm` or `cpu`: the devices' platform; None if the chip is unknown."""
        kind = self.name.partition(":")[0]
        if kind not in CHIPS:
            return None
        if self.chip.torus_dims:
            return "tpu"
        return {"cpu": "cpu", "mi300x": "rocm"}.get(kind, "cuda")

    @property
    def hbm_bytes(self) -> int:
        """The memory of one device, in bytes."""
        return self.chip.hbm_bytes

    @property
    def hbm_bandwidth(self) -> float:
        """The bandwidth between one device and its memory, in bytes/s."""
        return self.chip.hbm_bandwidth

    def peak_flops(self, dtype: str) -> float:
        """Returns a device's peak operations/s of products in an MLIR dtype: `bf16`, `f8E4M3FN`."""
        peaks = dict(self.chip.flops)
        if dtype.startswith(("f8", "f4")):
            return peaks["fp8"]
        narrow = dtype in ("ui8", "i4", "ui4", "i2", "ui2")
        return peaks.get(dtype, peaks["i8" if narrow else "f32"])

    def arithmetic_seconds(self, flops: float, dtype: str, kernel: str = "") -> float:
        """Returns the seconds that one device needs for some operations.

        Args:
          flops: the number of operations.
          dtype: the MLIR element type of the operands.
          kernel: the kind of kernel, as in `Chip.efficiency`; empty for matrix products.
        """
        return flops / (self.peak_flops(dtype) * dict(self.chip.efficiency).get(kernel, 1.0))

    def atom_links(self, mesh: Mesh) -> tuple[Link, ...]:
        """Returns the link along each of `mesh.atoms`: `dcn` across slices or (no torus) hosts.

        In a mesh axis that covers whole torus dims it has the bandwidth of all their links, twice
        where they are rings, which send both ways; behind a switch all of a device's bandwidth.
        """
        return _atom_links(self, mesh)

    def detour(self, mesh: Mesh, axis: int) -> float:
        """Returns by which factor an all-to-all along an axis is slower than sends to neighbours.

        In a torus a message passes the links of a quarter of a ring, or as much of a line, so in a
        dim of 8 chips each link carries twice what a chip sends into it: 2. The factor is 1 behind
        a switch, and for an axis that covers no torus dims.
        """
        if not self.chip.torus_dims:
            return 1.0
        sizes = [self.shape[dim] for dim in _torus_dims(self, mesh)[axis] if dim < len(self.shape)]
        each = [_ways(self.chip, size) for size in sizes]
        return max([1.0, *(sum(each) * s / 4 / w for s, w in zip(sizes, each, strict=True))])

    def measured(self, kind: str, devices: int) -> CollectiveSpeed | None:
        """Returns the measured speed of `kind`, such as `all_gather`, in a host; None if unknown.

        If this number of `devices` was not measured: of the next larger one, else the largest.
        """
        known = sorted([m for m in self.chip.measured if m.kind == kind], key=lambda m: m.devices)
        return next((m for m in known if m.devices >= devices), known[-1] if known else None)

    def save(self, path: str | Path) -> None:
        """Writes the topology as JSON, to be edited and read back with `load`."""
        chip = {n: v._asdict() if isinstance(v, Link) else v for n, v in vars(self.chip).items()}
        chip |= {"flops": dict(self.chip.flops), "efficiency": dict(self.chip.efficiency)}
        chip["measured"] = [speed._asdict() for speed in self.chip.measured]
        text = json.dumps({"name": self.name, "chip": chip}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> "Topology":
        """Returns the topology that `save` wrote.

        Raises:
          MeshError: a file that is not a topology.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            stated = data["chip"]
            own: dict[str, Any] = {
                name: Link(**stated[name]) for name in ("ici", "dcn", "core") if stated.get(name)
            }
            own["flops"] = tuple((dtype, float(stated["flops"][dtype])) for dtype in DTYPES)
            own["efficiency"] = tuple(stated.get("efficiency", {}).items())
            own["measured"] = tuple(CollectiveSpeed(**m) for m in stated.get("measured", ()))
            return Topology(data["name"], Chip(**{**stated, **own}))
        except (KeyError, TypeError, ValueError) as error:
            raise MeshError(
                f"{path} does not hold a topology: {error}",
                fix='write one with Topology("v5e:4x4").save(path) and edit that',
            ) from error

    @staticmethod
    def for_devices(devices: Sequence[Any]) -> "Topology":
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
                fix="write its figures into a file that spmd.Topology('v5e:4x4').save(path) has "
                "made, and pass topology=spmd.Topology.load(path)",
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


def as_topology(topology: Any) -> Topology:
    """Returns a topology, or that of a name; MeshError for anything else."""
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str):
        return Topology(topology)
    raise MeshError(
        f"{described(topology)} is not a topology",
        required="a spmd.Topology, or its name",
        fix='write topology="v5e:4x4", or topology="v5p-256"',
    )


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
    """Returns for each mesh axis the indices of the fewest torus dims that make its size, or ()."""
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
    """Returns in how many directions a torus dim of this size sends: 2 for a ring, 1 for a line."""
    return 2 if chip.wrap and size % chip.wrap == 0 else 1
