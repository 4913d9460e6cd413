"""A Llama's training step as `spmd.plan` takes it: on any mesh, with what a run can choose."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import spmd
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import CONFIGS, named_config
from spmd.models.llama.program import LlamaProgram
from spmd.models.llama.weights.config import read_config
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.description import RunConfig
from spmd.models.training.run.optimizer import OptimizerConfig


def axes_of(config: LlamaConfig) -> tuple[str, ...]:
    """The mesh axes that are worth a try: experts have one of their own."""
    return ("data", *(("expert",) if config.num_experts else ()), "model")


def config_of(model: str) -> LlamaConfig:
    """The configuration that a name or a `config.json` (or its folder) describes."""
    return named_config(model) if model in CONFIGS else read_config(model)


def training_step(
    mesh: spmd.Mesh,
    *,
    model: str,
    batch: int,
    seq_len: int = 4096,
    remat: Any = ("full", "none"),
    sharding: Any = ("2d", "2d-sequence"),
    microbatches: int = 1,
    offload_optimizer: Any = (False, True),
    stage_microbatches: int = 0,
    stage_schedule: str = "auto",
    matmul: str = "dtype",
    dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer: str = "adamw",
    attention: str = "auto",
    layers: int = 0,
) -> spmd.Task:
    """The step that `train_llama` takes, layers scanned.

    Args:
        mesh: axes among data, expert, seq, model, stage: the last is that of a pipeline.
        model: a named one, or a `config.json`.
        batch: sequences of a step, on all devices.
        seq_len: tokens in each.
        remat: what is kept for the backward pass; with `none` the compiler decides by itself.
        offload_optimizer: whether the optimizer's state lies in the host's memory.
        stage_microbatches: of a pipeline; 0: four for each stage.
        layers: so many instead of the model's own.
    """
    config = config_of(model)
    stages = mesh.shape.get("stage", 1)
    run = RunConfig(
        model=dataclasses.replace(
            config,
            num_hidden_layers=layers or config.num_hidden_layers,
            matmul=matmul,
            dtype=dtype,
            param_dtype=param_dtype,
            attention=attention,
            stage_microbatches=stage_microbatches or (4 * stages if stages > 1 else 1),
            stage_schedule=stage_schedule,
        ),
        optimizer=OptimizerConfig(name=optimizer, learning_rate=1e-4),
        options=TrainerOptions(steps=1000),
        mesh=mesh.shape,
        seq_len=seq_len,
        global_batch=batch,
    )
    tokens = jax.ShapeDtypeStruct((batch, seq_len), np.int32)
    structs = {"inputs": tokens, "targets": tokens}
    named = {"model" if model in CONFIGS else "config": model}
    return task_of(
        mesh,
        run,
        structs,
        named,
        remat=remat,
        sharding=sharding,
        microbatches=microbatches,
        offload_optimizer=offload_optimizer,
    )


def task_of(
    mesh: spmd.Mesh,
    run: RunConfig,
    structs: Any,
    named: Mapping[str, str],
    *,
    remat: Any = ("full", "none"),
    sharding: Any = ("2d", "2d-sequence"),
    microbatches: int = 1,
    offload_optimizer: bool = False,
    teacher: LlamaConfig | None = None,
) -> spmd.Task:
    """A run's step on another mesh.

    Args:
        structs: of a batch.
        named: the settings that name its model.
        remat, sharding, microbatches, offload_optimizer: as of `training_step`.
        teacher: as of `LlamaProgram`.
    """
    stages, seq = (mesh.shape.get(axis, 1) for axis in ("stage", "seq"))
    model = dataclasses.replace(run.model, remat=remat, stages=stages, zigzag=seq)
    options = dataclasses.replace(
        run.options, microbatches=microbatches, offload_optimizer=offload_optimizer
    )
    changed = {"model": model, "mesh": mesh.shape, "sharding": sharding, "options": options}
    run = dataclasses.replace(run, dcn={}, **changed)
    pipelined = ("stage_microbatches", "stage_schedule") if stages > 1 else ()
    of_model = ("remat", "matmul", "dtype", "param_dtype", "attention", *pipelined)
    settings = {
        **named,
        "mesh": dict(mesh.shape),
        **{name: getattr(run, name) for name in ("global_batch", "seq_len", "sharding")},
        "microbatches": microbatches,
        "offload_optimizer": offload_optimizer,
        "optimizer": run.optimizer.name,
        **{name: getattr(model, name) for name in of_model},
    }
    program = LlamaProgram(run, mesh, structs, teacher)
    return program.task("fp8" if model.matmul == "fp8" else "bf16", settings)
