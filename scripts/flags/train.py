"""The flags of scripts/train_llama.py, in groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from models.llama import sharding
from models.llama.config import ATTENTIONS, DTYPES, MATMULS, STAGE_SCHEDULES
from models.llama.marks import MARK_POINTS
from models.training.checkpoints.found import AUTO
from models.training.data import source as data
from models.training.options import METRICS
from models.training.run.optimizer import OPTIMIZERS, SCHEDULES
from models.training.run.step import ON_NONFINITE
from scripts.flags import weights
from spmd.cli.flags import Add, Parser, Switch, positive, words
from spmd.cli.specs import mesh_axes


def make_parser(about: str | None) -> Parser:
    """All flags, in groups.

    Args:
        about: what `--help` says first.
    """
    parser = Parser("scripts/train_llama.py", about)
    for title, add_flags in GROUPS.items():
        add_flags(parser.add_argument_group(title).add_argument)
    return parser


def _model(add: Add) -> None:
    weights.add_model_flags(add)
    add("--layers", type=positive, help="so many layers instead of the model's own")
    add(
        "--scan",
        action=Switch,
        default=True,
        help="run the layers in a scan (compiles faster) or unroll them",
    )
    add("--dtype", choices=DTYPES, help="to compute in (default: float32 on CPU, else bfloat16)")
    add(
        "--param_dtype",
        choices=DTYPES,
        default="float32",
        help="what parameters are stored and updated in",
    )
    add(
        "--attention",
        choices=ATTENTIONS,
        default="auto",
        help="what computes attention; auto is the platform's fused kernel where it has one",
    )
    add(
        "--zigzag",
        type=positive,
        default=1,
        help="the size of the axis seq, so that all its devices have as much to attend to",
    )
    add(
        "--matmul",
        choices=MATMULS,
        default="dtype",
        help="what the layers' projections are multiplied in: --dtype, or 8-bit floats",
    )
    add(
        "--remat",
        default="none",
        help="activations to keep for the backward pass: none (recompute nothing), full (recompute "
        "all), dots, dots_no_batch, save_attention, save:NAMES or offload:NAMES (to the host's "
        f"memory), with names of {', '.join(MARK_POINTS)}",
    )
    add("--remat_every", type=int, default=1, help="recompute in every n-th layer only")
    add(
        "--stage_microbatches",
        type=int,
        default=1,
        help="with --mesh stage=S: parts of a batch that go through a pipeline of S stages",
    )
    add(
        "--stage_schedule",
        choices=STAGE_SCHEDULES,
        default="auto",
        help="the pipeline's schedule; auto takes the one that is predicted to be the fastest",
    )


def _devices(add: Add) -> None:
    add("--mesh", type=mesh_axes, default="data=4,model=2", help="mesh axes and their sizes")
    add(
        "--dcn",
        type=mesh_axes,
        default={},
        help="how much of each axis crosses slices or hosts, as in replica=2; such a part is the "
        "axis's outer one",
    )
    add(
        "--sharding",
        choices=sorted(sharding.TABLES),
        default="2d",
        help="what is split over what, by name",
    )
    add(
        "--heartbeat_timeout",
        type=float,
        default=60.0,
        help="seconds of silence after which another process counts as lost",
    )
    add(
        "--watchdog_timeout",
        type=float,
        default=1800.0,
        help="seconds without a step, after which stacks are written and the run ends; compiling, "
        "evaluating and saving may take ten times as long; 0: off",
    )


def _data(add: Add) -> None:
    add(
        "--data",
        type=words,
        default=(),
        help="folders made by scripts/tokenize_data, mixed by their shares if given as folder@0.7; "
        "or files, directories or glob patterns of text; or URLs of these, s3:// or gs:// "
        "(default: Python's standard library)",
    )
    add(
        "--tokenizer",
        help="of text in --data: a tokenizer.json, a folder with one, or `bytes` (default: that of "
        "--init_from, else bytes); folders of tokens know theirs, which has to be the same",
    )
    add(
        "--packing",
        choices=data.PACKINGS,
        default="none",
        help="whether documents that share a sequence are kept apart: by attention, positions and "
        "loss",
    )
    add("--seq_len", type=int, default=128, help="tokens of a sequence")
    add("--global_batch", type=int, default=16, help="sequences of a step, on all devices")
    add(
        "--microbatches",
        type=int,
        default=1,
        help="parts of a batch, one after the other; one reduction",
    )


def _training(add: Add) -> None:
    add("--steps", type=int, default=200, help="training steps, counted from the very first")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="which optimizer")
    add(
        "--learning_rate",
        type=float,
        help="at its peak (default: by optimizer and model size; a small one with --init_from)",
    )
    add("--schedule", choices=SCHEDULES, default="cosine", help="how the learning rate goes")
    add("--final_fraction", type=float, default=0.1, help="of it is left at the end")
    add("--decay_fraction", type=float, default=0.1, help="of the steps, in which wsd falls")
    add("--beta1", type=float, default=0.9, help="AdamW's, of the gradients' mean")
    add("--beta2", type=float, default=0.95, help="AdamW's, of their squares' mean")
    add("--warmup_steps", type=int, help="(default: a tenth of the run, at most 100)")
    add("--weight_decay", type=float, default=0.1, help="AdamW's; norms and biases are not")
    add(
        "--clip_norm",
        type=float,
        default=1.0,
        help="largest global norm of the gradients; 0 does not clip",
    )
    add(
        "--z_loss",
        type=float,
        default=0.0,
        help="weight of the squared log-normalizer of the softmax",
    )
    add(
        "--on_nonfinite",
        choices=ON_NONFINITE,
        default="stop",
        help="what a loss or gradient that is not finite does",
    )
    add("--max_skipped", type=int, default=10, help="so many steps in a row may be skipped")
    add("--seed", type=int, default=0, help="of parameters, samples and generated text")


def _evaluation(add: Add) -> None:
    add("--eval_every", type=int, default=0, help="steps between held-out losses; 0: at the end")
    add(
        "--eval_first",
        action=Switch,
        default=None,
        help="evaluate before the first step, too (default: with --init_from)",
    )
    add("--eval_batches", type=int, default=8, help="held-out batches of an evaluation; 0: none")
    add(
        "--sample_tokens",
        type=int,
        default=200,
        help="length of the text written at the end; 0: none",
    )


def _checkpoints(add: Add) -> None:
    add("--run_dir", help="folder or URL for checkpoints, metrics, traces and the report")
    add(
        "--resume",
        nargs="?",
        const=AUTO,
        metavar="STEP",
        help="go on from a checkpoint in --run_dir: a step, or auto, the latest that is whole; "
        "auto (or no word) starts anew where there is none",
    )
    add("--save_every", type=int, default=0, help="steps between checkpoints; 0: at the end only")
    add("--keep_last", type=int, default=3, help="so many of the latest checkpoints are kept")
    add("--keep_every", type=int, default=0, help="those of every n-th step are kept too; 0: none")


def _output(add: Add) -> None:
    add(
        "--metrics",
        type=metrics_words,
        default=",".join(METRICS),
        help=f"what is written into --run_dir: {', '.join(METRICS)}; '' for nothing",
    )
    add("--log_every", type=int, default=0, help="steps between lines of progress; 0: twenty lines")
    add("--profile", help="steps to trace, first:last, both included, as in 10:13")
    add(
        "--report",
        help="HTML page on the partitioning, with prices of other plans; without: a plain one in "
        "--run_dir",
    )
    add("--verbose", action=Switch, help="also print every sharding and collective")


def metrics_words(text: str) -> tuple[str, ...]:
    """Names of `METRICS`, joined by commas."""
    names = words(text)
    if set(names) - set(METRICS):
        raise ValueError
    return names


GROUPS: Mapping[str, Callable[[Add], None]] = {
    "model": _model,
    "weights": weights.add_weight_flags,
    "devices": _devices,
    "data": _data,
    "training": _training,
    "evaluation": _evaluation,
    "checkpoints": _checkpoints,
    "output": _output,
}
"""What `--help` shows, in this order."""
