"""What a Llama training step recomputes: by policies of `jax.checkpoint`, and by the compiler.

Every policy of `LlamaConfig.remat` is compiled and run with `Options(recompute=False)`; then the
plain program with what the compiler does by itself: without a limit, and with the memory that each
policy takes as `Options(memory_limit=...)`. Times are medians over `--steps` steps after two
warm-up steps; memory is XLA's own figure.

Example:
    benchmarks/run recompute --model llama2-7b --layers 8 --mesh data=2 --global_batch 16
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence

import jax

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks.tables import print_head, print_line
from benchmarks.train import parse_mesh, time_steps
from spmd.cli.flags import Parser, positive
from spmd.models.llama.config import LlamaConfig

POLICIES = ("none", "full", "dots", "dots_no_batch", "save_attention")

HEADER = (
    "activations", "limit, GiB", "predicted", "XLA's", "predicted ms", "ms", "tokens/s/device",
    "plan s",
)  # fmt: skip


def row(
    given: argparse.Namespace,
    mesh: spmd.Mesh,
    config: LlamaConfig,
    name: str,
    options: spmd.Options,
) -> tuple[list[str], int]:
    """A line of the table, and the memory that is predicted."""
    start, limit = time.perf_counter(), options.memory_limit
    shown = f"{limit / 2**30:.1f}" if limit else ""
    try:
        shape = (given.global_batch, given.seq_len)
        lowered = ahead.Case(config, mesh, None, shape, options=options).lower()
    except spmd.PlanError as error:
        return [name, shown, str(error).splitlines()[1].strip(), *[""] * 5], 0
    planned, memory = time.perf_counter() - start, lowered.predicted_memory.peak
    cells = [name, shown, f"{memory / 2**30:.1f}", "", f"{lowered.cost * 1e3:.1f}"]
    try:
        compiled = lowered.compile()
        seconds, _ = time_steps(given, compiled, config)
        rate = given.global_batch * given.seq_len / seconds / mesh.size
        cells[3] = f"{compiled.memory.peak_bytes / 2**30:.1f}"
        cells += [f"{seconds * 1e3:.1f}", f"{rate:,.0f}"]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        cells += ["does not fit", ""]
    return [*cells, f"{planned:.1f}"], memory


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run recompute", __doc__)
    add = parser.add_argument
    add("--model", default="quickstart", help="named config")
    add("--mesh", default="data=8", help="sizes of the axes data and model, joined by ':'")
    add("--layers", type=int, default=0, help="overrides the number of layers; 0 keeps it")
    parser.set_defaults(seq_len=4096)
    add("--global_batch", type=positive, default=16, help="sequences in a step")
    add("--steps", type=positive, default=8, help="timed steps")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    mesh, devices = parse_mesh(given.mesh), jax.devices()
    config = ahead.model_of(given.model, given.layers, dtype="bfloat16")
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}; {given.model}, "
          f"{config.num_hidden_layers} layers, scanned, "
          f"batch {given.global_batch} x {given.seq_len}, mesh {given.mesh}")  # fmt: skip
    print_head(HEADER)
    limits: dict[str, int | None] = {}
    for policy in POLICIES:
        chosen, plain = dataclasses.replace(config, remat=policy), spmd.Options(recompute=False)
        line, limits[policy] = row(given, mesh, chosen, policy, plain)
        print_line(line)
    for policy, memory in {"without a limit": None, **limits}.items():
        within = policy if memory is None else f"as {policy}"
        options = spmd.Options(memory_limit=memory)
        print_line(row(given, mesh, config, f"by the compiler, {within}", options)[0])
