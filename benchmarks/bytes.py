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

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Literal

from absl import app, flags

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

_ONLY = flags.DEFINE_string("only", "", "programs whose name this regular expression finds")
_LIST = flags.DEFINE_bool("list", False, "print the programs' names and do nothing else")
_SHARDY = flags.DEFINE_bool("shardy", True, "also run Shardy's own partitioner")
_JSON = flags.DEFINE_string("json", None, "also write everything to this file")
_MARKDOWN = flags.DEFINE_bool("markdown", False, "print tables for a page, not for a terminal")
_ALL = flags.DEFINE_bool("all", False, "show every reshard, not just those that lose")
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "plan for it, as in h200:8; default: H200s, scaled down"
)
_PLANNER = flags.DEFINE_enum("planner", "exact", ["exact", "greedy"], "our planner")


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


def main(argv: Sequence[str]) -> None:
    """Prints two tables."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is no flag; did you mean --only {argv[1]}?")
    found = programs(_ONLY.value)
    if not found:
        raise app.UsageError(f"no program's name holds {_ONLY.value!r}; --list shows them")
    if _LIST.value:
        print("\n".join(program.name for program in found))
        return
    topology = spmd.Topology(_TOPOLOGY.value) if _TOPOLOGY.value else small_machine()
    planner: Literal["exact", "greedy"] = "greedy" if _PLANNER.value == "greedy" else "exact"
    options = spmd.Options(topology=topology, planner=planner)
    rows = measure_all(found, options)
    peers = ask_shardy(found) if _SHARDY.value else {}
    results = [Result(row, peers.get(row.name)) for row in rows]
    if _JSON.value:
        with open(_JSON.value, "w", encoding="utf-8") as file:
            json.dump([as_json(result) for result in results], file, indent=1)
    render = markdown if _MARKDOWN.value else aligned
    print(render(HEADER, program_lines(results, _ALL.value)))
    print()
    print(render(FAMILY_HEADER, family_lines(results)))
    print(f"\n{planning_line(results)}\n{explained_line(results)}")


if __name__ == "__main__":
    app.run(main)
