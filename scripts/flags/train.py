"""The flags of scripts/train_llama.py, in groups."""

from collections.abc import Callable, Mapping

from spmd.cli.flags import Add, Parser, Switch, positive, words
from spmd.cli.specs import mesh_axes
from spmd.models.fields import of_fields, read_by
from spmd.models.llama import sharding
from spmd.models.llama.config import ATTENTIONS, DTYPES, MATMULS, STAGE_SCHEDULES, LlamaConfig
from spmd.models.llama.lora import TARGETS, LoraConfig
from spmd.models.llama.marks import MARK_POINTS
from spmd.models.training.checkpoints.found import AUTO
from spmd.models.training.options import METRICS, TrainerOptions
from spmd.models.training.run.description import RunConfig
from spmd.models.training.run.optimizer import OPTIMIZERS, SCHEDULES, OptimizerConfig
from spmd.scripts.flags import weights


def make_parser(about: str | None) -> Parser:
    """All flags, in groups.

    Args:
        about: what `--help` says first.
    """
    parser = Parser("scripts/train_llama.py", about, settings=True)
    for title, add_flags in GROUPS.items():
        add_flags(parser.add_argument_group(title).add_argument)
    return parser


def _model(add: Add) -> None:
    of_model = of_fields(add, LlamaConfig)
    weights.add_model_flags(add)
    add("--layers", type=positive, help="so many layers instead of the model's own")
    add(
        "--scan",
        action=Switch,
        default=LlamaConfig.scan_layers,
        help="run the layers in a scan (compiles faster) or unroll them",
    )
    add("--dtype", choices=DTYPES, help="to compute in (default: float32 on CPU, else bfloat16)")
    of_model("--param_dtype", choices=DTYPES, help="what parameters are stored and updated in")
    of_model(
        "--attention",
        choices=ATTENTIONS,
        help="what computes attention; auto is the platform's fused kernel where it has one",
    )
    of_model(
        "--zigzag",
        type=positive,
        help="the size of the axis seq, so that all its devices have as much to attend to",
    )
    of_model(
        "--matmul",
        choices=MATMULS,
        help="what the layers' projections are multiplied in: --dtype, or 8-bit floats",
    )
    of_model(
        "--remat",
        help="activations to keep for the backward pass: none (recompute nothing), full (recompute "
        "all), dots, dots_no_batch, save_attention, save:NAMES or offload:NAMES (to the host's "
        f"memory), with names of {', '.join(MARK_POINTS)}",
    )
    of_model("--remat_every", help="recompute in every n-th layer only")
    of_model(
        "--hot_experts",
        help="so many experts of a layer that most tokens take are computed where the tokens are",
    )
    of_model(
        "--stage_microbatches",
        help="with --mesh stage=S: parts of a batch that go through a pipeline of S stages",
    )
    of_model(
        "--stage_schedule",
        choices=STAGE_SCHEDULES,
        help="the pipeline's schedule; auto takes the one that is predicted to be the fastest",
    )


def _devices(add: Add) -> None:
    of_run, of_options = of_fields(add, RunConfig), of_fields(add, TrainerOptions)
    add("--mesh", type=mesh_axes, default="data=4,model=2", help="mesh axes and their sizes")
    add(
        "--plan",
        type=words,
        metavar="MACHINES",
        help="train nothing: find the fastest mesh, of the axes of --mesh, of machines that need "
        "not be here (v5p-256,h200:8); --report writes a page",
    )
    of_run(
        "--dcn",
        type=mesh_axes,
        help="how much of each axis crosses slices or hosts, as in replica=2; such a part is the "
        "axis's outer one",
    )
    of_run("--sharding", choices=sorted(sharding.TABLES), help="what is split over what, by name")
    add(
        "--heartbeat_timeout",
        type=float,
        default=60.0,
        help="seconds of silence after which another process counts as lost",
    )
    of_options(
        "--watchdog_timeout",
        help="seconds without a step, after which stacks are written and the run ends; compiling, "
        "evaluating and saving may take ten times as long; 0: off",
    )


def _data(add: Add) -> None:
    of_run, of_options = of_fields(add, RunConfig), of_fields(add, TrainerOptions)
    of_run(
        "--data",
        help="folders made by scripts/tokenize_data, mixed by their shares if given as folder@0.7; "
        "or files, directories or glob patterns of text; or URLs of these, s3:// or gs:// "
        "(default: Python's standard library)",
    )
    add(
        "--tokenizer",
        help="of text in --data: a tokenizer.json, a folder with one, or `bytes` (default: that of "
        "--init_from, else bytes); folders of tokens know theirs, which has to be the same",
    )
    of_run(
        "--packing",
        help="whether documents that share a sequence are kept apart, by attention, positions and "
        "loss (boundaries), and whole (documents); auto: documents where only answers are learned, "
        "else none",
    )
    of_run("--seq_len", default=128, help="tokens of a sequence")
    of_run("--global_batch", default=16, help="sequences of a step, on all devices")
    of_options("--offload_optimizer", help="keep the optimizer's state in the host's memory")
    of_options("--microbatches", help="parts of a batch, one after the other; one reduction")


