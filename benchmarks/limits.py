"""Memory limits: which are kept to, what that costs, and whether XLA agrees.

Every program of `--only` is planned with limits of a share of the memory that XLA needs for it, by
plain `jax.jit` with the same marks. Cells say how much longer a run is predicted to take than
without a limit; `-` is a limit for which no plan was found. The least memory is what those errors
name. Every plan is compiled: `XLA agrees` counts those of which XLA's own figure exceeds the limit
by 5% at most.

Example:
    benchmarks/run limits --only '^moe/train' --limits 0.4,0.6,0.8,1.1
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import jax

import spmd
from benchmarks.byte_rows import lower_with_jax
from benchmarks.programs.catalog import programs
from benchmarks.programs.program import Program
from spmd.cli.flags import Parser, Switch, words
from spmd.explain.memory import Memory

PROGRAMS = "^(llama-train|moe|resnet|recommender|llama-serve/prefill)|^remat/.*none@"
LIMITS = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0,1.1,1.3,1.6"
TOLERANCE = 1.05


class Kept(NamedTuple):
    """A plan within a limit."""

    seconds: float  # predicted for a run
    reported: int  # XLA's figure for its memory; 0 if it was not compiled


def planned(program: Program, limit: int | None, compile_too: bool) -> Kept | int:
    """The plan within a limit, or else the least memory that the error names.

    Of limits far below that, an error says less: what arguments and results take alone.
    """
    mesh, built = program.make()
    options = spmd.Options(memory_limit=limit)
    jitted = spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate, options=options)
    try:
        lowered = jitted.lower(*built.args)
    except spmd.PlanError as error:
        return error.least_bytes
    reported = lowered.compile().memory.peak_bytes if compile_too else 0
    return Kept(lowered.cost, reported)


def row(program: Program, limits: Sequence[float], compile_too: bool) -> str:
    """A line of the table."""
    _, built = program.make()
    alone = Memory.of(lower_with_jax(built, built.args).compile().memory_analysis()).peak_bytes
    free = planned(program, None, compile_too)
    assert isinstance(free, Kept)
    cells, least, agreed, plans = [], [], 0, 0
    for share in limits:
        limit = int(share * alone)
        found = planned(program, limit, compile_too)
        if isinstance(found, Kept):
            plans += 1
            agreed += found.reported <= TOLERANCE * limit
            cells.append(f"{found.seconds / free.seconds:.2f}")
        else:
            least.append(found)
            cells.append("-")
    known = f"{min(least) / alone:.2f}" if least else ""
    shown = [program.name, f"{alone / 2**20:.1f}", f"{free.reported / alone:.2f}", *cells, known]
    return f"| {' | '.join(shown)} | {f'{agreed} of {plans}' if compile_too else ''} |"


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run limits", __doc__)
    add = parser.add_argument
    add("--only", default=PROGRAMS, help="programs whose name this regular expression finds")
    add("--limits", type=words, default=LIMITS, help="shares of the memory that XLA needs")
    add("--compile", action=Switch, default=True, help="compile every plan, and ask XLA")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    limits = [float(share) for share in given.limits]
    machine = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    print(f"jax {jax.__version__}, {machine}; memory as a share of what XLA needs alone")
    heads = ["program", "XLA alone, MiB", "ours", *given.limits, "least", "XLA agrees"]
    print(f"| {' | '.join(heads)} |")
    print("| --- " * len(heads) + "|", flush=True)
    for program in programs():
        if re.search(given.only, program.name):
            print(row(program, limits, given.compile), flush=True)


if __name__ == "__main__":
    main()
