"""One training step of a Llama, and the types of its arguments, without a single array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import spmd
from models.llama import model, sharding
from models.llama.config import LlamaConfig
from models.llama.model import Mark, no_marks

Step = Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]
"""(params, opt_state, batch) -> (params, opt_state, loss)."""


def batch_loss(
    config: LlamaConfig, mark: Mark = no_marks, z_loss: float = 0.0
) -> Callable[[Any, Any], jax.Array]:
    """`loss(params, batch)` where a batch holds `inputs` and `targets`, token ids (B, S).

    `segment_ids`, `positions` and `weights` (B, S) tell packed documents apart, if there.
    """

    def loss(params: Any, batch: Any) -> jax.Array:
        return model.loss(
            params,
            batch["inputs"],
            batch["targets"],
            config,
            mark,
            z_loss,
            segment_ids_BS=batch.get("segment_ids"),
            positions_BS=batch.get("positions"),
            weights_BS=batch.get("weights"),
        )

    return loss


def train_step(
    config: LlamaConfig, optimizer: optax.GradientTransformation, mark: Mark = no_marks
) -> Step:
    """The single-device training step, with nothing but the loss beside the update.

    Args:
        config: the model.
        optimizer: makes updates of gradients.
        mark: as for `model.forward`.
    """
    loss_fn = batch_loss(config, mark)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def argument_types(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    mesh: spmd.Mesh,
    batch_shape: tuple[int, int],
    table: sharding.Table = sharding.TWO_D,
) -> tuple[Any, Any, Any]:
    """`ShapeDtypeStruct`s of the step's arguments: parameters and batch marked, the state open.

    Args:
        config: the model.
        optimizer: whose state it is.
        mesh: for the marks of the tables; needs no devices.
        batch_shape: sequences in a batch, and tokens in each.
        table: the marks.
    """
    params = jax.eval_shape(lambda key: model.init(key, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct(batch_shape, np.int32)
    return (
        sharding.mark_params(params, mesh, config, table),
        jax.eval_shape(optimizer.init, params),
        sharding.mark_batch({"inputs": tokens, "targets": tokens}, mesh, table),
    )
