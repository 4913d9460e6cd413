"""Llama training steps over stages of a pipeline: time, bytes and memory, beside `jax.jit`'s.

Each row is a model on a slice, with stages and without on the same chips. `gpipe`, `1f1b`,
`interleaved` are what `spmd.jit` makes of these schedules, `auto` is the one that it takes itself.
`jax.jit` gets the same program and marks in `gpipe`: `spmd.pipeline` is a `vmap` over stages and a
shift, plain JAX for XLA's partitioner. Nothing runs: the programs are planned, and compiled
with libtpu (`tpu` extra), minutes for each.

Example:
    benchmarks/run stages --rows 7b-2 --programs gpipe,jax.jit
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from benchmarks import compiled_ahead as ahead
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser
from spmd.explain.steps import pipeline_rows
from spmd.explain.words import share_text
from spmd.ir.pipelines import Pipeline

ROWS = {
    "7b-1": ahead.Row("llama2-7b", "v5p:2x2x4", {"data": 8, "model": 2}, 128),
    "7b-2": ahead.Row("llama2-7b", "v5p:2x2x4", {"stage": 2, "data": 4, "model": 2}, 128, 16),
    "7b-4": ahead.Row("llama2-7b", "v5p:2x2x4", {"stage": 4, "data": 2, "model": 2}, 128, 32),
    "70b-1": ahead.Row("llama2-70b", "v5p:4x4x4", {"data": 16, "model": 4}, 256),
    "70b-2": ahead.Row("llama2-70b", "v5p:4x4x4", {"stage": 2, "data": 8, "model": 4}, 256, 16),
    "70b-4": ahead.Row("llama2-70b", "v5p:4x4x4", {"stage": 4, "data": 4, "model": 4}, 256, 32),
}

PROGRAMS = ("gpipe", "1f1b", "interleaved", "auto", "jax.jit")
"""Without stages the first is the one that `spmd.jit` makes, and there are no others."""


class Found(NamedTuple):
    """What became of a program, the schedule that it has, and the bubble of that."""

    built: ahead.Built
    schedule: str = ""
    bubble: str = "-"


def case_of(given: Any, row: ahead.Row, schedule: str) -> ahead.Case:
    """The training step: layers scanned and recomputed."""
    stages = row.axes.get("stage", 1)
    return row.case(
        given,
        attention="einsum",  # every partitioner knows it
        remat="full",
        stages=stages,
        stage_microbatches=row.microbatches,
        stage_schedule=schedule if stages > 1 else "auto",
    )


def find(given: Any, row: ahead.Row, program: str) -> Found:
    """Plans a program, and compiles it."""
    if program == "jax.jit":
        built = ahead.by_jax(case_of(given, row, "gpipe"), given.compile)
        if "stage" not in row.axes:
            return Found(built)
        of = Pipeline("stage", row.axes["stage"], row.microbatches)
        return Found(built, "", share_text(of.steps - of.busy_steps, of.steps))
    # What `auto` takes is compiled in a line of its own.
    compiles = given.compile and program != "auto"
    built, lowered = ahead.by_spmd(case_of(given, row, program), compiles)
    for pipeline in pipeline_rows(lowered.stages):
        return Found(built, pipeline.of.schedule, share_text(pipeline.idle, 1))
    return Found(built)


HEADER = ("row", "mesh", "program", "bubble", *ahead.COLUMNS)


def make_parser() -> Parser:
    """The flags."""
    return ahead.make_parser("stages", __doc__, ROWS, PROGRAMS, 2048)


def programs_of(given: Any, row: ahead.Row) -> list[str]:
    """The programs of a row: what depends on a schedule needs stages."""
    if "stage" in row.axes:
        return list(given.programs)
    ours = ["spmd.jit"] if set(given.programs) - {"jax.jit"} else []
    return ours + (["jax.jit"] if "jax.jit" in given.programs else [])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, sequences of {given.seq_len}, attention einsum, AdamW")
    print_head(HEADER)
    for name in given.rows:
        row = ROWS[name]
        axes = " ".join(f"{axis}={size}" for axis, size in row.axes.items())
        for program in programs_of(given, row):
            found, problem = ahead.attempt(partial(find, given, row, program), Found(ahead.Built()))
            title = f"{program}: {found.schedule}" if program == "auto" else program
            print_line([name, axes, title, found.bubble, *ahead.cells(found.built)], problem)
