"""Measures the machine at hand and writes a topology file for `spmd.Topology.load`.

Matrix products give the peaks, a copy gives the memory bandwidth, and collectives of growing size,
over each axis and over all devices, give each link's latency and bandwidth: the least-squares fit
of `spmd.reshard.comm`'s model to the measured times. Every other figure is the known chip's.

Example:
    tools/run calibrate --out topo.json --mesh data=2,model=2
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import jax
from absl import app, flags

import spmd
from spmd.mesh.topology import Topology
from spmd.reshard.comm import collective_seconds
from tools.calibration import (
    KINDS,
    Sample,
    axis_sets,
    calibrated,
    measure,
    memory_bandwidth,
    peak_flops,
)

_OUT = flags.DEFINE_string("out", "topology.json", "file to write")
_MESH = flags.DEFINE_string("mesh", "", "axes to measure, e.g. data=2,model=2; all in one if empty")
_SMALLEST = flags.DEFINE_integer("smallest", 4 << 10, "bytes of the smallest message of a device")
_LARGEST = flags.DEFINE_integer("largest", 256 << 20, "bytes of the largest message of a device")
_SHAPES = flags.DEFINE_list("shapes", ["2048", "4096", "8192"], "sizes of square matrix products")
_REPEAT = flags.DEFINE_integer("repeat", 10, "timed runs of each; the median counts")


def parse_mesh(text: str, count: int) -> spmd.Mesh:
    """`data=2,model=2`, or one axis of all devices."""
    if not text:
        return spmd.make_mesh(data=count)
    return spmd.make_mesh(**{n: int(size) for n, size in (p.split("=") for p in text.split(","))})


def sizes() -> Iterator[int]:
    """Message sizes, each four times the one before."""
    size = _SMALLEST.value
    while size <= _LARGEST.value:
        yield size
        size *= 4


def main(argv: Sequence[str]) -> None:
    """Measures, prints measured beside fitted times, writes the file."""
    del argv
    devices = jax.devices()
    base = Topology.for_devices(devices)
    mesh = parse_mesh(_MESH.value, len(devices))
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}, mesh {mesh}")
    shapes, repeat = [int(size) for size in _SHAPES.value], _REPEAT.value
    peaks = {
        short: peak_flops(dtype, shapes, repeat)
        for short, dtype in (("f32", "float32"), ("bf16", "bfloat16"))
    }
    hbm = memory_bandwidth(4 * _LARGEST.value, repeat)
    samples = [
        measure(mesh, axes, kind, size, repeat)
        for axes in axis_sets(mesh)
        for kind in KINDS
        for size in sizes()
    ]
    if not samples:
        raise app.UsageError("collectives take at least two devices")
    topology = calibrated(base, mesh, samples, peaks, hbm)
    print_figures(base, topology)
    print_samples(samples, mesh, topology)
    topology.save(_OUT.value)
    print(f"wrote {_OUT.value}")


def print_figures(base: Topology, topology: Topology) -> None:
    """Known beside measured figures."""
    print("\n| figure | known | measured |\n| --- | --- | --- |")
    for dtype in ("f32", "bf16"):
        before, after = base.peak_flops(dtype) / 1e12, topology.peak_flops(dtype) / 1e12
        print(f"| {dtype} products, TFLOP/s | {before:.3g} | {after:.3g} |")
    before, after = base.hbm_bandwidth / 1e9, topology.hbm_bandwidth / 1e9
    print(f"| memory, GB/s | {before:.4g} | {after:.4g} |")
    for name in ("ici", "dcn"):
        old, new = getattr(base.chip, name), getattr(topology.chip, name)
        print(f"| {name} link, GB/s | {old.bandwidth / 1e9:.4g} | {new.bandwidth / 1e9:.4g} |")
        print(f"| {name} latency, us | {old.latency * 1e6:.3g} | {new.latency * 1e6:.3g} |")
    for m in topology.chip.measured:
        what = f"{m.kind} among {m.devices}"
        print(f"| {what}, us + GB/s | - | {m.latency * 1e6:.3g} + {m.bandwidth / 1e9:.4g} |")


def print_samples(samples: Sequence[Sample], mesh: spmd.Mesh, topology: Topology) -> None:
    """Every measured collective beside the fitted model, and how far they are apart."""
    print("\n| collective | axes | KiB in | measured, us | fitted, us | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    errors = []
    for s in samples:
        atoms = mesh.atoms_of(s.axes)
        fitted = collective_seconds(s.kind, atoms, s.local_in, s.local_out, mesh, topology)
        errors.append(abs(math.log(fitted / s.seconds)))
        print(f"| {s.kind} | {', '.join(s.axes)} | {s.local_in / 1024:.4g} | {s.seconds * 1e6:.1f} "
              f"| {fitted * 1e6:.1f} | {fitted / s.seconds:.2f} |")  # fmt: skip
    print(f"\nmedian factor between fitted and measured: {math.exp(statistics.median(errors)):.2f}")


if __name__ == "__main__":
    app.run(main)
