"""One long sequence through a Llama's training step: time and memory, beside plain `jax.jit`'s.

Activations are split along the sequence over the axis `seq`. `ring` and `gathered` are what
`spmd.jit` makes of it in zigzag order, `usual` of the order of the text. Nothing runs: time and
memory are predicted, and what XLA allocates is said where the machine's compiler is here (`tpu`
extra), minutes for each program. `jax.jit` gets the same marks and arguments; it has no kernel
that knows of a mesh, and takes attention in blocks of queries.

Example:
    benchmarks/run long --rows v5p-8 --layers 2
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

if "jax" not in sys.modules:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax

import spmd
from benchmarks.hlo.schedule import read_schedule
from benchmarks.tpu import placed
from models.llama import sharding
from models.llama.config import LlamaConfig
from models.llama.named import named_config
from models.llama.training import argument_types, train_step
from spmd.cli.flags import Parser, Switch, words
from spmd.errors import SpmdError
from spmd.explain.memory import Memory
from spmd.ir.dialect import rule


class Row(NamedTuple):
    """A machine, and the sizes of the mesh's axes."""

    topology: str
    axes: Mapping[str, int]


ROWS = {
    "v5p-8": Row("v5p:2x2x2", {"seq": 8}),
    "v5p-16": Row("v5p:2x2x4", {"seq": 8, "model": 2}),
    "h200-8": Row("h200:8", {"seq": 8}),
    "h200-4x2": Row("h200:8", {"seq": 4, "model": 2}),
}

PROGRAMS = ("ring", "gathered", "usual", "jax.jit")


class Built(NamedTuple):
    """What became of a program; None where nothing says so.

    Attributes:
      seconds, waiting, peak: as predicted.
      sent: bytes that one device sends in a step.
      alive: the most bytes that are alive at once in the machine's compiler's schedule.
      allocated: bytes on one device, as that compiler lays them.
      compiling: seconds.
    """

    seconds: float | None = None
    waiting: float | None = None
    peak: int | None = None
    sent: int | None = None
    alive: int | None = None
    allocated: int | None = None
    compiling: float | None = None


def config_of(given: Any, row: Row, name: str) -> LlamaConfig:
    """The model: layers scanned and recomputed."""
    config = named_config(given.model)
    return dataclasses.replace(
        config,
        num_hidden_layers=given.layers or config.num_hidden_layers,
        dtype="bfloat16",
        remat="full",
        zigzag=row.axes["seq"] if name in ("ring", "gathered") else 1,
    )


def build(given: Any, row: Row, name: str) -> Built:
    """Plans a program, and compiles it where a compiler is."""
    config, optimizer = config_of(given, row, name), optax.adamw(1e-4)
    mesh = spmd.Mesh(None, tuple(row.axes.values()), tuple(row.axes))
    topology, table = spmd.Topology(row.topology), sharding.table_named(given.sharding)
    types = argument_types(config, optimizer, mesh, (1, given.seq_len), table)
    step = train_step(config, optimizer, sharding.activation_marks(mesh, config, table))
    can_compile = given.compile and topology.platform == "tpu"
    start = time.perf_counter()
    if name == "jax.jit":
        if not can_compile:
            return Built()
        there = placed(types, optimizer, mesh, topology)
        where = jax.tree.map(lambda x: x.sharding, there)
        plain = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*where[:2], None))
        peer = plain.lower(*there).compile()
        sent = read_schedule(peer.as_text() or "").bytes
        return _compiled(Built(sent=sent), peer.memory_analysis(), start)
    jitted = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1))
    lowered = jitted.lower(*types, topology=topology)
    sent = sum(c.bytes * c.count for c in lowered.collectives)
    timeline = lowered.timeline
    built = Built(timeline.seconds, timeline.exposed_seconds, lowered.predicted_memory.peak, sent)
    if not can_compile:
        return built
    return _compiled(built, lowered.compile().executable.memory_analysis(), start)


def _compiled(built: Built, analysis: Any, start: float) -> Built:
    """With the compiler's figures."""
    seconds = time.perf_counter() - start
    alive, allocated = analysis.peak_memory_in_bytes, Memory.of(analysis).peak_bytes
    return built._replace(alive=alive, allocated=allocated, compiling=seconds)


def attempted(given: Any, row: Row, name: str) -> tuple[Built, str]:
    """What became of a program, or why nothing did."""
    most = rule.MOST_PIECES
    rule.MOST_PIECES = 1 if name == "gathered" else most
    try:
        return build(given, row, name), ""
    except (SpmdError, jax.errors.JaxRuntimeError) as error:
        return Built(), str(error).strip().splitlines()[0][:200]
    finally:
        rule.MOST_PIECES = most


def cells(built: Built) -> Iterator[str]:
    """A line of the table."""
    gib, gb = 2**30, 1e9
    for number, unit, digits in (
        (built.seconds, 1, 2),
        (built.waiting, 1, 2),
        (built.sent, gb, 1),
        (built.peak, gib, 1),
        (built.alive, gib, 1),
        (built.allocated, gib, 1),
        (built.compiling, 1, 0),
    ):
        yield "-" if number is None else f"{number / unit:.{digits}f}"


HEADER = (
    "row",
    "program",
    "predicted s",
    "of that waiting",
    "GB sent",
    "predicted GiB",
    "alive GiB",
    "compiler GiB",
    "compile s",
)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run long", __doc__)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(ROWS), help="which machines")
    add("--programs", type=words, default=",".join(PROGRAMS), help="what is made of the step")
    add("--model", default="llama3.1-8b", help="named config")
    add("--layers", type=int, default=0, help="so many layers instead of all")
    add("--seq_len", type=int, default=131_072, help="tokens of the one sequence")
    add("--sharding", default="2d", help="table of specs")
    add("--compile", action=Switch, default=True, help="run the TPU compiler")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    config = named_config(given.model)
    layers = given.layers or config.num_hidden_layers
    print(f"jax {jax.__version__}, {given.model}, {layers} layers, 1 x {given.seq_len}, AdamW")
    print("| " + " | ".join(HEADER) + " |")
    print("|" + " --- |" * len(HEADER))
    for name in given.rows:
        for program in given.programs:
            built, problem = attempted(given, ROWS[name], program)
            print("| " + " | ".join([name, program, *cells(built)]) + " |", flush=True)
            if problem:
                print(f"    {problem}")


if __name__ == "__main__":
    main()
