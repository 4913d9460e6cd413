"""Measures the machine at hand and writes a topology file for `spmd.Topology.load`.

Matrix products give the peaks, a copy gives the memory bandwidth, and collectives of growing size,
over each axis and over all devices, give each link's latency and bandwidth: the least-squares fit
of `spmd.planning.comm`'s model to the measured times. Every other figure is the known chip's.

Example:
    python scripts/calibrate.py --out topo.json --mesh data=2,model=2
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.mesh.spec import jax_mesh
from spmd.mesh.topology import Link, Topology
from spmd.planning.comm import collective_seconds, latency_steps, wire_bytes

_OUT = flags.DEFINE_string("out", "topology.json", "file to write")
_MESH = flags.DEFINE_string("mesh", "", "axes to measure, e.g. data=2,model=2; all in one if empty")
_SMALLEST = flags.DEFINE_integer("smallest", 4 << 10, "bytes of the smallest message of a device")
_LARGEST = flags.DEFINE_integer("largest", 256 << 20, "bytes of the largest message of a device")
_SHAPES = flags.DEFINE_list("shapes", ["2048", "4096", "8192"], "sizes of square matrix products")
_REPEAT = flags.DEFINE_integer("repeat", 10, "timed runs of each; the median counts")

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")


class Sample(NamedTuple):
    """One measured collective.

    Attributes:
      kind: as in `spmd.planning.comm`.
      axes: names of the mesh axes that it goes over.
      local_in, local_out: bytes of one device's piece before and after.
      seconds: median time.
    """

    kind: str
    axes: tuple[str, ...]
    local_in: int
    local_out: int
    seconds: float


# ---------------------------------------------------------------------------------------------
# Measuring.


def seconds_of(run: Callable[..., Any], *args: Any) -> float:
    """Median time of a compiled function, in groups so that the dispatch is hidden."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(_REPEAT.value):
        start = time.perf_counter()
        jax.block_until_ready([run(*args) for _ in range(4)])
        times.append((time.perf_counter() - start) / 4)
    return statistics.median(times)


def peak_flops(dtype: str) -> float:
    """The most operations/s that a square matrix product reaches on one device."""
    best = 0.0
    for size in map(int, _SHAPES.value):
        x = jnp.ones((size, size), dtype)
        best = max(best, 2 * size**3 / seconds_of(jax.jit(jnp.matmul), x, x))
    return best


