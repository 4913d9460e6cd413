"""Time of every stage of our compiler, nothing run on a device.

Each row is one program: a number of layers (scanned or unrolled) of a Llama's training step on one
mesh. Every run of it has a process of its own, so that nothing is cached from the run before, and
the fastest run is shown; Shardy's propagation runs on the same marked module in the same process.
Memory is not limited, so that programs too large for the machine are planned like the others (where
memory is short, planning is repeated, at several prices of memory). Other tables take the place of
this one:

--axes: four scanned layers on 64 devices, whose mesh has one to four axes.
--limits: a program planned without a limit of memory, with half of what that plan takes as limit,
  and with a limit that nothing keeps to, which is refused.

Example:
    benchmarks/run compiler --layers 4,32 --noscan
    benchmarks/run compiler --axes --limits
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

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
    mesh: str = "data=4:model=2"
    model: str = "llama2-7b"
    memory_limit: int = UNLIMITED


def lower(step: Step) -> spmd.Lowered:
    """The whole compiler once on one training step."""
    mesh = mesh_of(parse_axes(step.mesh))
    # Einsums are ops that Shardy, the peer, knows, too.
    config = model_of(step.model, step.layers, scan_layers=step.scan, attention="einsum")
    machine, shape = spmd.Topology(f"h200:{mesh.size}"), (2 * mesh.size, 1024)
    options = spmd.Options(memory_limit=step.memory_limit)
    return Case(config, mesh, machine, shape, options=options).lower()


T = TypeVar("T")

STAGES = (
    "import", "canonicalize", "sink", "propagate", "plan",
    "partition", "optimize", "expand", "emit",
)  # fmt: skip
COMPILER = STAGES[: STAGES.index("partition") + 1]
"""The stages that are set beside Shardy's propagation and summed up."""

MORE_AXES = (
    "data=64",
    "data=8:model=8",
    "replica=2:data=8:model=4",
    "replica=2:data=4:seq=2:model=4",
)
"""Of 64 devices each."""

LIMITED = (Step(4, True), Step(4, False))
HALF = 0.5
IMPOSSIBLE = 1 << 20
"""Bytes that no plan of `LIMITED` keeps to: its arguments are larger."""


class Run(NamedTuple):
    """What one process saw: ops, seconds of our stages and of Shardy's propagation."""

    ops: int
    seconds: dict[str, float]
    peer: float

    @property
    def total(self) -> float:
        """Seconds of the stages that are set beside Shardy's propagation."""
        return sum(self.seconds[name] for name in COMPILER)


class Lowering(NamedTuple):
    """What one process saw: seconds, bytes of the plan, and whether it was refused."""

    seconds: float
    bytes: int
    refused: bool = False

    @property
    def said(self) -> list[str]:
        """Seconds, and GiB of the plan, or what the error says to be the least."""
        size = f"{self.bytes / 2**30:.2f}"
        return [f"{self.seconds:.2f}", f"refused, {size} at least" if self.refused else size]


def measure(row: Step) -> Run:
    """One run, after a program of another shape has made Python import what it imports late."""
    for warm in (_small(row), row):
        lowered = lower(warm)
        seconds = shardy.run(shardy.marked_module(lowered.request))
    return Run(sum(1 for _ in lowered.stages.program.walk()), dict(lowered.stages.seconds), seconds)


def measure_lowering(row: Step) -> Lowering:
    """The same by the clock. A limit that is missed is no error."""
    lower(_small(row))
    start = time.perf_counter()
    try:
        peak = lower(row).predicted_memory.peak
    except spmd.PlanError as error:
        return Lowering(time.perf_counter() - start, error.least_bytes, refused=True)
    return Lowering(time.perf_counter() - start, peak)


def _small(row: Step) -> Step:
    return row._replace(model="tiny", layers=1, mesh="data=2", memory_limit=UNLIMITED)


def runs_of(given: argparse.Namespace, what: str, run: Callable[..., T], *args: Any) -> list[T]:
    """Several runs, each in a process of its own; says on stderr how far it has come."""
    runs: list[T] = []
    for number in range(1, given.repeat + 1):
        print(f"{what}: run {number} of {given.repeat}", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            runs.append(process.submit(run, *args).result())
    return runs


def said(row: Step) -> str:
    """A row's program."""
    return f"{row.layers}, {'scanned' if row.scan else 'unrolled'}"


def print_stages(given: argparse.Namespace, rows: Sequence[Step]) -> None:
    """Seconds of each stage in the fastest of several runs, and Shardy's fastest."""
    print_head(
        ("layers", "mesh", "ops", *STAGES, "import to partition, s", "us/op",
         "Shardy propagation, s", "ratio")
    )  # fmt: skip
    for row in rows:
        what, mesh = said(row), row.mesh.replace(":", ", ")
        runs = runs_of(given, f"{what}, {mesh}", measure, row)
        best, peer = min(runs, key=lambda run: run.total), min(run.peer for run in runs)
        cells = [what, mesh, f"{best.ops}", *(f"{best.seconds[name]:.3f}" for name in STAGES)]
        cells += [f"{best.total:.3f}", f"{best.total / best.ops * 1e6:.0f}"]
        print_line([*cells, f"{peer:.3f}", f"{best.total / peer:.2f}"])


def print_limits(given: argparse.Namespace) -> None:
    """Seconds without a limit, with one at half, and with one that is refused."""
    print_head(
        ("layers", "no limit, s", "GiB", "half of it, s", "GiB", "ratio", "impossible, s", "GiB",
         "ratio")
    )  # fmt: skip
    for row in LIMITED:

        def run(limit: int, row: Step = row) -> Lowering:
            what = f"{said(row)}, limit {limit / 2**30:.3g} GiB"
            limited = row._replace(memory_limit=limit)
            return min(runs_of(given, what, measure_lowering, limited))

        free = run(UNLIMITED)
        cells = free.said
        for limited in (run(int(HALF * free.bytes)), run(IMPOSSIBLE)):
            cells += [*limited.said, f"{limited.seconds / free.seconds:.2f}"]
        print_line([said(row), *cells])


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run compiler", __doc__)
    add = parser.add_argument
    add("--model", default="llama2-7b", help="named config")
    add("--meshes", type=words, default="data=4:model=2", help="meshes; they need no devices")
    add("--layers", type=words, default="4", help="numbers of layers")
    add("--scan", action=Switch, default=True, help="scan over layers, or unroll them")
    add("--axes", action=Switch, help="show how time grows with the mesh's axes")
    add("--limits", action=Switch, help="plan with limits of memory, too")
    add("--repeat", type=positive, default=3, help="runs; the fastest is shown")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table, or those that the flags ask for."""
    given = make_parser().parse_args(arguments)
    versions = f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {version('jaxlib')}"
    print(f"{versions}, {os.cpu_count()} cores; {given.model}, AdamW, planned for H200s")
    counts = [int(n) for n in given.layers]
    asked = [Step(n, given.scan, mesh, given.model) for mesh in given.meshes for n in counts]
    tables: tuple[tuple[bool, Callable[[], None]], ...] = (
        (not (given.axes or given.limits), lambda: print_stages(given, asked)),
        (given.axes, lambda: print_stages(given, [Step(4, True, mesh) for mesh in MORE_AXES])),
        (given.limits, lambda: print_limits(given)),
    )
    for is_asked, show in tables:
        if is_asked:
            print()
            show()
