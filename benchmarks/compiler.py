"""Time of every stage of our compiler, nothing run on a device.

Each row is one program: a number of layers (scanned or unrolled) of a Llama's training step on one
mesh. Every run of it has a process of its own, so that nothing is cached from the run before, and
the fastest run is shown; Shardy's propagation runs on the same marked module in the same process.
Memory is not limited, so that programs too large for the machine are planned like the others (where
memory is short, planning is repeated, at several prices of memory).

Example:
    benchmarks/run compiler --layers 4,32 --noscan
    benchmarks/run compiler --meshes data=64,replica=2:data=8:model=4
"""

import itertools
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from typing import NamedTuple

import jax

import spmd
from benchmarks import shardy
from benchmarks.compiled_ahead import Case, mesh_of, model_of, parse_axes
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, positive, words

UNLIMITED = 1 << 50
"""Bytes of memory that no program needs."""


class Step(NamedTuple):
    """One program: how many layers, whether scanned, on which mesh (axes joined by `:`)."""

    layers: int
    scan: bool
    mesh: str
    model: str


def lower(step: Step) -> spmd.Lowered:
    """The whole compiler once on one training step."""
    mesh = mesh_of(parse_axes(step.mesh))
    # Einsums are ops that Shardy, the peer, knows, too.
    config = model_of(step.model, step.layers, scan_layers=step.scan, attention="einsum")
    machine, shape = spmd.Topology(f"h200:{mesh.size}"), (2 * mesh.size, 1024)
    return Case(config, mesh, machine, shape, options=spmd.Options(memory_limit=UNLIMITED)).lower()


STAGES = (
    "import", "canonicalize", "sink", "propagate", "plan",
    "partition", "optimize", "expand", "emit",
)  # fmt: skip
COMPILER = STAGES[: STAGES.index("partition") + 1]
"""The stages that are set beside Shardy's propagation and summed up."""


class Run(NamedTuple):
    """What one process saw: ops, seconds of our stages and of Shardy's propagation."""

    ops: int
    seconds: dict[str, float]
    peer: float

    @property
    def total(self) -> float:
        """Seconds of the stages that are set beside Shardy's propagation."""
        return sum(self.seconds[name] for name in COMPILER)


def measure(row: Step) -> Run:
    """One run, after a program of another shape has made Python import what it imports late."""
    for warm in (row._replace(model="tiny", layers=1, mesh="data=2"), row):
        lowered = lower(warm)
        seconds = shardy.run(shardy.marked_module(lowered.request))
    return Run(sum(1 for _ in lowered.stages.program.walk()), dict(lowered.stages.seconds), seconds)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run compiler", __doc__)
    add = parser.add_argument
    add("--model", default="llama2-7b", help="named config")
    add("--meshes", type=words, default="data=4:model=2", help="meshes; they need no devices")
    add("--layers", type=words, default="4", help="numbers of layers")
    add("--scan", action=Switch, default=True, help="scan over layers, or unroll them")
    add("--repeat", type=positive, default=3, help="runs; the fastest is shown")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints seconds of each stage in the fastest of several runs, and Shardy's fastest."""
    given = make_parser().parse_args(arguments)
    versions = f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {version('jaxlib')}"
    print(f"{versions}, {os.cpu_count()} cores; {given.model}, AdamW, planned for H200s\n")
    print_head(
        ("layers", "mesh", "ops", *STAGES, "import to partition, s", "us/op",
         "Shardy propagation, s", "ratio")
    )  # fmt: skip
    for axes, layers in itertools.product(given.meshes, given.layers):
        what = f"{layers}, {'scanned' if given.scan else 'unrolled'}"
        mesh, row = axes.replace(":", ", "), Step(int(layers), given.scan, axes, given.model)
        runs = []
        for number in range(1, given.repeat + 1):
            print(f"{what}, {mesh}: run {number} of {given.repeat}", file=sys.stderr, flush=True)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                runs.append(process.submit(measure, row).result())
        best, peer = min(runs, key=lambda run: run.total), min(run.peer for run in runs)
        cells = [what, mesh, f"{best.ops}", *(f"{best.seconds[name]:.3f}" for name in STAGES)]
        cells += [f"{best.total:.3f}", f"{best.total / best.ops * 1e6:.0f}"]
        print_line([*cells, f"{peer:.3f}", f"{best.total / peer:.2f}"])
