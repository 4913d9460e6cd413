"""Measures the machine at hand and writes a topology file for `spmd.Topology.load`.

Matrix products give the peaks, a copy gives the memory bandwidth, and collectives of growing size,
over each axis and over all devices, give each link's latency and bandwidth: the least-squares fit
of `spmd.reshard.comm`'s model to the measured times. Every other figure is the known chip's.
Every measured thing runs many times inside one program, so that what the host spends on starting a
program is not taken for latency.

Example:
    tools/run calibrate --out topo.json --mesh data=2,model=2
"""

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, positive, words
from spmd.cli.specs import mesh_axes
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import jax_mesh
from spmd.mesh.topology import CollectiveSpeed, Link, Topology
from spmd.reshard.comm import collective_seconds, latency_steps, wire_bytes

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")

TRIPS = 16
"""Times that one program does what is measured."""


class Sample(NamedTuple):
    """One measured collective."""

    kind: str  # as in `spmd.reshard.comm`
    axes: tuple[str, ...]  # names of the mesh axes that it goes over
    # local_in, local_out: bytes of one device's piece before and after
    local_in: int
    local_out: int
    seconds: float  # median time


# Measuring.


def seconds_of(step: Callable[[Any], Any], x: Any, repeat: int) -> float:
    """Median time of one `step`, which maps a value to one like it, among `TRIPS` in a loop."""
    run = jax.jit(lambda x: lax.fori_loop(0, TRIPS, lambda _, x: step(x), x), donate_argnums=0)
    x = jax.block_until_ready(run(x))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        x = jax.block_until_ready(run(x))
        times.append((time.perf_counter() - start) / TRIPS)
    return statistics.median(times)


def peak_flops(dtype: str, sizes: Sequence[int], repeat: int) -> float:
    """The most operations/s that a product of square matrices of zeros reaches on one device."""
    best = 0.0
    for size in sizes:
        w = jnp.zeros((size, size), dtype)
        best = max(best, 2 * size**3 / seconds_of(partial(jnp.matmul, w), jnp.copy(w), repeat))
    return best


def memory_bandwidth(size: int, repeat: int) -> float:
    """Bytes/s read and written when `size` bytes, more than any cache holds, are changed."""
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / seconds_of(lambda x: x + 1, x, repeat)


def collective(kind: str, axes: tuple[str, ...], count: int, x: Any) -> Any:
    """One collective inside `shard_map`, of this device's piece; its result has the same shape."""
    if kind == "all_gather":
        return lax.all_gather(x, axes, tiled=True)[: len(x)]
    if kind == "reduce_scatter":
        return lax.dynamic_update_slice(x, lax.psum_scatter(x, axes, tiled=True), (0,))
    if kind == "all_reduce":
        return lax.psum(x, axes)
    if kind == "all_to_all":
        return lax.all_to_all(x, axes, 0, 0, tiled=True)
    return lax.ppermute(x, axes, [(i, (i + 1) % count) for i in range(count)])


