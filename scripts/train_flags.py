"""The flags of scripts/train_llama.py, in groups, and the run that they ask for."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

import spmd
from models.llama import sharding
from models.llama.config import ATTENTIONS, CONFIGS, DTYPES, LlamaConfig
from models.llama.model import MARK_POINTS
from models.llama.remat import check_can_offload, checkpoint_policy
from models.training.checkpoints.store import AUTO
from models.training.data import source as data
from models.training.run.description import RunConfig, RunError
from models.training.run.optimizer import OPTIMIZERS, OptimizerConfig, default_learning_rate
from models.training.run.profile import ProfileRange
from models.training.run.step import ON_NONFINITE
from scripts import weight_flags

FLAGS = flags.FLAGS

flags.DEFINE_enum("model", "quickstart", sorted(CONFIGS), "Which Llama.")
flags.DEFINE_integer("layers", None, "So many layers instead of the model's own.")
flags.DEFINE_bool("scan", True, "Run the layers in a scan (compiles faster) or unroll them.")
flags.DEFINE_enum("dtype", None, DTYPES, "To compute in. Default: float32 on CPU, else bfloat16.")
flags.DEFINE_enum("param_dtype", "float32", DTYPES, "What parameters are stored and updated in.")
flags.DEFINE_string(
    "remat",
    "none",
    "Activations to keep for the backward pass: none (recompute nothing), full (recompute all), "
    "dots, dots_no_batch, save_attention, save:NAMES or offload:NAMES (to the host's memory), with "
    "names of " + ", ".join(MARK_POINTS) + ".",
)
flags.DEFINE_integer("remat_every", 1, "Recompute in every n-th layer only.")

flags.DEFINE_enum(
    "attention",
    "auto",
    ATTENTIONS,
    "What computes attention; auto is the platform's fused kernel where it has one.",
)

flags.DEFINE_string("mesh", "data=4,model=2", "Mesh axes and their sizes.")
flags.DEFINE_list(
    "dcn",
    [],
    "How much of each axis crosses slices or hosts, as in replica=2; such a part is the "
    "axis's outer one.",
)
flags.DEFINE_enum("sharding", "2d", sorted(sharding.TABLES), "What is split over what, by name.")

flags.DEFINE_list(
    "data",
    [],
    "Folders made by scripts/tokenize_data, mixed by their shares if given as folder@0.7; or "
    "files, directories or glob patterns of text. Default: Python's standard library.",
)
flags.DEFINE_string(
    "tokenizer",
    data.BYTES,
    "Of text in --data: a tokenizer.json, a folder with one, or `bytes`. Folders know theirs.",
)
flags.DEFINE_enum(
    "packing",
    "none",
    data.PACKINGS,
    "Whether documents that share a sequence are kept apart: by attention, positions and loss.",
)
flags.DEFINE_integer("seq_len", 128, "Tokens of a sequence.")
flags.DEFINE_integer("global_batch", 16, "Sequences of a step, on all devices.")
flags.DEFINE_integer("microbatches", 1, "Parts of a batch, one after the other; one reduction.")

flags.DEFINE_integer("steps", 200, "Training steps, counted from the very first.")
flags.DEFINE_enum("optimizer", "adamw", OPTIMIZERS, "Which optimizer.")
flags.DEFINE_float("learning_rate", None, "At its peak. Default: by optimizer and model size.")
flags.DEFINE_integer("warmup_steps", None, "Default: a tenth of the run, at most 100.")
flags.DEFINE_float("weight_decay", 0.1, "AdamW's; norms are not decayed.")
flags.DEFINE_float("clip_norm", 1.0, "Largest global norm of the gradients; 0 does not clip.")
flags.DEFINE_float("z_loss", 0.0, "Weight of the squared log-normalizer of the softmax.")
flags.DEFINE_enum(
    "on_nonfinite", "stop", ON_NONFINITE, "What a loss or gradient that is not finite does."
)
flags.DEFINE_integer("max_skipped", 10, "So many steps in a row may be skipped.")
flags.DEFINE_integer("seed", 0, "Of parameters, samples and generated text.")

flags.DEFINE_integer("eval_every", 0, "Steps between held-out losses; 0: at the end only.")
flags.DEFINE_integer("eval_batches", 8, "Held-out batches of an evaluation; 0 makes none.")
flags.DEFINE_integer("sample_tokens", 200, "Length of the text written at the end; 0: none.")

flags.DEFINE_string("run_dir", None, "Folder for checkpoints, metrics, traces and the report.")
flags.DEFINE_string(
    "resume",
    None,
    "Go on from a checkpoint in --run_dir: a step, or auto, the latest that is whole; auto starts "
    "anew where there is none.",
)
flags.DEFINE_integer("save_every", 0, "Steps between checkpoints; 0: at the end only.")
flags.DEFINE_integer("keep_last", 3, "So many of the latest checkpoints are kept.")
flags.DEFINE_integer("keep_every", 0, "Those of every n-th step are kept too; 0: none.")

flags.DEFINE_integer("log_every", 0, "Steps between lines of progress; 0: twenty lines.")
flags.DEFINE_string("profile", None, "Steps to trace, first:last, both included, as in 10:13.")
flags.DEFINE_string(
    "report",
    None,
    "HTML page on the partitioning, with prices of other plans. Without: a plain one in --run_dir.",
)
flags.DEFINE_bool("verbose", False, "Also print every sharding and collective.")
flags.DEFINE_float(
    "watchdog_timeout", 0, "Seconds without a step before stacks are dumped; 0: off."
)
flags.DEFINE_float(
    "heartbeat_timeout", 60, "Seconds of silence after which another process counts as lost."
)

GROUPS: Mapping[str, Sequence[str]] = {
    "model": (
        "model", "config", "ignore_config_keys", "layers", "scan", "dtype", "param_dtype",
        "attention", "remat", "remat_every",
    ),
    "weights": ("init_from", "export_hf", "export_dtype"),
    "devices": ("mesh", "dcn", "sharding", "heartbeat_timeout", "watchdog_timeout"),
    "data": ("data", "tokenizer", "packing", "seq_len", "global_batch", "microbatches"),
    "training": (
        "steps", "optimizer", "learning_rate", "warmup_steps", "weight_decay", "clip_norm",
        "z_loss", "on_nonfinite", "max_skipped", "seed",
    ),
    "evaluation": ("eval_every", "eval_batches", "sample_tokens"),
    "checkpoints": ("run_dir", "resume", "save_every", "keep_last", "keep_every"),
    "output": ("log_every", "profile", "report", "verbose"),
}  # fmt: skip
"""What `--help` shows, in this order."""


def help_text(about: str) -> str:
    """All flags, group by group."""
    lines = [about.strip(), ""]
    for group, names in GROUPS.items():
        lines.append(f"{group}:")
        for name in names:
            lines += _help_of(name)
        lines.append("")
    return "\n".join(lines)


def _help_of(name: str) -> list[str]:
    flag = FLAGS[name]
    is_shown = flag.default not in (None, [], "")
    default = f" [{str(flag.default).lower()}]" if is_shown else ""
    text = f"{flag.help}{default}"
    shown = f"--[no]{name}" if flag.boolean else f"--{name}"
    return textwrap.wrap(text, 100, initial_indent=f"  {shown:<19} ", subsequent_indent=" " * 22)


def with_resume_value(argv: Sequence[str]) -> list[str]:
    """A bare `--resume` means `--resume=auto`."""
    words = list(argv)
    for index, word in enumerate(words):
        follows = words[index + 1] if index + 1 < len(words) else "--"
        if word in ("--resume", "-resume") and follows.startswith("-"):
            words[index] = f"--resume={AUTO}"
    return words


def make_run(platform: str) -> RunConfig:
    """The run that the flags ask for.

    Args:
        platform: of the devices it is for; chooses the default dtype.
    """
    _check_paths()
    model = _make_model(platform)
    rate = FLAGS.learning_rate
    if rate is None:
        rate = default_learning_rate(FLAGS.optimizer, model.parameter_count())
    optimizer = OptimizerConfig(
        name=FLAGS.optimizer,
        total_steps=FLAGS.steps,
        learning_rate=rate,
        warmup_steps=FLAGS.warmup_steps,
        weight_decay=FLAGS.weight_decay,
        clip_norm=FLAGS.clip_norm or None,
    )
    same = {field.name for field in dataclasses.fields(RunConfig)} & set(FLAGS)
    same -= {"model", "optimizer", "mesh", "dcn", "data", "profile"}
    numbers: dict[str, Any] = {name: FLAGS[name].value for name in same}
    return RunConfig(
        model=model,
        optimizer=optimizer,
        mesh=parse_mesh(FLAGS.mesh),
        dcn=parse_dcn(FLAGS.dcn, parse_mesh(FLAGS.mesh)),
        data=tuple(FLAGS.data),
        profile=ProfileRange.parse(FLAGS.profile) if FLAGS.profile else None,
        **numbers,
    )


def _make_model(platform: str) -> LlamaConfig:
    default_dtype = "float32" if platform == "cpu" else "bfloat16"
    changes: dict[str, Any] = {"num_hidden_layers": FLAGS.layers} if FLAGS.layers else {}
    checkpoint_policy(FLAGS.remat, MARK_POINTS)
    check_can_offload(FLAGS.remat, platform)
    return dataclasses.replace(
        weight_flags.chosen_config(FLAGS["model"]),
        scan_layers=FLAGS.scan,
        attention=FLAGS.attention,
        dtype=FLAGS.dtype or default_dtype,
        param_dtype=FLAGS.param_dtype,
        remat=FLAGS.remat,
        remat_every=FLAGS.remat_every,
        **changes,
    )


def heartbeat_timeout() -> float:
    """What `--heartbeat_timeout` asks for, in seconds.

    Raises:
        RunError: it is not positive.
    """
    seconds: float = FLAGS.heartbeat_timeout
    if not seconds > 0:
        raise RunError(f"--heartbeat_timeout must be positive, not {seconds:g}")
    return seconds


def wanted_step() -> int | str | None:
    """What `--resume` asks for: a step, `"auto"`, or None."""
    text: str | None = FLAGS.resume
    if text is None or text == AUTO:
        return text
    if not text.isdecimal():
        raise RunError(f"--resume: {text!r} is no step, and not {AUTO}")
    return int(text)


def _check_paths() -> None:
    """Raise `RunError` for paths that cannot work, before anything is loaded."""
    if FLAGS.run_dir is None:
        for name in ("resume", "save_every", "profile"):
            if FLAGS[name].value:
                raise RunError(f"--{name} needs --run_dir, the folder that keeps what is written")
    wanted_step()
    if not FLAGS.report:
        return
    path = Path(FLAGS.report).absolute()
    if path.is_dir():
        raise RunError(f"--report: {path} is a directory; name a file")
    if not path.parent.is_dir():
        raise RunError(f"--report: the directory {path.parent} does not exist")


def parse_mesh(text: str, flag: str = "mesh") -> dict[str, int]:
    """`"data=4,model=2"` -> `{"data": 4, "model": 2}`.

    Raises:
        RunError: not of that form, an unknown or repeated axis, or a size below 1.
    """
    axes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if not size.isdecimal() or int(size) < 1:
            raise RunError(f"--{flag}: {item!r} is not of the form axis=size, as in data=4,model=2")
        if name not in sharding.MESH_AXES:
            known = ", ".join(sharding.MESH_AXES)
            raise RunError(f"--{flag}: no axis is called {name!r}; the model splits over {known}")
        if name in axes:
            raise RunError(f"--{flag}: axis {name!r} is given twice")
        axes[name] = int(size)
    return axes


def parse_dcn(items: Sequence[str], mesh: Mapping[str, int]) -> dict[str, int]:
    """`["replica=2"]` -> `{"replica": 2}`, how much of each axis of the mesh crosses slices.

    Raises:
        RunError: not of that form, an axis that the mesh lacks, or one that it does not divide.
    """
    parts = parse_mesh(",".join(items), "dcn") if items else {}
    for name, size in parts.items():
        if mesh.get(name, 1) % size:
            raise RunError(
                f"--dcn: {size} does not divide {name}={mesh.get(name, 1)} of --mesh, of which it "
                "is the part that crosses slices"
            )
    return parts


def make_mesh(run: RunConfig, devices: Sequence[Any]) -> spmd.Mesh:
    """The mesh of a run, on as many of the devices as it needs."""
    chosen = pick_devices(run.mesh, devices)
    if not run.dcn:
        return spmd.make_mesh(devices=chosen, **run.mesh)
    ici = {name: size // run.dcn.get(name, 1) for name, size in run.mesh.items()}
    return spmd.HybridMesh(ici, run.dcn, devices=chosen)


def pick_devices(axes: Mapping[str, int], devices: Sequence[Any]) -> Sequence[Any]:
    """As many of the visible devices as the mesh needs.

    Raises:
        RunError: there are fewer; says how to get virtual CPU devices.
    """
    needed = math.prod(axes.values())
    if needed <= len(devices):
        _check_every_process_computes(axes, devices, devices[:needed])
        return devices[:needed]
    raise RunError(
        f"--mesh: {format_axes(axes)} needs {needed} devices, and {len(devices)} of the kind "
        f"{devices[0].device_kind} can be seen; give a smaller mesh or, for "
        "virtual CPU devices, set JAX_PLATFORMS=cpu "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    )


def _check_every_process_computes(
    axes: Mapping[str, int], devices: Sequence[Any], used: Sequence[Any]
) -> None:
    idle = {d.process_index for d in devices} - {d.process_index for d in used}
    if idle:
        raise RunError(
            f"--mesh: {format_axes(axes)} leaves process {min(idle)} without a device: there are "
            f"{len(devices)} in all; give a larger mesh or start fewer processes"
        )


def format_axes(axes: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())