def _training(add: Add) -> None:
    of_optimizer, of_options = of_fields(add, OptimizerConfig), of_fields(add, TrainerOptions)
    add(
        "--lora",
        **read_by(LoraConfig.parse),
        metavar="rank=R[,alpha=A][,targets=T+T]",
        help="train low-rank adapters of the projections alone (default: alpha twice the rank, all "
        f"targets: {', '.join(TARGETS)})",
    )
    of_fields(add, LlamaConfig)(
        "--router_bias_rate",
        help="how far biases of DeepSeek-V3's experts go towards even loads in a step; 0: none",
    )
    of_options("--steps", default=200, help="training steps, counted from the very first")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="which optimizer")
    of_optimizer(
        "--learning_rate",
        help="at its peak (default: by optimizer and model size; a small one with --init_from)",
    )
    of_optimizer("--schedule", choices=SCHEDULES, help="how the learning rate goes")
    of_optimizer("--final_fraction", help="of it is left at the end")
    of_optimizer("--decay_fraction", help="of the steps, in which wsd falls")
    of_optimizer("--beta1", help="AdamW's, of the gradients' mean")
    of_optimizer("--beta2", help="AdamW's, of their squares' mean")
    of_optimizer("--warmup_steps", help="(default: a tenth of the run, at most 100)")
    of_optimizer("--weight_decay", help="AdamW's; norms and biases are not")
    of_optimizer("--clip_norm", help="largest global norm of the gradients; 0 does not clip")
    of_run = of_fields(add, RunConfig)
    of_run("--z_loss", help="weight of the squared log-normalizer of the softmax")
    of_run("--dpo_beta", help="where data are preferences: how much it costs to leave --init_from")
    of_run("--teacher", help="folder or URL of weights, or a bundle, whose distribution is learned")
    of_run("--distill_temperature", help="divides the logits of both for that")
    of_run("--distill_share", help="of the divergence from the teacher in the loss; else data's")
    of_options("--on_nonfinite", help="what a loss, gradient or update that is not finite does")
    of_options("--max_skipped", help="so many steps in a row may be skipped")
    of_options("--audit_every", help="steps between comparisons of devices' copies; 0: none")
    of_options("--audit_steps", help="compute every such step twice, by other devices")
    of_options("--seed", help="of parameters, samples and generated text")


def _evaluation(add: Add) -> None:
    of_options = of_fields(add, TrainerOptions)
    of_options("--eval_every", help="steps between held-out losses; 0: at the end")
    of_options(
        "--eval_first",
        default=None,
        help="evaluate before the first step, too (default: with --init_from)",
    )
    of_fields(add, RunConfig)(
        "--valid_data",
        help="what is evaluated on, named as in --data (default: a 20th of --data, which is then "
        "not trained on)",
    )
    of_options("--patience", help="evaluations without a better one that end the run; 0: none do")
    of_options("--eval_batches", help="held-out batches of an evaluation; 0: none")
    add(
        "--sample_tokens",
        type=int,
        default=200,
        help="length of the text written at the end; 0: none",
    )


def _checkpoints(add: Add) -> None:
    of_options = of_fields(add, TrainerOptions)
    of_options("--run_dir", help="folder or URL for checkpoints, metrics, traces and the report")
    of_options(
        "--resume",
        nargs="?",
        const=AUTO,
        default=None,
        metavar="STEP",
        help="go on from a checkpoint in --run_dir: a step, or auto, the latest that is whole; "
        "auto (or no word) starts anew where there is none",
    )
    of_options("--save_every", help="steps between checkpoints; 0: at the end only")
    of_options("--keep_best", help="each evaluation that is the best so far is saved, and kept")
    of_options("--keep_last", help="so many of the latest checkpoints are kept")
    of_options("--keep_every", help="those of every n-th step are kept too; 0: none")


def _output(add: Add) -> None:
    of_options = of_fields(add, TrainerOptions)
    of_options(
        "--metrics", help=f"what is written into --run_dir: {', '.join(METRICS)}; '' for nothing"
    )
    of_options("--log_every", help="steps between lines of progress; 0: twenty lines")
    of_options("--profile", help="steps to trace, first:last, both included, as in 10:13")
    add(
        "--report",
        help="HTML page on the partitioning, with prices of other plans; without: a plain one in "
        "--run_dir",
    )
    of_options("--verbose", help="also print every sharding and collective")


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