def memory_bandwidth() -> float:
    """Bytes/s read and written by a copy that no cache holds."""
    x = jnp.ones(max(_LARGEST.value, 1 << 20) // 4, jnp.float32)
    return 2 * x.nbytes / seconds_of(jax.jit(lambda x: x + 1), x)


def sizes() -> Iterator[int]:
    """Message sizes, each four times the one before."""
    size = _SMALLEST.value
    while size <= _LARGEST.value:
        yield size
        size *= 4


def collective(kind: str, axes: tuple[str, ...], count: int, x: Any) -> Any:
    """One collective inside `shard_map`, of this device's piece (rows of 32-bit floats)."""
    if kind == "all_gather":
        return jax.lax.all_gather(x, axes, tiled=True)
    if kind == "reduce_scatter":
        return jax.lax.psum_scatter(x, axes, tiled=True)
    if kind == "all_reduce":
        return jax.lax.psum(x, axes)
    if kind == "all_to_all":
        return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
    return jax.lax.ppermute(x, axes, [(i, (i + 1) % count) for i in range(count)])


def measure(mesh: spmd.Mesh, axes: tuple[str, ...], kind: str, size: int) -> Sample:
    """Times one collective over some axes, of a piece of `size` bytes (the larger of its ends)."""
    count = mesh.extent(mesh.atoms_of(axes))
    rows = max(1, size // 4 // count) * count
    if kind == "all_gather":
        rows //= count
    where, spec = jax_mesh(mesh), PartitionSpec(mesh.axis_names)
    run = jax.jit(
        jax.shard_map(
            partial(collective, kind, axes, count),
            mesh=where,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    x = jax.device_put(np.ones(rows * mesh.size, np.float32), NamedSharding(where, spec))
    out = {"all_gather": rows * count, "reduce_scatter": rows // count}.get(kind, rows)
    return Sample(kind, axes, 4 * rows, 4 * out, seconds_of(run, x))


# ---------------------------------------------------------------------------------------------
# Fitting.


def fit_link(samples: Sequence[Sample], mesh: spmd.Mesh) -> Link:
    """The link for which the model is nearest to the samples, in relative error.

    Time is latency x steps + bytes / bandwidth: linear in the latency and the inverse bandwidth.
    """
    rows, ones = [], []
    for s in samples:
        atoms = mesh.atoms_of(s.axes)
        steps = latency_steps(s.kind, [mesh.atom_sizes[a] for a in atoms])
        sent = wire_bytes(s.kind, mesh.extent(atoms), s.local_in, s.local_out)
        rows.append((steps / s.seconds, sent / s.seconds))
        ones.append(1.0)
    (latency, pace), *_ = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)
    if latency <= 0 or pace <= 0:  # one of the terms is lost in the other's noise
        latency = max(latency, min(s.seconds for s in samples) / 100)
        pace = statistics.median(
            max(1e-15, (1 - row[0] * latency) / row[1]) for row in rows if row[1]
        )
    return Link(1 / float(pace), float(latency))


def calibrated(
    base: Topology, mesh: spmd.Mesh, samples: Sequence[Sample], peaks: dict[str, float], hbm: float
) -> Topology:
    """The topology with the figures that were measured.

    The collectives' links are shared out as the topology does: of a torus, an axis has the links of
    all the dims that it covers; behind a switch all of a device's bandwidth, and between hosts the
    network's.
    """
    links = {"ici": base.chip.ici, "dcn": base.chip.dcn}
    for name, nominal in list(links.items()):
        mine = [s for s in samples if _slowest(base, mesh, s.axes)[0] == name]
        if mine:
            ways = _slowest(base, mesh, mine[0].axes)[1].bandwidth / nominal.bandwidth
            same = [s for s in mine if s.axes == mine[0].axes] if ways != 1 else mine
            fitted = fit_link(same, mesh)
            links[name] = Link(fitted.bandwidth / ways, fitted.latency)
    known = dict(base.chip.flops)
    flops = tuple((dtype, _peak(dtype, peaks, known)) for dtype, _ in base.chip.flops)
    chip = dataclasses.replace(
        base.chip, flops=flops, hbm_bandwidth=hbm, ici=links["ici"], dcn=links["dcn"]
    )
    return Topology(base.name, chip)


def _peak(dtype: str, peaks: dict[str, float], known: dict[str, float]) -> float:
    """What was measured; for other dtypes the known ratio to bf16."""
    return peaks[dtype] if dtype in peaks else peaks["bf16"] * known[dtype] / known["bf16"]


def _slowest(base: Topology, mesh: spmd.Mesh, axes: tuple[str, ...]) -> tuple[str, Link]:
    """Which class of links a collective goes over, and what the topology says of it."""
    links = [base.atom_links(mesh)[a] for a in mesh.atoms_of(axes)]
    slowest = min(links, key=lambda link: link.bandwidth)
    return ("dcn" if slowest == base.chip.dcn else "ici"), slowest


# ---------------------------------------------------------------------------------------------
# The command.


def parse_mesh(text: str, count: int) -> spmd.Mesh:
    """`data=2,model=2`, or one axis of all devices."""
    if not text:
        return spmd.make_mesh(data=count)
    return spmd.make_mesh(**{n: int(size) for n, size in (p.split("=") for p in text.split(","))})


def axis_sets(mesh: spmd.Mesh) -> list[tuple[str, ...]]:
    """Each axis of more than one device, and all of them together."""
    single: list[tuple[str, ...]] = [(name,) for name, size in mesh.shape.items() if size > 1]
    together = tuple(name for axes in single for name in axes)
    return [*single, together] if len(single) > 1 else single


def main(argv: Sequence[str]) -> None:
    """Measures, prints measured beside fitted times, writes the file."""
    del argv
    devices = jax.devices()
    base = Topology.for_devices(devices)
    mesh = parse_mesh(_MESH.value, len(devices))
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}, mesh {mesh}")
    peaks = {"f32": peak_flops("float32"), "bf16": peak_flops("bfloat16")}
    hbm = memory_bandwidth()
    samples = [
        measure(mesh, axes, kind, size)
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
