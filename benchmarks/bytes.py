"""Bytes that one device sends in one run: our partitioner beside XLA's.

Every program is one function with marks, compiled by `spmd.jit` and by plain `jax.jit` (Shardy's
propagation and XLA's partitioner) on the same mesh of virtual devices; nothing is run. Both
optimized modules are read by one reader, weighted by trip counts, with the ring model's bytes:
(n-1)/n of the result for an all-gather, of the operand for a reduce-scatter and an all-to-all,
twice that for an all-reduce, all of it for a permute. What XLA would turn into a reduce-scatter on
GPU and TPU counts as one.

Columns: `XLA`: arguments without marks are left to XLA; `given`: it is given our shardings of
them; `ratio`: ours over `given`; `predicted`: what our plan says.

Our plans are made for a machine scaled down as the programs are, see `small_machine`.

Example:
    benchmarks/run bytes --only 'moe|resnet'
"""

import sys
import time
from collections.abc import Sequence

import spmd
from benchmarks.byte_rows import Row, measure
from benchmarks.byte_table import (
    FAMILY_HEADER,
    HEADER,
    explained_line,
    family_lines,
    planning_line,
    program_lines,
)
from benchmarks.programs.catalog import programs
from benchmarks.programs.conditions import small_machine
from benchmarks.programs.program import Program
from benchmarks.tables import print_table
from spmd.cli.flags import Parser, Switch


def measure_all(found: Sequence[Program], options: spmd.Options) -> list[Row]:
    """A row for each program; says on stderr how far it has come."""
    rows = []
    for number, program in enumerate(found, 1):
        start = time.perf_counter()
        row = measure(program, options)
        rows.append(row)
        outcome = "; ".join(f"{what}: {why}" for what, why in row.errors.items())
        if row.ratio is not None:
            outcome = f"ratio {row.ratio:.2f} {outcome}"
        said = f"{program.name}: {outcome} ({time.perf_counter() - start:.1f} s)"
        print(f"[{number}/{len(found)}] {said}", file=sys.stderr, flush=True)
    return rows


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run bytes", __doc__)
    add = parser.add_argument
    add("--only", default="", help="programs whose name this regular expression finds")
    add("--all", action=Switch, help="show every reshard, not just those that lose")
    add("--topology", help="plan for it, as in h200:8; default: H200s, scaled down")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints two tables."""
    given = make_parser().parse_args(arguments)
    found = programs(given.only)
    if not found:
        sys.exit(f"error: no program's name holds {given.only!r}")
    topology = spmd.Topology(given.topology) if given.topology else small_machine()
    rows = measure_all(found, spmd.Options(topology=topology))
    print_table(HEADER, program_lines(rows, given.all))
    print()
    print_table(FAMILY_HEADER, family_lines(rows))
    print(f"\n{planning_line(rows)}\n{explained_line(rows)}")
