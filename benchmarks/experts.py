"""Experts split over many TPUs: a training step by us, and by XLA's partitioner.

`ours` is what `spmd.jit` makes of the step, `ours-gathered` what it makes if it may not send rows
to their experts. `jax.jit` gets the same step and marks. Attention is an einsum in all of them.
Nothing runs: `predicted` is our plan's, the rest is read from what the TPU compiler made (`tpu`
extra), minutes for each program.

Example:
    benchmarks/run experts --rows mixtral-64 --layers 2
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import jax

from benchmarks import compiled_ahead as ahead
from benchmarks.hlo.modelled import Modelled, Seconds, modelled
from benchmarks.hlo.read import arrays
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser
from spmd.measure.hlo import Instruction
from spmd.planning import choices

ROWS = {
    "mixtral-64": ahead.Row("mixtral-8x7b", "v5p:4x4x4", {"data": 8, "expert": 8}, 128),
    "mixtral-64-model": ahead.Row(
        "mixtral-8x7b", "v5p:4x4x4", {"data": 4, "expert": 8, "model": 2}, 128
    ),
    "mixtral-64-data": ahead.Row("mixtral-8x7b", "v5p:4x4x4", {"data": 64}, 128),
    "256-512": ahead.Row("256-experts", "v5p:8x8x8", {"data": 8, "expert": 64}, 512),
}

MODELS: Mapping[str, Any] = {
    "256-experts": {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_experts": 256,
        "moe_intermediate_size": 2048,
    },
}
"""Name -> fields in which it differs from Qwen3-235B-A22B: experts and width as DeepSeek-V3's."""

PROGRAMS = ("ours", "ours-gathered", "jax.jit")


def case_of(given: Any, row: ahead.Row) -> ahead.Case:
    """The training step: layers scanned and recomputed."""
    fields: dict[str, Any] = {"attention": "einsum", "remat": "full", **MODELS.get(row.model, {})}
    named = row._replace(model="qwen3-235b-a22b") if row.model in MODELS else row
    return named.case(given, given.sharding, **fields)


def build(given: Any, name: str, case: ahead.Case) -> ahead.Built:
    """Plans or compiles one program."""
    if name == "jax.jit":
        return ahead.by_jax(case, given.compile)
    may = mock.patch.object(choices, "may_exchange", return_value=False)
    with may if name == "ours-gathered" else contextlib.nullcontext():
        return ahead.by_spmd(case, given.compile)[0]


def judged(name: str, case: ahead.Case, built: ahead.Built) -> Modelled | None:
    """Time by the compiler's schedule."""
    if not built.text:
        return None
    config = case.config
    choices = math.prod(case.shape) * config.num_experts_per_tok
    flops = 2.0 * choices * config.hidden_size * config.expert_width
    # jax.jit's program has no room to spare: what it computes on several devices counts on each.
    most = flops / (1 if name == "jax.jit" else case.mesh.size)
    return modelled(built.text, case.mesh, case.topology, ragged(case, most), turns=1)


def ragged(case: ahead.Case, most: float) -> Seconds:
    """The time of products of rows by their experts, at the chip's peak.

    Args:
      most: operations of one product if experts are chosen alike. There is room for more rows than
        that, which the kernel leaves out.
    """

    def seconds(instruction: Instruction) -> float:
        if not instruction.name.startswith("ragged-dot-none"):
            return 0.0
        given = instruction.rest.partition("operand_layout_constraints={")[2].partition("}, front")[
            0
        ]
        (_, rows), (_, weights) = arrays(given)[-2:]
        flops = min(2.0 * math.prod(rows) * weights[-1], most)
        return flops / case.topology.peak_flops("bf16")

    return seconds


def line(built: ahead.Built, step: Modelled | None) -> Iterator[str]:
    """Cells of the table."""
    yield from (ahead.cell(*f) for f in ((built.sent, 1e9, 1), (built.seconds, 1, 2)))
    waits = (built.waiting, step and step.seconds, step and step.exposed_seconds)
    yield from (ahead.cell(seconds, 1, 2) for seconds in waits)
    yield ahead.cell(step and step.sent, 1e9, 1)
    yield from (ahead.cell(n, 2**30, 1) for n in (built.peak, built.alive, built.allocated))
    yield ahead.cell(built.compiling, 1, 0)


HEADER = (
    "row", "program", "GB sent", "predicted s", "of that waiting", "modelled s", "of that waiting",
    "compiler's GB sent", "predicted GiB", "alive GiB", "compiler GiB", "compile s",
)  # fmt: skip


def make_parser() -> Parser:
    """The flags."""
    parser = ahead.make_parser("experts", __doc__, ROWS, PROGRAMS, 4096)
    parser.add_argument("--sharding", default="2d", help="table of specs")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, sequences of {given.seq_len}, AdamW")
    print_head(HEADER)
    for name in given.rows:
        row = ROWS[name]
        for program in given.programs:
            case = case_of(given, row)
            built, problem = ahead.attempt(partial(build, given, program, case), ahead.Built())
            step = judged(program, case, built)
            print_line([name, program, *line(built, step)], problem)
