"""Chips: peaks, memory and links of one device, as published and as measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd.errors import MeshError


class Link(NamedTuple):
    """One device's connection to its neighbours along a mesh axis.

    Attributes:
      bandwidth: bytes/s that one device can send while it receives as much.
      latency: seconds until the first byte of a message arrives.
    """

    bandwidth: float
    latency: float


class Measured(NamedTuple):
    """Measured speed of one kind of collective among some devices behind a switch.

    Attributes:
      kind: as in `spmd.reshard.comm.KINDS`.
      devices: how many exchange with one another.
      latency: seconds that a collective of almost no bytes takes.
      bandwidth: bytes/s that each device sends in a large one, counting bytes as a ring does.
    """

    kind: str
    devices: int
    latency: float
    bandwidth: float


DTYPES = ("f32", "bf16", "f16", "i8", "fp8")
"""The dtypes that a chip's peak is given for."""


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
      core: the link between the devices of one chip; None where a chip is one device.
      measured: for switched chips: times of collectives inside a host, used instead of `ici`.
      overlap: share of a collective's time that is saved by running it beside arithmetic. The rest
        is lost: both share cores and memory, and the backend's schedule differs from ours.
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
#   What H200s behind one switch take was measured with `tools/run calibrate` on four of them, jax
#   0.11.2: the latency is the median of all. H100s have the same links. Of the data sheet's peaks,
#   large products reach 80% there and copies 90%, and of what could be hidden behind arithmetic a
#   fifth is: so eleven plans of one training step are predicted within 8%
#   (docs/benchmarks/plans.md).
# CPU: a stand-in, so that plans can be made for hosts without accelerators.
_IN_PROGRAM = 55e-6  # one figure for all: they differ by no more than repeated measurements do
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
CHIPS = {
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


def known_chip(kind: str) -> Chip:
    """The chip with this name.

    Raises:
      MeshError: it is not in the table.
    """
    if kind not in CHIPS:
        raise MeshError(
            f"unknown chip {kind!r}",
            required=f"one of {', '.join(CHIPS)}, as in v5e:4x4 or h200:8",
            fix="use one of these, or pass the figures: Topology(name, chip=Chip(...))",
        )
    return CHIPS[kind]


def chip_to_json(chip: Chip) -> dict[str, Any]:
    """A chip as a dict that `json` can write."""
    data = dataclasses.asdict(chip)
    data["flops"] = dict(chip.flops)
    data["ici"] = chip.ici._asdict()
    data["dcn"] = chip.dcn._asdict()
    data["core"] = chip.core._asdict() if chip.core else None
    data["measured"] = [m._asdict() for m in chip.measured]
    return data


def chip_from_json(data: dict[str, Any]) -> Chip:
    """Reads what `chip_to_json` makes.

    Raises:
      KeyError, TypeError, ValueError: the dict is not one that `chip_to_json` made.
    """
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
