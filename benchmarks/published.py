"""What `spmd plan` finds for published training runs, beside the mesh and the rate that they had.

Nothing runs: rates are predicted. Batches, lengths and meshes are those of the runs' own
configurations (MaxText's benchmarks/*_model_configs.py and docs/reference/models/tiering.md,
Megatron-Bridge's and torchtitan's performance pages); rates are tokens a second of one device.

Example:
    benchmarks/run published --rows llama2-70b-v5p,llama3.1-8b-v6e --seconds 60
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

import spmd
from benchmarks.tables import print_table
from spmd.cli.flags import Parser, words
from spmd.cli.specs import mesh_axes
from spmd.models.llama.planned import axes_of, config_of, training_step
from spmd.plan import RankedPlan


class PublishedRun(NamedTuple):
    """A run that somebody published."""

    model: str
    machine: str
    batch: int  # sequences of a step, on all devices
    seq_len: int
    mesh: Mapping[str, int]  # its own, in our axes: what splits parameters and batch is `data`
    rate: float  # tokens/s of a device, as published
    choices: Mapping[str, Any] = {}  # more of `training_step`


FP8 = {"matmul": "fp8"}
RUNS = {
    name: PublishedRun(model, machine, batch, length, mesh_axes(axes), rate, choices)
    for name, model, machine, batch, length, axes, rate, choices in (
        ("llama2-70b-v5p", "llama2-70b", "v5p-1024", 2 * 512, 4096, "data=512,model=1", 692, {}),
        ("llama3.1-405b-v5p", "llama3.1-405b", "v5p-1024", 2 * 512, 8192,
         "data=512,model=1", 124.6, {}),
        ("llama3.1-8b-v6e", "llama3.1-8b", "v6e-256", 4 * 256, 8192, "data=256,model=1", 7139, {}),
        ("llama3.1-70b-v6e", "llama3.1-70b", "v6e-256", 5 * 256, 8192, "data=256,model=1", 960, {}),
        ("mixtral-v5p", "mixtral-8x7b", "v5p-256", 12 * 128, 4096,
         "data=128,expert=1,model=1", 2909, {}),
        ("mixtral-v6e", "mixtral-8x7b", "v6e-256", 12 * 256, 4096,
         "data=256,expert=1,model=1", 3645, {}),
        ("deepseek-v3-v5p", "deepseek-v3", "v5p-512", 4 * 256, 8192,
         "data=1,expert=256,model=1", 542, {"sharding": "2d-all"}),
        ("llama3-8b-h100", "llama3-8b", "h100:8", 128, 8192, "data=8,model=1", 14451, FP8),
        ("llama3-8b-h200", "llama3-8b", "h200:8", 16, 8192, "data=8,model=1", 10938, FP8),
        ("llama3-70b-h100", "llama3-70b", "h100:128", 256, 8192, "data=128,model=1", 1052, {}),
        ("llama3-70b-fp8-h100", "llama3-70b", "h100:64", 128, 8192, "data=16,model=4", 1664, FP8),
        ("llama3.1-405b-fp8-h100", "llama3.1-405b", "h100:1024", 512, 8192,
         "data=128,model=8", 328, FP8),
        ("qwen3-30b-h100", "qwen3-30b-a3b", "h100:16", 512, 4096,
         "data=1,expert=16,model=1", 8960, {}),
        ("qwen3-235b-h100", "qwen3-235b-a22b", "h100:256", 2048, 4096,
         "data=8,expert=32,model=1", 1712, {}),
    )
}  # fmt: skip
"""Name -> a run. MaxText's are so many sequences on each of so many chips, parameters over all. The
stages of Megatron's pipelines are `data` here, which splits as much."""


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run published", __doc__)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(RUNS), help="which runs")
    add("--seconds", type=float, default=60.0, help="of search, for each")
    add("--microbatches", type=words, default="1,2,4,8", help="parts of a batch to choose from")
    return parser


def each_rate(row: RankedPlan) -> float:
    """Tokens a second of one device."""
    return row.rate / row.lowered.mesh.size


def line(name: str, run: PublishedRun, microbatches: Sequence[int], seconds: float) -> list[str]:
    """Searches, plans the run's own mesh, and compares."""
    fixed: dict[str, Any] = {
        "model": run.model, "batch": run.batch, "seq_len": run.seq_len,
        "microbatches": microbatches, "sharding": "2d", **run.choices,
    }  # fmt: skip
    search: Any = {"most_seconds": seconds, **fixed}
    ours = spmd.plan(training_step, run.machine, axes=axes_of(config_of(run.model)), **search)
    theirs = spmd.plan(training_step, run.machine, meshes=[dict(run.mesh)], **search).best
    best = min((ours.best, theirs), key=lambda row: (row.verdict != "fits", -row.rate))
    cells = [name, f"{run.batch} x {run.seq_len}", ours.label(best), f"{each_rate(best):,.0f}"]
    cells += [f"{best.mfu:.0%}", str(theirs.lowered.mesh), f"{each_rate(theirs):,.0f}"]
    cells += [theirs.verdict, f"{run.rate:,.0f}", f"{each_rate(theirs) / run.rate:.2f}"]
    return [*cells, f"{len(ours.rows)} in {ours.seconds:.0f} s"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}; rates are tokens/s of a device")
    header = (
        "run", "batch", "best plan", "predicted", "MFU", "its own mesh", "predicted there",
        "memory there", "published", "predicted there / published", "planned",
    )  # fmt: skip
    parts = tuple(map(int, given.microbatches))
    print_table(header, (line(name, RUNS[name], parts, given.seconds) for name in given.rows))
