"""Measures the machine at hand and writes a topology file for `spmd.Topology.load`.

Matrix products give the peaks, a copy gives the memory bandwidth, and collectives of growing size,
over each axis and over all devices, give each link's latency and bandwidth: the least-squares fit
of `spmd.reshard.comm`'s model to the measured times. Every other figure is the known chip's.

Example:
    tools/run calibrate --out topo.json --mesh data=2,model=2
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence

import jax

import spmd
from spmd.cli.flags import Parser, positive, words
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


def parse_mesh(text: str, count: int) -> spmd.Mesh:
    """`data=2,model=2`, or one axis of all devices."""
    if not text:
        return spmd.make_mesh(data=count)
    return spmd.make_mesh(**{n: int(size) for n, size in (p.split("=") for p in text.split(","))})


def sizes(given: argparse.Namespace) -> Iterator[int]:
    """Message sizes, each four times the one before."""
    size = given.smallest
    while size <= given.largest:
        yield size
        size *= 4


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run calibrate", __doc__)
    add = parser.add_argument
    add("--out", default="topology.json", help="file to write")
    add("--mesh", default="", help="axes to measure, e.g. data=2,model=2; all in one if empty")
    add(
        "--smallest",
        type=positive,
        default=4 << 10,
        help="bytes of the smallest message of a device",
    )
    add(
        "--largest",
        type=positive,
        default=256 << 20,
        help="bytes of the largest message of a device",
    )
    add(
        "--shapes",
        type=words,
        default="2048,4096,8192",
        help="sizes of square matrix products",
    )
    add("--repeat", type=positive, default=10, help="timed runs of each; the median counts")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints measured beside fitted times, writes the file."""
    given = make_parser().parse_args(arguments)
    devices = jax.devices()
    base = Topology.for_devices(devices)
    mesh = parse_mesh(given.mesh, len(devices))
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}, mesh {mesh}")
    shapes, repeat = [int(size) for size in given.shapes], given.repeat
    peaks = {
        short: peak_flops(dtype, shapes, repeat)
        for short, dtype in (("f32", "float32"), ("bf16", "bfloat16"))
    }
    hbm = memory_bandwidth(4 * given.largest, repeat)
    samples = [
        measure(mesh, axes, kind, size, repeat)
        for axes in axis_sets(mesh)
        for kind in KINDS
        for size in sizes(given)
    ]
    if not samples:
        sys.exit("error: collectives take at least two devices")
    topology = calibrated(base, mesh, samples, peaks, hbm)
    print_figures(base, topology)
    print_samples(samples, mesh, topology)
    topology.save(given.out)
    print(f"wrote {given.out}")


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
    main()