def measure(mesh: Mesh, axes: tuple[str, ...], kind: str, size: int, repeat: int) -> Sample:
    """Times one collective over some axes, of a piece of `size` bytes (the larger of its ends)."""
    count = mesh.extent(mesh.atoms_of(axes))
    rows = max(1, size // 4 // count) * count
    if kind == "all_gather":
        rows //= count
    where, spec = jax_mesh(mesh), PartitionSpec(mesh.axis_names)
    step = jax.shard_map(
        partial(collective, kind, axes, count),
        mesh=where,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    # Zeros: added up as often as one likes they stay what they are.
    x = jax.device_put(np.zeros(rows * mesh.size, np.float32), NamedSharding(where, spec))
    out = {"all_gather": rows * count, "reduce_scatter": rows // count}.get(kind, rows)
    return Sample(kind, axes, 4 * rows, 4 * out, seconds_of(step, x, repeat))


def axis_sets(mesh: Mesh) -> list[tuple[str, ...]]:
    """Each axis of more than one device, and all of them together."""
    single: list[tuple[str, ...]] = [(name,) for name, size in mesh.shape.items() if size > 1]
    together = tuple(name for axes in single for name in axes)
    return [*single, together] if len(single) > 1 else single


# Fitting.


def _fit(steps: Sequence[int], samples: Sequence[Sample], mesh: Mesh) -> tuple[float, float]:
    """Latency of a step, and seconds for each byte: with these the model is nearest to the samples.

    In relative error; time is latency x steps + bytes / bandwidth.
    """
    sent = [
        wire_bytes(s.kind, mesh.extent(mesh.atoms_of(s.axes)), s.local_in, s.local_out)
        for s in samples
    ]
    rows = [(n / s.seconds, b / s.seconds) for n, b, s in zip(steps, sent, samples, strict=True)]
    (latency, pace), *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    if latency <= 0 or pace <= 0:  # one of the terms is lost in the other's noise
        latency = max(latency, min(s.seconds for s in samples) / 100)
        pace = statistics.median(
            max(1e-15, (1 - row[0] * latency) / row[1]) for row in rows if row[1]
        )
    return float(latency), float(pace)


def calibrated(
    base: Topology, mesh: Mesh, samples: Sequence[Sample], peaks: dict[str, float], hbm: float
) -> Topology:
    """The topology with the figures that were measured.

    Behind a switch, kinds of collectives differ by more than their bytes: each has figures of its
    own for every number of devices that was measured. The links are shared out as the topology
    does: of a torus, an axis has the links of all the dims that it covers; behind a switch all of a
    device's bandwidth, and between hosts the network's.
    """
    links = {"ici": base.chip.ici, "dcn": base.chip.dcn}
    for name, nominal in list(links.items()):
        mine = [s for s in samples if _slowest(base, mesh, s.axes)[0] == name]
        if mine:
            ways = _slowest(base, mesh, mine[0].axes)[1].bandwidth / nominal.bandwidth
            same = [s for s in mine if s.axes == mine[0].axes] if ways != 1 else mine
            atoms = [[mesh.atom_sizes[a] for a in mesh.atoms_of(s.axes)] for s in same]
            steps = [latency_steps(s.kind, sizes) for s, sizes in zip(same, atoms, strict=True)]
            latency, pace = _fit(steps, same, mesh)
            links[name] = Link(1 / pace / ways, latency)
    # For each kind and number of devices: the time of an empty one, and the pace of large ones.
    groups: dict[tuple[str, int], list[Sample]] = {}
    for s in () if base.chip.torus_dims else samples:
        if _slowest(base, mesh, s.axes)[0] == "ici":
            groups.setdefault((s.kind, mesh.extent(mesh.atoms_of(s.axes))), []).append(s)
    measured = []
    for (kind, devices), group in groups.items():
        latency, pace = _fit([1] * len(group), group, mesh)
        measured.append(CollectiveSpeed(kind, devices, latency, 1 / pace))
    known = dict(base.chip.flops)
    # Of dtypes that were not measured, the known ratio to bf16.
    by_bf16 = {dtype: peaks["bf16"] * each / known["bf16"] for dtype, each in known.items()}
    flops = tuple((dtype, peaks.get(dtype, by_bf16[dtype])) for dtype in known)
    chip = dataclasses.replace(
        base.chip,
        flops=flops,
        hbm_bandwidth=hbm,
        ici=links["ici"],
        dcn=links["dcn"],
        measured=tuple(measured),
    )
    return Topology(base.name, chip)


def _slowest(base: Topology, mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, Link]:
    """Which class of links a collective goes over, and what the topology says of it."""
    links = [base.atom_links(mesh)[a] for a in mesh.atoms_of(axes)]
    slowest = min(links, key=lambda link: link.bandwidth)
    return ("dcn" if slowest == base.chip.dcn else "ici"), slowest


# The command.


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run calibrate", __doc__)
    add = parser.add_argument
    add("--out", default="topology.json", help="file to write")
    add("--mesh", type=mesh_axes, help="axes to measure, as in data=2,model=2 (default: one)")
    add("--smallest", type=positive, default=4 << 10, help="bytes of a device's smallest message")
    add("--largest", type=positive, default=256 << 20, help="bytes of a device's largest message")
    add("--shapes", type=words, default="2048,4096,8192", help="sizes of square matrix products")
    add("--repeat", type=positive, default=10, help="timed runs of each; the median counts")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints measured beside fitted times, writes the file."""
    given = make_parser().parse_args(arguments)
    devices = jax.devices()
    base = Topology.for_devices(devices)
    mesh = spmd.make_mesh(**(given.mesh or {"data": len(devices)}))
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}, mesh {mesh}")
    shapes, repeat = [int(size) for size in given.shapes], given.repeat
    peaks = {
        short: peak_flops(dtype, shapes, repeat)
        for short, dtype in (("f32", "float32"), ("bf16", "bfloat16"))
    }
    hbm = memory_bandwidth(4 * given.largest, repeat)
    sizes = [size for n in range(32) if (size := given.smallest * 4**n) <= given.largest]
    samples = [
        measure(mesh, axes, kind, size, repeat)
        for axes in axis_sets(mesh)
        for kind in KINDS
        for size in sizes
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
    print()
    print_head(("figure", "known", "measured"))
    for dtype in ("f32", "bf16"):
        both = (t.peak_flops(dtype) / 1e12 for t in (base, topology))
        print_line([f"{dtype} products, TFLOP/s", *(f"{flops:.3g}" for flops in both)])
    print_line(["memory, GB/s", *(f"{t.hbm_bandwidth / 1e9:.4g}" for t in (base, topology))])
    for name in ("ici", "dcn"):
        links = [getattr(t.chip, name) for t in (base, topology)]
        print_line([f"{name} link, GB/s", *(f"{link.bandwidth / 1e9:.4g}" for link in links)])
        print_line([f"{name} latency, us", *(f"{link.latency * 1e6:.3g}" for link in links)])
    for m in topology.chip.measured:
        measured = f"{m.latency * 1e6:.3g} + {m.bandwidth / 1e9:.4g}"
        print_line([f"{m.kind} among {m.devices}, us + GB/s", "-", measured])


def print_samples(samples: Sequence[Sample], mesh: Mesh, topology: Topology) -> None:
    """Every measured collective beside the fitted model, and how far they are apart."""
    print()
    print_head(("collective", "axes", "KiB in", "measured, us", "fitted, us", "ratio"))
    errors = []
    for s in samples:
        atoms = mesh.atoms_of(s.axes)
        fitted = collective_seconds(s.kind, atoms, s.local_in, s.local_out, mesh, topology)
        errors.append(abs(math.log(fitted / s.seconds)))
        times = (f"{s.seconds * 1e6:.1f}", f"{fitted * 1e6:.1f}", f"{fitted / s.seconds:.2f}")
        print_line([s.kind, ", ".join(s.axes), f"{s.local_in / 1024:.4g}", *times])
    print(f"\nmedian factor between fitted and measured: {math.exp(statistics.median(errors)):.2f}")
