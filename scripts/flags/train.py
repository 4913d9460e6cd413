"""The flags of scripts/train_llama.py, in groups, and the run that they ask for."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import spmd
from models.llama import sharding
from models.llama.config import ATTENTIONS, DTYPES, LlamaConfig
from models.llama.model import MARK_POINTS
from models.llama.remat import check_can_offload, checkpoint_policy
from models.training.checkpoints.store import AUTO
from models.training.data import source as data
from models.training.run.description import RunConfig, RunError
from models.training.run.optimizer import OPTIMIZERS, OptimizerConfig, default_learning_rate
from models.training.run.profile import ProfileRange
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
        "--remat",
        default="none",
        help="activations to keep for the backward pass: none (recompute nothing), full (recompute "
        "all), dots, dots_no_batch, save_attention, save:NAMES or offload:NAMES (to the host's "
        f"memory), with names of {', '.join(MARK_POINTS)}",
    )
    add("--remat_every", type=int, default=1, help="recompute in every n-th layer only")


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
        default=0.0,
        help="seconds without a step before stacks are dumped; 0: off",
    )


def _data(add: Add) -> None:
    add(
        "--data",
        type=words,
        default=(),
        help="folders made by scripts/tokenize_data, mixed by their shares if given as folder@0.7; "
        "or files, directories or glob patterns of text (default: Python's standard library)",
    )
    add(
        "--tokenizer",
        default=data.BYTES,
        help="of text in --data: a tokenizer.json, a folder with one, or `bytes`; folders know "
        "theirs",
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
    add("--learning_rate", type=float, help="at its peak (default: by optimizer and model size)")
    add("--warmup_steps", type=int, help="(default: a tenth of the run, at most 100)")
    add("--weight_decay", type=float, default=0.1, help="AdamW's; norms are not decayed")
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
    add("--eval_batches", type=int, default=8, help="held-out batches of an evaluation; 0: none")
    add(
        "--sample_tokens",
        type=int,
        default=200,
        help="length of the text written at the end; 0: none",
    )


def _checkpoints(add: Add) -> None:
    add("--run_dir", help="folder for checkpoints, metrics, traces and the report")
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
    add("--log_every", type=int, default=0, help="steps between lines of progress; 0: twenty lines")
    add("--profile", help="steps to trace, first:last, both included, as in 10:13")
    add(
        "--report",
        help="HTML page on the partitioning, with prices of other plans; without: a plain one in "
        "--run_dir",
    )
    add("--verbose", action=Switch, help="also print every sharding and collective")


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


def make_run(given: argparse.Namespace, platform: str) -> RunConfig:
    """The run that the flags ask for.

    Args:
        given: the flags.
        platform: of the devices it is for; chooses the default dtype.
    """
    _check_axes(given)
    _check_paths(given)
    model = _make_model(given, platform)
    rate = given.learning_rate
    if rate is None:
        rate = default_learning_rate(given.optimizer, model.parameter_count())
    optimizer = OptimizerConfig(
        name=given.optimizer,
        total_steps=given.steps,
        learning_rate=rate,
        warmup_steps=given.warmup_steps,
        weight_decay=given.weight_decay,
        clip_norm=given.clip_norm or None,
    )
    values = vars(given)
    same = {field.name for field in dataclasses.fields(RunConfig)} & set(values)
    same -= {"model", "optimizer", "profile"}
    return RunConfig(
        model=model,
        optimizer=optimizer,
        profile=ProfileRange.parse(given.profile) if given.profile else None,
        **{name: values[name] for name in same},
    )


def _make_model(given: argparse.Namespace, platform: str) -> LlamaConfig:
    default_dtype = "float32" if platform == "cpu" else "bfloat16"
    changes: dict[str, Any] = {"num_hidden_layers": given.layers} if given.layers else {}
    checkpoint_policy(given.remat, MARK_POINTS)
    check_can_offload(given.remat, platform)
    return dataclasses.replace(
        weights.chosen_config(given),
        scan_layers=given.scan,
        attention=given.attention,
        dtype=given.dtype or default_dtype,
        param_dtype=given.param_dtype,
        remat=given.remat,
        remat_every=given.remat_every,
        **changes,
    )


def heartbeat_timeout(given: argparse.Namespace) -> float:
    """What `--heartbeat_timeout` asks for, in seconds.

    Raises:
        RunError: it is not positive.
    """
    seconds: float = given.heartbeat_timeout
    if not seconds > 0:
        raise RunError(f"--heartbeat_timeout must be positive, not {seconds:g}")
    return seconds


def wanted_step(given: argparse.Namespace) -> int | str | None:
    """What `--resume` asks for: a step, `"auto"`, or None."""
    text: str | None = given.resume
    if text is None or text == AUTO:
        return text
    if not text.isdecimal():
        raise RunError(f"--resume: {text!r} is no step, and not {AUTO}")
    return int(text)


def _check_paths(given: argparse.Namespace) -> None:
    """Raise `RunError` for paths that cannot work, before anything is loaded."""
    if given.run_dir is None:
        for name in ("resume", "save_every", "profile"):
            if getattr(given, name):
                raise RunError(f"--{name} needs --run_dir, the folder that keeps what is written")
    wanted_step(given)
    if not given.report:
        return
    path = Path(given.report).absolute()
    if path.is_dir():
        raise RunError(f"--report: {path} is a directory; name a file")
    if not path.parent.is_dir():
        raise RunError(f"--report: the directory {path.parent} does not exist")


def _check_axes(given: argparse.Namespace) -> None:
    """Raise `RunError` for axes that the model does not know, or that --dcn does not divide."""
    for flag, axes in (("mesh", given.mesh), ("dcn", given.dcn)):
        unknown = [name for name in axes if name not in sharding.MESH_AXES]
        if unknown:
            known = ", ".join(sharding.MESH_AXES)
            raise RunError(
                f"--{flag}: no axis is called {unknown[0]!r}; the model splits over {known}"
            )
    for name, size in given.dcn.items():
        if given.mesh.get(name, 1) % size:
            raise RunError(
                f"--dcn: {size} does not divide {name}={given.mesh.get(name, 1)} of --mesh, of "
                "which it is the part that crosses slices"
            )


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
    """`{"data": 4, "model": 2}` -> `"data=4,model=2"`, as flags spell it."""
    return ",".join(f"{name}={size}" for name, size in axes.items())
