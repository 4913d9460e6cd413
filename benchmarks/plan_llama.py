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

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import optax

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, words
from spmd.models.llama.flops import flops_per_token


class Setup(NamedTuple):
    """One published configuration."""

    model: str  # named config
    topology: str  # the slice
    mesh: tuple[int, int]  # sizes of the axes data and model
    batch: int  # sequences in a step
    layers: int = 0  # how many layers; 0 for all of the model's
    seq_lens: tuple[int, ...] = (1024, 2048)  # tokens in a sequence
    optimizer: optax.GradientTransformation = optax.adafactor(1e-3)
    remat: str = "full"  # which activations are kept


ROWS = {
    "7b": Setup("llama2-7b", "v4:2x2x4", (16, 1), 256),
    "13b": Setup("llama2-13b", "v4:2x4x4", (32, 1), 256),
    "70b": Setup("llama2-70b", "v4:4x4x8", (32, 4), 512),
}
"""Those of the report."""

SLICES = {"v5p:2x2x4": 16, "v5p:4x4x4": 64, "v5p:4x4x8": 128, "v5p:8x8x8": 512}
WIDE = Setup("llama3-70b", "v5p:4x4x8", (128, 1), 128, 0, (8192,), optax.adamw(1e-4), "none")
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
    add("--layers", type=int, default=0, help="so many layers instead of all: compiles sooner")
    add("--compile", action=Switch, default=True, help="run the TPU compiler")
    add("--cache", type=Path, help="folder that keeps what the TPU compiler made")
    return parser


def lower(row: Setup, seq_len: int) -> spmd.Lowered:
    """Plans one training step: bf16 compute, layers scanned."""
    config = ahead.model_of(row.model, row.layers, dtype="bfloat16", remat=row.remat)
    mesh, topology = spmd.Mesh(None, row.mesh, ("data", "model")), spmd.Topology(row.topology)
    shape = (row.batch, seq_len)
    return ahead.Case(config, mesh, topology, shape, optimizer=row.optimizer).lower()


def build(lowered: spmd.Lowered, topology: spmd.Topology, cached: Path | None) -> ahead.Built:
    """Runs the TPU compiler, or reads what it made last time."""

    def make() -> ahead.Built:
        start = time.perf_counter()
        executable = lowered.compile().executable
        return ahead.with_compiler(ahead.Built(), lowered.mesh, topology, executable, start)

    return ahead.kept(cached, make)


def mfu(row: Setup, seq_len: int, seconds: float) -> str:
    """Both conventions of `spmd.models.llama.flops.flops_per_token`: causal, and PaLM's."""
    config, topology = ahead.model_of(row.model, row.layers), spmd.Topology(row.topology)
    peak = topology.peak_flops("bf16") * topology.count * seconds
    tokens = row.batch * seq_len
    shares = (flops_per_token(config, seq_len, c) * tokens / peak for c in ("causal", "palm"))
    return " / ".join(f"{share:.1%}" for share in shares)


def plan_cells(row: Setup, seq_len: int, lowered: spmd.Lowered) -> list[str]:
    """What is known without the TPU compiler."""
    plan, timeline = ahead.planned(lowered), lowered.timeline
    mesh = "x".join(map(str, row.mesh))
    layers = f" ({row.layers} layers)" if row.layers else ""
    return [
        f"{row.model}{layers}, {row.topology}, {mesh}, {row.batch} x {seq_len}",
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
        return ["-"] * 4
    share = built.exposed / (built.kernels + built.exposed)
    waiting = f"{built.exposed:.2f} ({share:.1%})"
    allocated = ahead.cell(built.allocated, 2**30, 1)
    return [allocated, f"{built.kernels:.2f}", waiting, ahead.cell(built.compiling, 1, 0)]


HEADER = (
    "model, slice, data x model, batch", "GB sent", "predicted s", "of that waiting",
    "MFU causal / palm", "collectives", "of them permutes", "predicted GiB", "compiler GiB",
    "compiler's kernels, s", "waiting in its schedule, s", "compile s",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, bf16 compute, layers scanned")
    print_head(HEADER)
    for row in ({**ROWS, **MORE_ROWS}[name] for name in given.rows):
        row = row._replace(layers=given.layers or row.layers)
        for seq_len in map(int, given.seq_lens or row.seq_lens):
            lowered = lower(row, seq_len)
            cells = plan_cells(row, seq_len, lowered)
            mesh = "x".join(map(str, row.mesh))
            label = f"{row.model}_{mesh}_{row.layers}_{seq_len}.json"
            cached, built = given.cache and given.cache / label, ahead.Built()
            if given.compile:
                built = build(lowered, spmd.Topology(row.topology), cached)
            print_line([*cells, *built_cells(built)])
