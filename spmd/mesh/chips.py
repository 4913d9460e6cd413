"""Chips: peaks, memory and links of one device, as published and as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Link(NamedTuple):
    """One device's connection to its neighbours along a mesh axis."""

    bandwidth: float  # bytes/s that one device can send while it receives as much
    latency: float  # seconds until the first byte of a message arrives


class CollectiveSpeed(NamedTuple):
    """Measured speed of one kind of collective among some devices behind a switch."""

    kind: str
    devices: int
    latency: float  # seconds that a collective of almost no bytes takes
    bandwidth: float  # bytes/s that each device sends in a large one, counted as a ring does


DTYPES = ("f32", "bf16", "f16", "i8", "fp8")  # the dtypes that a chip's peak is given for


@dataclass(frozen=True)
class Chip:
    """One accelerator and its links; every figure is per device."""

    name: str  # as in `Topology("name:shape")`
    flops: tuple[tuple[str, float], ...]  # (one of `DTYPES`, operations/s of matrix products)
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s from device memory
    # Torus chips: one link to one neighbour, one way. Switched chips: all that one device can send
    # to the others of its host.
    ici: Link
    dcn: Link  # to other slices (torus) or other hosts (switched)
    torus_dims: int = 0  # 0 for chips behind a switch
    wrap: int = 0  # torus dims whose size is a multiple of this are closed into rings
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


def _peaks(teraflops: tuple[float, ...]) -> tuple[tuple[str, float], ...]:
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
#   together, reaches 63% of what products do: heads of width 128, 4096 causal tokens. Of other
#   chips' kernels nothing is known.
# CPU: a stand-in, so that plans can be made for hosts without accelerators.
_IN_PROGRAM = 30e-6  # small ones take 10 to 55, however many devices and of whichever kind
_HOPPER = tuple(
    CollectiveSpeed(kind, devices, _IN_PROGRAM, rate * 1e9)
    for devices, *rates in ((2, 178, 250, 181, 195, 183), (4, 227, 280, 208, 196, 262))
    for kind, rate in zip(
        ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter"),
        rates,
        strict=True,
    )
)
_MEASURED: dict[str, Any] = {
    "measured": _HOPPER,
    "efficiency": (("attention", 0.63),),
    "byte_transpose": 1.2e12,
}
_GIB, _GB = 2**30, 10**9
_Teraflops = tuple[float, float, float, float]
"""Peaks of f32, of bf16 and f16, of i8, and of fp8 products."""


def _tpu(
    name: str, teraflops: _Teraflops, memory: int, rate: float, port: float, dcn: float,
    torus_dims: int, wrap: int, per_host: int, **more: Any,
) -> Chip:  # fmt: skip
    links = Link(port, _ICI_LATENCY), Link(dcn, 20e-6)
    return Chip(name, _peaks(teraflops), memory, rate, *links, torus_dims, wrap, per_host, **more)


def _gpu(
    name: str, teraflops: _Teraflops, memory: int, rate: float, nvlink: float, dcn: float,
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


# Patterns of `device.device_kind`, most specific first.
DEVICE_KINDS = (
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


def chip_to_json(chip: Chip) -> dict[str, Any]:
    """A chip as a dict that `json` can write."""
    data = {
        name: value._asdict() if isinstance(value, Link) else value
        for name, value in vars(chip).items()
    }
    data |= {"flops": dict(chip.flops), "efficiency": dict(chip.efficiency)}
    data["measured"] = [m._asdict() for m in chip.measured]
    return data


def chip_from_json(data: dict[str, Any]) -> Chip:
    """Reads what `chip_to_json` makes; KeyError, TypeError or ValueError for anything else."""
    own: dict[str, Any] = {
        name: Link(**data[name]) for name in ("ici", "dcn", "core") if data.get(name)
    }
    own["flops"] = tuple((dtype, float(data["flops"][dtype])) for dtype in DTYPES)
    own["efficiency"] = tuple(data.get("efficiency", {}).items())
    own["measured"] = tuple(CollectiveSpeed(**m) for m in data.get("measured", ()))
    return Chip(**{**data, **own})
