"""Plans and compiles Llama-2 training for TPU slices that are not here, and says what to expect.

The configurations are those of the PyTorch/XLA SPMD report: 7B on v4-32, 13B on v4-64, 70B on
v4-256; with --rows also four layers of a Llama 3 70B over 16 to 512 v5p chips (weak-16, weak-64,
weak-128, weak-512), and all of it on three meshes of 128 (mesh-128x1, mesh-32x4, mesh-16x8).
Bytes, time and memory are predicted from our plan; memory and schedule are also what the real TPU
compiler makes of it (`tpu` extra), minutes for each row. Nothing runs.

Example:
    benchmarks/run plan_llama --rows 7b --seq_lens 1024
    benchmarks/run plan_llama --rows weak-16,weak-64,weak-128,weak-512 --nocompile
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if "jax" not in sys.modules:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks.hlo.schedule import read_schedule
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, words
from spmd.models.llama import fresh, objective, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.flops import flops_per_token
from spmd.predict.backends import room_for


class Setup(NamedTuple):
    """One published configuration."""

    model: str  # named config
    topology: str  # the slice
    mesh: tuple[int, int]  # sizes of the axes data and model
    batch: int  # sequences in a step
    layers: int = 0  # how many layers; 0 for all of the model's
    seq_lens: tuple[int, ...] = (1024, 2048)  # tokens in a sequence
    optimizer: str = "adafactor"  # `adafactor` or `adamw`
    remat: str = "full"  # which activations are kept

    @property
    def config(self) -> LlamaConfig:
        """The model's configuration."""
        return ahead.model_of(self.model, self.layers)


ROWS = {
    "7b": Setup("llama2-7b", "v4:2x2x4", (16, 1), 256),
    "13b": Setup("llama2-13b", "v4:2x4x4", (32, 1), 256),
    "70b": Setup("llama2-70b", "v4:4x4x8", (32, 4), 512),
}
"""Those of the report."""

SLICES = {"v5p:2x2x4": 16, "v5p:4x4x4": 64, "v5p:4x4x8": 128, "v5p:8x8x8": 512}
WIDE = Setup("llama3-70b", "v5p:4x4x8", (128, 1), 128, 0, (8192,), "adamw", "none")
MORE_ROWS = {
    **{f"weak-{count}": WIDE._replace(topology=name, mesh=(count, 1), batch=count, layers=4)
       for name, count in SLICES.items()},
    **{f"mesh-{data}x{model}": WIDE._replace(mesh=(data, model))
       for data, model in ((128, 1), (32, 4), (16, 8))},
}  # fmt: skip
"""A sequence for each chip: four layers on larger and larger slices; all on three meshes."""


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run plan_llama", __doc__)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(ROWS), help="which configurations")
    add("--seq_lens", type=words, default=(), help="tokens in a sequence; left out: the row's")
    add(
        "--accumulate",
        type=int,
        default=0,
        help="microbatches in a step; 0: the fewest for which the prediction fits",
    )
    add("--layers", type=int, default=0, help="so many layers instead of all: compiles sooner")
    add("--compile", action=Switch, default=True, help="run the TPU compiler")
    add("--cache", type=Path, help="folder that keeps what the TPU compiler made")
    return parser


