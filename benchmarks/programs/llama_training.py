"""Llama training steps: fully sharded, two-dimensional, over stages, with accumulation."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import spmd
from benchmarks.programs.program import Built, Program, marked, on_meshes, structs_of, training_step
from spmd.models.llama import fresh, objective, sharding
from spmd.models.llama.config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    attention="einsum",  # every partitioner sees the same ops
)
BATCH, LENGTH, MICROBATCHES = 16, 128, 8
STAGE_MICROBATCHES = 4

LossAndGrads = Callable[[Any, Any], Any]
"""(params, batch) -> (loss, gradients)."""


def llama_training_programs() -> list[Program]:
    """Every variant."""
    programs = []
    for scan in (True, False):
        layers = "scan" if scan else "unrolled"
        programs += on_meshes(
            f"llama-train/{layers}", partial(build, scan=scan), "8x1", "4x2", "2x4"
        )
        programs += on_meshes(
            f"llama-train/split-sequence-{layers}",
            partial(build, scan=scan, split_sequence=True),
            "4x2",
            "2x4",
        )
    for name in ACCUMULATE:
        meshes = ("8x1", "4x2") if name == "python" else ("8x1", "4x2", "2x4")
        programs += on_meshes(
            f"llama-train/accumulate-{name}", partial(build, accumulate=name), *meshes
        )
    for schedule in ("gpipe", "1f1b", "interleaved"):
        programs += on_meshes(
            f"llama-train/stages-{schedule}", partial(build, schedule=schedule), "2x4x1", "2x2x2"
        )
    return programs


def build(
    mesh: spmd.Mesh,
    scan: bool = True,
    split_sequence: bool = False,
    accumulate: str = "",
    schedule: str = "auto",
) -> Built:
    """AdamW on the mean loss of a batch, or of `MICROBATCHES` of them one after another.

    Args:
      mesh: with axes `data` and `model`; where `model` has size 1 this is plain FSDP. Over an axis
        `stage` is a pipeline.
      scan: whether the layers are scanned.
      split_sequence: whether the residual stream is split over `model` along the sequence.
      accumulate: a key of `ACCUMULATE`, or nothing for one batch.
    """
    config = dataclasses.replace(
        CONFIG,
        scan_layers=scan,
        stages=mesh.shape.get("stage", 1),
        stage_microbatches=STAGE_MICROBATCHES,
        stage_schedule=schedule,
    )
    table = sharding.TABLES["2d-sequence" if split_sequence else "2d"]
    mark = sharding.activation_marks(mesh, config, table)
    optimizer = optax.adamw(1e-3)

    def loss_and_grads(params: Any, batch: Any) -> tuple[Any, Any]:
        return jax.value_and_grad(objective.loss)(
            params, batch["inputs"], batch["targets"], config, mark
        )

    def accumulated(params: Any, batches: Any) -> Any:
        total = ACCUMULATE[accumulate](loss_and_grads, params, batches)
        return jax.tree.map(lambda t: t / MICROBATCHES, total)

    params = structs_of(lambda key: fresh.init(key, config), jax.random.key(0))
    state = structs_of(optimizer.init, params)
    if accumulate:
        tokens = marked(mesh, (None, "data"), (MICROBATCHES, BATCH, LENGTH), jnp.int32)
    else:
        tokens = marked(mesh, ("data",), (BATCH, LENGTH), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    args = (sharding.mark_params(params, mesh, config), state, batch)
    step = training_step(accumulated if accumulate else loss_and_grads, optimizer)
    return Built(step, args, donate=(0, 1))


def accumulate_in_scan(loss_and_grads: LossAndGrads, params: Any, batches: Any) -> Any:
    """The sum over microbatches, `lax.scan` over their leading dim."""

    def body(total: Any, batch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, loss_and_grads(params, batch)), None

    return jax.lax.scan(body, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), batches)[0]


def accumulate_in_fori_loop(loss_and_grads: LossAndGrads, params: Any, batches: Any) -> Any:
    """The sum over microbatches, `lax.fori_loop` that takes the i-th of them."""

    def body(i: Any, total: Any) -> Any:
        batch = jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, i, 0, False), batches)
        return jax.tree.map(jnp.add, total, loss_and_grads(params, batch))

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.fori_loop(0, MICROBATCHES, body, zeros)


def accumulate_in_python(loss_and_grads: LossAndGrads, params: Any, batches: Any) -> Any:
    """The sum over microbatches, a Python loop."""
    total = loss_and_grads(params, jax.tree.map(lambda b: b[0], batches))
    for i in range(1, MICROBATCHES):
        batch = jax.tree.map(lambda b, i=i: b[i], batches)
        total = jax.tree.map(jnp.add, total, loss_and_grads(params, batch))
    return total


ACCUMULATE: dict[str, Callable[[LossAndGrads, Any, Any], Any]] = {
    "scan": accumulate_in_scan,
    "fori": accumulate_in_fori_loop,
    "python": accumulate_in_python,
}
"""How users write gradient accumulation."""
