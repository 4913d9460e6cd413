"""Bytes that one device sends in one run: our partitioner beside XLA's and Shardy's.

Every program is one function with marks, compiled by `spmd.jit` and by plain `jax.jit` (Shardy's
propagation and XLA's partitioner) on the same mesh of virtual devices; nothing is run. Both
optimized modules are read by one reader, weighted by trip counts, with the ring model's bytes:
(n-1)/n of the result for an all-gather, of the operand for a reduce-scatter and an all-to-all,
twice that for an all-reduce, all of it for a permute. What XLA would turn into a reduce-scatter on
GPU and TPU counts as one.

Columns: `XLA`: arguments without marks are left to XLA; `given`: it is given our shardings of
them; `ratio`: ours over `given`; `predicted`: what our plan says; `Shardy`: the collectives of
Shardy's own partitioner on the same module, in a process of its own.

Our plans are made for a machine scaled down as the programs are, see `small_machine`.

Example:
    benchmarks/run bytes --only 'moe|resnet' --markdown
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Literal

from benchmarks.environment import xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = xla_flags(os.environ.get("XLA_FLAGS", ""))

import spmd
from benchmarks.byte_rows import Row, measure
from benchmarks.byte_table import (
    FAMILY_HEADER,
    HEADER,
    Result,
    aligned,
    as_json,
    explained_line,
    family_lines,
    markdown,
    planning_line,
    program_lines,
)
from benchmarks.programs.catalog import programs
from benchmarks.programs.conditions import small_machine
from benchmarks.programs.program import Program
from benchmarks.shardy_bytes import Peer, partition_all
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
        seconds = time.perf_counter() - start
        say(f"[{number}/{len(found)}] {program.name}: {outcome} ({seconds:.1f} s)")
    return rows


def ask_shardy(found: Sequence[Program]) -> dict[str, Peer]:
    """Shardy's result for each program."""
    return partition_all([program.name for program in found], lambda name: say(f"Shardy: {name}"))


def say(line: str) -> None:
    """A line about progress."""
    print(line, file=sys.stderr, flush=True)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run bytes", __doc__)
    add = parser.add_argument
    add("--only", default="", help="programs whose name this regular expression finds")
    add("--list", action=Switch, help="print the programs' names and do nothing else")
    add("--shardy", action=Switch, default=True, help="also run Shardy's own partitioner")
    add("--json", help="also write everything to this file")
    add("--markdown", action=Switch, help="print tables for a page, not for a terminal")
    add("--all", action=Switch, help="show every reshard, not just those that lose")
    add("--topology", help="plan for it, as in h200:8; default: H200s, scaled down")
    add("--planner", choices=["exact", "greedy"], default="exact", help="our planner")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints two tables."""
    given = make_parser().parse_args(arguments)
    found = programs(given.only)
    if not found:
        sys.exit(f"error: no program's name holds {given.only!r}; --list shows them")
    if given.list:
        print("\n".join(program.name for program in found))
        return
    topology = spmd.Topology(given.topology) if given.topology else small_machine()
    planner: Literal["exact", "greedy"] = "greedy" if given.planner == "greedy" else "exact"
    options = spmd.Options(topology=topology, planner=planner)
    rows = measure_all(found, options)
    peers = ask_shardy(found) if given.shardy else {}
    results = [Result(row, peers.get(row.name)) for row in rows]
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump([as_json(result) for result in results], file, indent=1)
    render = markdown if given.markdown else aligned
    print(render(HEADER, program_lines(results, given.all)))
    print()
    print(render(FAMILY_HEADER, family_lines(results)))
    print(f"\n{planning_line(results)}\n{explained_line(results)}")


if __name__ == "__main__":
    main()
