"""Predicted beside measured time of several plans of one program: does the model rank them right?

One Llama training step, split in many ways: over other meshes, with other marks, by the greedy
planner. Every plan is compiled and run on the devices at hand; the table is sorted by measured
time. Below it: of all pairs of plans whose measured times are apart by more than 3%, the
share that the prediction puts in the same order.

Example:
    benchmarks/run plans --model llama2-7b --layers 4 --topology topology.json
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import optax

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks.tables import print_head, print_line
from benchmarks.train import time_steps
from spmd.cli.flags import Parser, Switch, positive
from spmd.mesh.topology import Topology
from spmd.models.llama import sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.marks import Mark, no_marks
from spmd.models.llama.step import argument_types, train_step

MARGIN = 0.03
"""Pairs of plans that are nearer than this are a draw."""


class Way(NamedTuple):
    """One way to split the step."""

    name: str  # what the table calls it
    # data, model: sizes of the mesh axes, as fractions of the devices
    data: int
    model: int
    parameters: bool = True  # whether parameters are marked with the table, or all whole
    # `table`, `sequence` (residuals split along the sequence), or `none`
    activations: str = "table"
    planner: Any = "exact"  # as in `spmd.Options`


class Row(NamedTuple):
    """One line of the table, and the seconds of a step."""

    measured: float
    predicted: float
    cells: list[str]


def ways(devices: int) -> Iterator[Way]:
    """The plans that are compared."""
    half = devices // 2
    yield Way("fsdp", devices, 1)
    yield Way("fsdp, parameters marked only", devices, 1, activations="none")
    yield Way("data parallel", devices, 1, parameters=False)
    yield Way("2d", half, 2)
    yield Way("2d, greedy", half, 2, planner="greedy")
    yield Way("2d, sequence split", half, 2, activations="sequence")
    yield Way("2d, parameters marked only", half, 2, activations="none")
    yield Way("2d, batch marked only", half, 2, parameters=False, activations="none")
    yield Way("tensor parallel", 1, devices)
    yield Way("tensor parallel, sequence split", 1, devices, activations="sequence")
    yield Way("tensor parallel, parameters marked only", 1, devices, activations="none")


def marks(way: Way, mesh: spmd.Mesh, config: LlamaConfig) -> Mark:
    """The `mark` of the model's points."""
    if way.activations == "none":
        return no_marks
    table = "2d-sequence" if way.activations == "sequence" else "2d"
    return sharding.activation_marks(mesh, config, sharding.TABLES[table])


def run(given: argparse.Namespace, way: Way, config: LlamaConfig, topology: Topology | None) -> Row:
    """Compiles a plan, with arguments open where the way leaves them, and times its steps."""
    mesh, optimizer = spmd.make_mesh(data=way.data, model=way.model), optax.adamw(1e-4)
    params, state, batch = argument_types(
        config, optimizer, mesh, (given.global_batch, given.seq_len)
    )
    if not way.parameters:
        params = jax.tree.map(lambda x: spmd.mark_sharding(x, mesh, (None,) * x.ndim), params)
    step = spmd.jit(
        train_step(config, optimizer, marks(way, mesh, config)),
        mesh=mesh,
        donate_argnums=(0, 1),
        options=spmd.Options(planner=way.planner, topology=topology),
    )
    compiled = step.compile(params, state, batch)
    seconds, loss = time_steps(given, compiled, config)
    sent = sum(c.bytes * c.count for c in compiled.collectives) / 1e6
    memory = (compiled.memory.peak_bytes, compiled.predicted_memory.peak)
    cells = [way.name, f"{way.data} x {way.model}", f"{seconds * 1e3:.1f}"]
    cells += [f"{compiled.cost * 1e3:.1f}", f"{compiled.cost / seconds:.2f}", f"{sent:.0f}"]
    cells += [*(f"{size / 2**30:.1f}" for size in memory), f"{loss:.4f}"]
    return Row(seconds, compiled.cost, cells)


def agreement(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs in the same order by both times, of all whose measured times are apart."""
    same = total = 0
    for a, b in itertools.combinations(rows, 2):
        if abs(math.log(a.measured / b.measured)) > MARGIN:
            total += 1
            same += (a.measured < b.measured) == (a.predicted < b.predicted)
    return same, total


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run plans", __doc__)
    add = parser.add_argument
    add("--model", default="quickstart", help="named config")
    add("--layers", type=int, default=0, help="overrides the number of layers; 0 keeps it")
    parser.set_defaults(global_batch=8, seq_len=1024)
    add("--steps", type=positive, default=6, help="timed steps")
    add("--scan", action=Switch, default=True, help="scan over layers, or unroll them")
    add("--topology", help="file of tools/calibrate; default: known figures")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    fields = {"dtype": "bfloat16", "scan_layers": given.scan, "attention": "einsum"}
    config = ahead.model_of(given.model, given.layers, **fields)
    topology = Topology.load(given.topology) if given.topology else None
    devices = jax.devices()
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}")
    layers = f"{config.num_hidden_layers} layers {'scanned' if given.scan else 'unrolled'}"
    batch = f"batch {given.global_batch} x {given.seq_len}"
    print(f"{given.model}, {layers}, {batch}, {config.dtype}, adamw")
    rows = []
    for way in ways(len(devices)):
        rows.append(run(given, way, config, topology))
        print(f"  {way.name}: {rows[-1].measured * 1e3:.1f} ms", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row.measured)
    print()
    print_head(
        ("plan", "mesh", "measured ms", "predicted ms", "predicted / measured", "MB sent", "GiB",
         "predicted GiB", "loss")
    )  # fmt: skip
    for row in rows:
        print_line(row.cells)
    same, total = agreement(rows)
    print(f"\n{same} of {total} pairs that are more than {MARGIN:.0%} apart are predicted "
          f"in the measured order")  # fmt: skip
