"""Time of every stage of our compiler on Llama training steps, nothing run on a device.

Each row is one program: a number of layers (scanned or unrolled) on one mesh. Every run of it has a
process of its own, so that nothing is cached from the run before; Shardy's propagation runs on the
same marked module in the same process. With --growth the rows are those that show how time grows:
unrolled layers from 8 to 128, and two programs on meshes of 8 to 4096 devices. Memory is not
limited, so that programs too large for the machine are planned like the others (where memory is
short, planning is repeated, at several prices of memory).

Example:
    benchmarks/run compiler --layers 4,32 --noscan
    benchmarks/run compiler --growth
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from benchmarks import shardy
from benchmarks.programs.step import Step, lower
from spmd.cli.flags import Parser, Switch, positive, words

STAGES = (
    "import", "canonicalize", "sink", "propagate", "plan",
    "partition", "optimize", "expand", "emit",
)  # fmt: skip
COMPILER = STAGES[: STAGES.index("partition") + 1]
"""The stages that are set beside Shardy's propagation and summed up."""

MORE_LAYERS = (8, 16, 32, 64, 128)
MORE_DEVICES = ("data=4:model=2", "data=16:model=4", "data=64:model=8", "data=512:model=8")


class Run(NamedTuple):
    """What one process saw: devices, ops, seconds of our stages and of Shardy's propagation."""

    devices: int
    ops: int
    seconds: dict[str, float]
    peer: float

    @property
    def total(self) -> float:
        """Seconds of the stages that are set beside Shardy's propagation."""
        return sum(self.seconds[name] for name in COMPILER)


def measure(row: Step, peer: bool) -> Run:
    """One run, after a program of another shape has made Python import what it imports late."""
    small = row._replace(model="tiny", layers=1, mesh="data=2")
    for warm in (small, row):
        lowered = lower(warm)
        seconds = shardy.run(shardy.marked_module(lowered.request)) if peer else float("nan")
    ops = sum(1 for _ in lowered.stages.program.walk())
    return Run(lowered.mesh.size, ops, dict(lowered.stages.seconds), seconds)


def table_row(given: argparse.Namespace, row: Step) -> str:
    """Seconds of each stage in the fastest of several runs, and Shardy's fastest."""
    alone = multiprocessing.get_context("spawn")
    runs = []
    for _ in range(given.repeat):
        with ProcessPoolExecutor(1, alone) as process:
            runs.append(process.submit(measure, row, given.shardy).result())
    best, peer = min(runs, key=lambda run: run.total), min(run.peer for run in runs)
    cells = [f"{row.layers}, {'scanned' if row.scan else 'unrolled'}"]
    cells += [f"{best.devices}", f"{best.ops}", *(f"{best.seconds[name]:.3f}" for name in STAGES)]
    cells += [f"{best.total:.3f}", f"{best.total / best.ops * 1e6:.0f}"]
    cells += [f"{peer:.3f}", f"{best.total / peer:.2f}"] if given.shardy else []
    return f"| {' | '.join(cells)} |"


def tables(given: argparse.Namespace) -> Iterator[list[Step]]:
    """The rows of each table that the flags ask for."""
    rest = (given.model, given.optimizer, given.chip)
    if not given.growth:
        counts = [int(n) for n in given.layers]
        yield [Step(n, given.scan, mesh, *rest) for mesh in given.meshes for n in counts]
        return
    yield [Step(layers, False, given.meshes[0], *rest) for layers in MORE_LAYERS]
    yield [Step(32, True, mesh, *rest) for mesh in MORE_DEVICES]
    yield [Step(8, False, mesh, *rest) for mesh in MORE_DEVICES]


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run compiler", __doc__)
    add = parser.add_argument
    add("--model", default="llama2-7b", help="named config")
    add("--meshes", type=words, default="data=4:model=2", help="meshes; they need no devices")
    add("--layers", type=words, default="4", help="numbers of layers")
    add("--scan", action=Switch, default=True, help="scan over layers, or unroll them")
    add("--growth", action=Switch, help="show how time grows with layers and with devices")
    add("--optimizer", choices=["adamw", "adafactor"], default="adamw", help="optimizer")
    add("--chip", default="h200", help="chip to plan for")
    add(
        "--shardy",
        action=Switch,
        default=True,
        help="time Shardy's propagation on the same module too",
    )
    add("--repeat", type=positive, default=3, help="runs; the fastest is shown")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table, or those of --growth."""
    given = make_parser().parse_args(arguments)
    versions = f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {version('jaxlib')}"
    what = f"{given.model}, {given.optimizer}, planned for {given.chip}"
    print(f"{versions}, {os.cpu_count()} cores; {what}")
    titles = ["layers", "devices", "ops", *STAGES, "import to partition, s", "us/op"]
    titles += ["Shardy propagation, s", "ratio"] if given.shardy else []
    for rows in tables(given):
        print(f"\n| {' | '.join(titles)} |")
        print("| --- " * len(titles) + "|")
        for row in rows:
            print(table_row(given, row), flush=True)


if __name__ == "__main__":
    main()
