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
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from benchmarks.hlo.collectives import hlo_collectives
from benchmarks.hlo.runs import matmul_flops
from benchmarks.programs.catalog import programs
from benchmarks.programs.program import Built, Program, forget, small_machine
from benchmarks.tables import print_table
from spmd.cli.flags import Parser
from spmd.errors import ArgumentError
from spmd.explain.memory import Memory
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import jax_mesh, partition_spec

# XLA compiles the same function twice: with open arguments left to it (`alone`), and with every
# argument placed as our plan places it (`given`). The latter is the harder peer: it need not find
# out how to split the optimizer state.


class Moved(NamedTuple):
    """What one device does in one run of a compiled program."""

    # bytes that it sends, an all-reduce of which only slices are used counting as a reduce-scatter,
    # which it becomes on GPU and TPU
    bytes: int
    collectives: int  # how many collectives run, those in loops once for each trip
    kinds: Mapping[str, int]  # bytes by kind of collective
    temporary: int  # bytes of intermediate values alive at once, by XLA's buffer assignment
    # of its matrix products and convolutions: fewer bytes may be bought by computing the same on
    # several devices
    flops: int
    seconds: float  # XLA's compilation


class Row(NamedTuple):
    """One program."""

    name: str  # of the program
    # spmd, alone, given: ours, XLA's left alone, XLA's given our argument shardings; None where
    # compilation failed
    spmd: Moved | None = None
    alone: Moved | None = None
    given: Moved | None = None
    predicted: int | None = None  # bytes that our plan says it moves
    # seconds that our plan took to make, with nothing remembered of other programs
    planning: float | None = None
    # how many of our collectives name a source line and a reason, and of how many
    explained: tuple[int, int] = (0, 0)
    errors: Mapping[str, str] = {}  # what failed -> the first line of why

    @property
    def family(self) -> str:
        """As in `Program.family`."""
        return self.name.partition("/")[0]

    @property
    def ratio(self) -> float | None:
        """Our bytes over those of XLA given our shardings; 1 where neither moves anything."""
        if self.spmd is None or self.given is None:
            return None
        if self.spmd.bytes == self.given.bytes:
            return 1.0
        return self.spmd.bytes / self.given.bytes if self.given.bytes else float("inf")


def measure(program: Program, options: spmd.Options) -> Row:
    """Compiles a program three times and reads the results; failures go into the row."""
    errors: dict[str, str] = {}

    def attempt(what: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:  # whatever a compiler raises is a result of the benchmark
            errors[what] = first_line(error)
            return None

    def ours() -> tuple[Moved, spmd.Lowered, tuple[int, int]]:
        forget()
        lowered = jitted.lower(*built.args)
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
        moved = read(compiled.as_text("hlo"), compiled.memory, seconds)
        named = sum(bool(c.source and c.reason) for c in compiled.collectives)
        explained = (named, len(compiled.collectives))
        return moved, lowered, explained

    mesh, built = program.make()
    jitted = spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate, options=options)
    alone = attempt("alone", lambda: compile_with_xla(built, built.args))
    found = attempt("spmd", ours)
    if found is None:
        return Row(program.name, alone=alone, errors=errors)
    moved, lowered, explained = found
    placed = placed_arguments(lowered, built.args)
    is_open = any(leaf.sharding is None for leaf in jax.tree.leaves(built.args))
    given = attempt("given", lambda: compile_with_xla(built, placed)) if is_open else alone
    predicted = sum(c.bytes * c.count for c in lowered.collectives)
    planning = lowered.stages.seconds["plan"]
    return Row(program.name, moved, alone, given, predicted, planning, explained, errors)


def placed_arguments(lowered: spmd.Lowered, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, each with the sharding that our plan gives it."""
    mesh = jax_mesh(lowered.mesh)

    def place(leaf: Any, sharding: Sharding) -> Any:
        spec = partition_spec(sharding, lowered.mesh)[: leaf.ndim]  # a key's bits have a dim more
        placed = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    leaves, tree = jax.tree.flatten(args)
    shardings = lowered.stages.optimized.arguments
    placed = [place(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)]
    return tuple(jax.tree.unflatten(tree, placed))


def compile_with_xla(built: Built, args: tuple[Any, ...]) -> Moved:
    """Plain `jax.jit` of the same function; results are placed as XLA likes."""
    with warnings.catch_warnings():
        # XLA cannot always reuse a donated argument: that is its own loss of memory.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = jax.jit(built.fn, donate_argnums=built.donate).lower(*args)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    return read(str(compiled.as_text()), Memory.of(compiled.memory_analysis()), seconds)


def read(text: str, memory: Memory, seconds: float) -> Moved:
    """What an optimized module moves.

    Raises:
      ArgumentError: a loop that communicates has an unknown trip count.
    """
    found = hlo_collectives(text, guess_trips=False, scatter_slices=True)
    raw = hlo_collectives(text, guess_trips=False)
    kinds: Counter[str] = Counter()
    for collective in found:
        kinds[collective.kind] += collective.bytes * collective.count
    count = sum(c.count for c in raw if c.bytes)
    return Moved(kinds.total(), count, dict(kinds), memory.temporary, matmul_flops(text), seconds)


def first_line(error: Exception) -> str:
    """An exception as one short line."""
    text = str(error).strip() or type(error).__name__
    name = "" if isinstance(error, ArgumentError) else f"{type(error).__name__}: "
    return f"{name}{text.splitlines()[0]}"[:160]


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


def _tally(rows: Sequence[Row]) -> list[str]:
    """How many there are, and in how many we send less, as much and more."""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    counts = (sum(r < 1 for r in ratios), sum(r == 1 for r in ratios), sum(r > 1 for r in ratios))
    return [str(len(rows)), *map(str, counts)]


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
    rows = []
    for number, program in enumerate(found, 1):
        start = time.perf_counter()
        row = measure(program, spmd.Options(topology=topology))
        rows.append(row)
        outcome = "; ".join(f"{what}: {why}" for what, why in row.errors.items())
        if row.ratio is not None:
            outcome = f"ratio {row.ratio:.2f} {outcome}"
        said = f"{program.name}: {outcome} ({time.perf_counter() - start:.1f} s)"
        print(f"[{number}/{len(found)}] {said}", file=sys.stderr, flush=True)
    print_table(HEADER, program_lines(rows))
    print()
    print_table(FAMILY_HEADER, family_lines(rows))
    named, total = (sum(row.explained[i] for row in rows) for i in range(2))
    print(f"\n{planning_line(rows)}")
    print(f"{named} of our {total} collectives name a source line and a reason.")
