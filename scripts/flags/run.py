"""The run that the flags of scripts/train_llama.py ask for, and the mesh that it is on."""

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import spmd
from spmd.models.fields import taken
from spmd.models.llama import sharding
from spmd.models.llama.remat import check_can_offload, checkpoint_policy
from spmd.models.training.errors import RunError
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.description import RunConfig
from spmd.models.training.run.optimizer import OptimizerConfig, default_learning_rate
from spmd.scripts.flags import weights


def make_run(given: argparse.Namespace, platform: str) -> RunConfig:
    """The run that the flags ask for.

    Args:
        platform: of the devices it is for; chooses the default dtype.
    """
    _check_axes(given)
    _check_paths(given)
    default_dtype = "float32" if platform == "cpu" else "bfloat16"
    changes: dict[str, Any] = {"num_hidden_layers": given.layers} if given.layers else {}
    checkpoint_policy(given.remat)
    check_can_offload(given.remat, platform)
    model = dataclasses.replace(
        weights.chosen_config(given),
        scan_layers=given.scan,
        attention=given.attention,
        zigzag=given.zigzag,
        matmul=given.matmul,
        dtype=given.dtype or default_dtype,
        param_dtype=given.param_dtype,
        remat=given.remat,
        remat_every=given.remat_every,
        hot_experts=given.hot_experts,
        stages=given.mesh.get("stage", 1),
        stage_microbatches=given.stage_microbatches,
        stage_schedule=given.stage_schedule,
        router_bias_rate=given.router_bias_rate,
        **changes,
    )
    rate = given.learning_rate
    if rate is None:
        tuned = bool(given.init_from or given.lora)
        rate = default_learning_rate(given.optimizer, model.parameter_count(), tuned=tuned)
        rate *= 10 if given.lora else 1  # adapters begin at 0
    # Before the first step an evaluation says what trained weights are worth so far.
    eval_first = bool(given.init_from if given.eval_first is None else given.eval_first)
    return taken(
        RunConfig,
        given,
        model=model,
        tokenizer=weights.chosen_tokenizer(given, model),
        optimizer=taken(
            OptimizerConfig,
            given,
            name=given.optimizer,
            learning_rate=rate,
            clip_norm=given.clip_norm or None,
        ),
        options=taken(TrainerOptions, given, eval_first=eval_first),
    )


def _check_paths(given: argparse.Namespace) -> None:
    """Raise `RunError` for paths that cannot work, before anything is loaded."""
    if given.run_dir is None:
        kept = {"resume": given.resume is not None, "profile": given.profile is not None}
        for name, is_wanted in (kept | {"save_every": given.save_every}).items():
            if is_wanted:
                raise RunError(f"--{name} needs --run_dir, the folder that keeps what is written")
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
        idle = {d.process_index for d in devices[needed:]}
        idle -= {d.process_index for d in devices[:needed]}
        if idle:
            raise RunError(
                f"--mesh: {format_axes(axes)} leaves process {min(idle)} without a device: there "
                f"are {len(devices)} in all; give a larger mesh or start fewer processes"
            )
        return devices[:needed]
    raise RunError(
        f"--mesh: {format_axes(axes)} needs {needed} devices, and {len(devices)} of the kind "
        f"{devices[0].device_kind} can be seen; give a smaller mesh or, for "
        "virtual CPU devices, set JAX_PLATFORMS=cpu "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    )


def format_axes(axes: Mapping[str, int]) -> str:
    """`{"data": 4, "model": 2}` -> `"data=4,model=2"`, as flags spell it."""
    return ",".join(f"{name}={size}" for name, size in axes.items())
