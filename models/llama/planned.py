"""A Llama's training step as `spmd.plan` takes it: on any mesh, with what a run can choose."""

import dataclasses
from typing import Any

import spmd
from spmd.models.llama import sharding as shardings
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.flops import flops_per_token
from spmd.models.llama.named import CONFIGS, named_config
from spmd.models.llama.step import argument_types, batch_loss
from spmd.models.llama.weights.config import read_config
from spmd.models.training.run.optimizer import OptimizerConfig, make_optimizer
from spmd.models.training.run.step import make_train_step


def axes_of(model: str) -> tuple[str, ...]:
    """The mesh axes that are worth a try: experts have one of their own."""
    return ("data", *(("expert",) if config_of(model).num_experts else ()), "model")


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
        stage_microbatches: of a pipeline; 0: four for each stage.
        layers: so many instead of the model's own.
    """
    config = config_of(model)
    stages = mesh.shape.get("stage", 1)
    fields: dict[str, Any] = {
        "num_hidden_layers": layers or config.num_hidden_layers,
        "remat": remat,
        "matmul": matmul,
        "dtype": dtype,
        "param_dtype": param_dtype,
        "attention": attention,
        "stages": stages,
        "stage_microbatches": stage_microbatches or (4 * stages if stages > 1 else 1),
        "stage_schedule": stage_schedule,
        "zigzag": mesh.shape.get("seq", 1),
    }
    config = dataclasses.replace(config, **fields)
    table = shardings.table_named(sharding)
    rule = make_optimizer(OptimizerConfig(name=optimizer, learning_rate=1e-4, total_steps=1000))
    loss = batch_loss(config, shardings.activation_marks(mesh, config, table))
    step = make_train_step(loss, rule, microbatches=microbatches)
    settings = {
        "model" if model in CONFIGS else "config": model,
        "mesh": dict(mesh.shape),
        "global_batch": batch,
        "seq_len": seq_len,
        "remat": remat,
        "sharding": sharding,
        "microbatches": microbatches,
        "matmul": matmul,
        "dtype": dtype,
        "param_dtype": param_dtype,
        "optimizer": optimizer,
        "attention": attention,
    }
    pipeline = {
        "stage_microbatches": fields["stage_microbatches"],
        "stage_schedule": stage_schedule,
    }
    return spmd.Task(
        step,
        argument_types(config, rule, mesh, (batch, seq_len), table),
        donate_argnums=(0, 1),
        tokens=batch * seq_len,
        flops=flops_per_token(config, seq_len) * batch * seq_len,
        dtype="fp8" if matmul == "fp8" else "bf16",
        settings=settings | (pipeline if stages > 1 else {}),
    )
