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

import math
import sys
import time
from collections.abc import Iterable, Sequence

import spmd
from benchmarks.byte_rows import Row, measure
from benchmarks.programs.catalog import programs
from benchmarks.programs.conditions import small_machine
from benchmarks.programs.program import Program
from benchmarks.tables import print_table
from spmd.cli.flags import Parser

LEAST, MOST = 0.05, 20.0
"""A ratio beyond these counts as this much in a mean: a mean of logarithms knows no zero."""

SUMMED_UP = ("reshard",)
"""Families of very many small programs, of which only those lines are shown that say something."""

MORE_ARITHMETIC = 1.1
"""A program for which we compute more than this times what XLA does counts in no mean."""


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Of those that are there, each held between `LEAST` and `MOST`."""
    logs = [math.log(min(max(r, LEAST), MOST)) for r in ratios if r is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


HEADER = (
    "program", "spmd MB", "XLA MB", "given MB", "ratio", "collectives", "of given",
    "temp MiB", "of given", "MFLOP", "of given", "predicted MB", "plan s", "XLA s",
)  # fmt: skip


def program_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each program; of families that are `SUMMED_UP`, of those that XLA does better."""
    return [_line(r) for r in rows if r.family not in SUMMED_UP or (r.ratio or 2) > 1]


def _line(row: Row) -> list[str]:
    sides = {"spmd": row.spmd, "alone": row.alone, "given": row.given}
    both = (row.spmd, row.given)
    return [
        row.name,
        *(megabytes(m and m.bytes) or row.errors.get(name, "") for name, m in sides.items()),
        decimal(row.ratio),
        *(str(m.collectives) if m else "" for m in both),
        *(decimal(m and m.temporary / 2**20, 1) for m in both),
        *(decimal(m and m.flops / 1e6, 0) for m in both),
        megabytes(row.predicted),
        decimal(row.planning),
        decimal(row.given and row.given.seconds),
    ]


def megabytes(count: int | None) -> str:
    """In units of 10^6 bytes; empty where nobody knows."""
    return decimal(None if count is None else count / 1e6, 3)


def decimal(value: float | None, digits: int = 2) -> str:
    """A number; empty where nobody knows it."""
    return "" if value is None else f"{value:.{digits}f}"


FAMILY_HEADER = ("family", "programs", "fewer bytes", "as many", "more", "mean ratio")


def family_lines(rows: Sequence[Row]) -> list[list[str]]:
    """One line for each family and one for all of them, which weighs every family alike."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    means = {
        name: geometric_mean(row.ratio for row in found if not buys_bytes(row))
        for name, found in families.items()
    }
    lines = [[name, *_tally(found), decimal(means[name])] for name, found in families.items()]
    if len(families) > 1:
        lines.append(["all", *_tally(rows), decimal(geometric_mean(means.values()))])
    return lines


def buys_bytes(row: Row) -> bool:
    """Whether our program pays with arithmetic, the same on several devices, for sending less."""
    if row.spmd is None or row.given is None:
        return False
    return row.spmd.flops > MORE_ARITHMETIC * row.given.flops


def planning_line(rows: Sequence[Row]) -> str:
    """How long planning took beside XLA's compilation of the peer, in a sentence."""
    shares = sorted(
        (row.planning / row.given.seconds, row.name)
        for row in rows
        if row.planning is not None and row.given is not None
    )
    if not shares:
        return ""
    (middle, _), (most, where) = shares[len(shares) // 2], shares[-1]
    return (
        f"Planning took {middle:.1%} of XLA's compilation in the median, {most:.1%} at most "
        f"({where})."
    )


def explained_line(rows: Sequence[Row]) -> str:
    """How many of all collectives say where they come from and why they are there."""
    named, total = (sum(row.explained[i] for row in rows) for i in range(2))
    return f"{named} of our {total} collectives name a source line and a reason."


def _tally(rows: Sequence[Row]) -> list[str]:
    """How many there are, and in how many we send less, as much and more."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    counts = (sum(r < 1 for r in ratios), sum(r == 1 for r in ratios), sum(r > 1 for r in ratios))
    return [str(len(rows)), *map(str, counts)]


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
    print_table(HEADER, program_lines(rows))
    print()
    print_table(FAMILY_HEADER, family_lines(rows))
    print(f"\n{planning_line(rows)}\n{explained_line(rows)}")
