"""One long sequence through a Llama's training step: time and memory, beside plain `jax.jit`'s.

Activations are split along the sequence over the axis `seq`. `ring` and `gathered` are what
`spmd.jit` makes of it in zigzag order, `usual` of the order of the text. Nothing runs: time and
memory are predicted, and what XLA allocates is said where the machine's compiler is here (`tpu`
extra), minutes for each program. `jax.jit` gets the same marks and arguments; it has no kernel
that knows of a mesh, and takes attention in blocks of queries.

Example:
    benchmarks/run long --rows v5p-8 --layers 2
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from benchmarks import compiled_ahead as ahead
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser
from spmd.ir.dialect import rule

MODEL = "llama3.1-8b"
ROWS = {
    "v5p-8": ahead.Row(MODEL, "v5p:2x2x2", {"seq": 8}),
    "v5p-16": ahead.Row(MODEL, "v5p:2x2x4", {"seq": 8, "model": 2}),
    "h200-8": ahead.Row(MODEL, "h200:8", {"seq": 8}),
    "h200-4x2": ahead.Row(MODEL, "h200:8", {"seq": 4, "model": 2}),
}

PROGRAMS = ("ring", "gathered", "usual", "jax.jit")


def build(given: Any, row: ahead.Row, name: str) -> ahead.Built:
    """Plans a program, and compiles it where a compiler is: layers are scanned and recomputed."""
    zigzag = row.axes["seq"] if name in ("ring", "gathered") else 1
    case = row.case(given, remat="full", zigzag=zigzag)
    if name == "jax.jit":
        return ahead.by_jax(case, given.compile)
    return ahead.by_spmd(case, given.compile)[0]


def attempted(given: Any, row: ahead.Row, name: str) -> tuple[ahead.Built, str]:
    """What became of a program, or why nothing did."""
    most = rule.MOST_PIECES
    rule.MOST_PIECES = 1 if name == "gathered" else most
    try:
        return ahead.attempt(partial(build, given, row, name), ahead.Built())
    finally:
        rule.MOST_PIECES = most


SAID = ("seconds", "waiting", "sent", "peak", "alive", "allocated", "compiling")
# The compiler says no cycles of kernels that are ours, so it says no time.
COLUMNS = {head: column for head, column in ahead.COLUMNS.items() if column.field in SAID}


def make_parser() -> Parser:
    """The flags."""
    parser = ahead.make_parser("long", __doc__, ROWS, PROGRAMS, 131_072)
    parser.add_argument("--model", default=MODEL, help="named config")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    layers = ahead.model_of(given.model, given.layers).num_hidden_layers
    print(f"jax {jax.__version__}, {given.model}, {layers} layers, {given.seq_len} tokens, AdamW")
    print_head(("row", "program", *COLUMNS))
    for name in given.rows:
        row = ROWS[name]._replace(model=given.model)
        for program in given.programs:
            built, problem = attempted(given, row, program)
            print_line([name, program, *ahead.cells(built, COLUMNS)], problem)