def lower(row: Setup, seq_len: int, accumulate: int) -> spmd.Lowered:
    """Plans one training step: bf16 compute, layers scanned.

    Args:
      accumulate: microbatches; gradients are summed over them in a loop.
    """
    config = dataclasses.replace(row.config, dtype="bfloat16", remat=row.remat)
    mesh = spmd.Mesh(None, row.mesh, ("data", "model"))
    optimizer = optax.adafactor(1e-3) if row.optimizer == "adafactor" else optax.adamw(1e-4)
    step = make_step(config, mesh, optimizer, accumulate)
    params = jax.eval_shape(lambda key: fresh.init(key, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((accumulate, row.batch // accumulate, seq_len), np.int32)
    tokens = spmd.mark_sharding(tokens, mesh, (None, "data", None))
    lowered: spmd.Lowered = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1)).lower(
        sharding.mark_params(params, mesh, config),
        jax.eval_shape(optimizer.init, params),
        {"inputs": tokens, "targets": tokens},
        topology=spmd.Topology(row.topology),
    )
    return lowered


def make_step(config: LlamaConfig, mesh: spmd.Mesh, optimizer: Any, accumulate: int) -> Any:
    """(params, optimizer state, batch (A, B, S)) -> the same after a step, and the loss."""
    marks = sharding.activation_marks(mesh, config)

    def gradients(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(
            lambda p: objective.loss(p, batch["inputs"], batch["targets"], config, marks)
        )(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        if accumulate == 1:
            loss, grads = gradients(params, jax.tree.map(lambda x: x[0], batch))
        else:
            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))

            def add(total: Any, micro: Any) -> Any:
                return jax.tree.map(jnp.add, total, gradients(params, micro)), None

            total = jax.lax.scan(add, zero, batch)[0]
            loss, grads = jax.tree.map(lambda x: x / accumulate, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def build(lowered: spmd.Lowered, topology: spmd.Topology, cached: Path | None) -> ahead.Built:
    """Runs the TPU compiler, or reads what it made last time."""

    def make() -> ahead.Built:
        start = time.perf_counter()
        executable = lowered.compile().executable
        return ahead.with_compiler(ahead.Built(), lowered.mesh, topology, executable, start)

    return ahead.kept(cached, make)


def fewest_microbatches(row: Setup, seq_len: int, wanted: int) -> tuple[int, spmd.Lowered]:
    """The fewest microbatches, a power of two, for which the prediction fits; and the plan."""
    accumulate = wanted or 1
    while True:
        lowered = lower(row, seq_len, accumulate)
        fits = room_for(lowered.predicted_memory.peak, spmd.Topology(row.topology)) == "fits"
        if wanted or fits or accumulate * row.mesh[0] >= row.batch:
            return accumulate, lowered
        accumulate *= 2


def mfu(row: Setup, seq_len: int, seconds: float) -> str:
    """Both conventions of `spmd.models.llama.flops.flops_per_token`: causal, and PaLM's."""
    config, topology = row.config, spmd.Topology(row.topology)
    peak = topology.peak_flops("bf16") * topology.count * seconds
    tokens = row.batch * seq_len
    shares = (flops_per_token(config, seq_len, c) * tokens / peak for c in ("causal", "palm"))
    return " / ".join(f"{share:.1%}" for share in shares)


def plan_cells(row: Setup, seq_len: int, accumulate: int, lowered: spmd.Lowered) -> list[str]:
    """What is known without the TPU compiler."""
    plan, timeline = ahead.planned(lowered), lowered.timeline
    mesh = "x".join(map(str, row.mesh))
    layers = f" ({row.layers} layers)" if row.layers else ""
    return [
        f"{row.model}{layers}, {row.topology}, {mesh}, {row.batch} x {seq_len}",
        str(accumulate),
        ahead.cell(plan.sent, 1e9, 1),
        f"{timeline.seconds:.3f}",
        f"{timeline.exposed_seconds:.3f}",
        mfu(row, seq_len, timeline.seconds),
        str(sum(c.count for c in lowered.collectives)),
        str(sum(c.count for c in lowered.collectives if c.kind == "collective_permute")),
        ahead.cell(plan.peak, 2**30, 1),
    ]


def built_cells(built: ahead.Built) -> list[str]:
    """What the TPU compiler says; its cycles are those of all but collectives."""
    if built.kernels is None or built.exposed is None:
        return ["-"] * 6
    schedule, seconds = read_schedule(built.text), built.kernels + built.exposed
    return [
        ahead.cell(built.allocated, 2**30, 1),
        f"{built.kernels:.2f}",
        f"{built.exposed:.2f} ({built.exposed / seconds:.1%})",
        f"{schedule.hidden_runs} of {schedule.runs}",
        f"{schedule.hidden_cycles / max(1, schedule.cycles):.0%}",
        ahead.cell(built.compiling, 1, 0),
    ]


HEADER = (
    "model, slice, data x model, batch", "microbatches", "GB sent", "predicted s",
    "of that waiting", "MFU causal / palm", "collectives", "of them permutes", "predicted GiB",
    "compiler GiB", "compiler's kernels, s", "waiting in its schedule, s", "asynchronous",
    "kernels beside them", "compile s",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, bf16 compute, layers scanned")
    print_head(HEADER)
    for row in ({**ROWS, **MORE_ROWS}[name] for name in given.rows):
        row = row._replace(layers=given.layers or row.layers)
        for seq_len in map(int, given.seq_lens or row.seq_lens):
            accumulate, lowered = fewest_microbatches(row, seq_len, given.accumulate)
            cells = plan_cells(row, seq_len, accumulate, lowered)
            mesh = "x".join(map(str, row.mesh))
            label = f"{row.model}_{mesh}_{row.layers}_{seq_len}_{accumulate}.json"
            cached, built = given.cache and given.cache / label, ahead.Built()
            if given.compile:
                built = build(lowered, spmd.Topology(row.topology), cached)
            print_line([*cells, *built_cells(built)])


if __name__ == "__main__":
    main()
