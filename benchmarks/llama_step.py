"""The simplest training step of a Llama, and the types of its arguments; it makes no arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

import spmd
from spmd.models.llama import fresh, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.marks import Mark, no_marks
from spmd.models.llama.objective import batch_loss
from spmd.models.training.run.optimizer import initial_state, updated

Step = Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]
"""(params, opt_state, batch) -> (params, opt_state, loss)."""


def train_step(
    config: LlamaConfig, optimizer: optax.GradientTransformation, mark: Mark = no_marks
) -> Step:
    """Returns a single-device training step: loss, gradients, update.

    Args:
        mark: as for `model.forward`.
    """
    loss_fn = partial(batch_loss, config=config, mark=mark)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return *updated(optimizer, loss, grads, opt_state, params), loss

    return step


def argument_types(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    mesh: spmd.Mesh,
    batch_shape: tuple[int, int],
    table: sharding.SpecTable = sharding.TWO_D,
) -> tuple[Any, Any, Any]:
    """The step's arguments as `ShapeDtypeStruct`s; parameters and batch are marked.

    The optimizer state is not marked: its shardings are inferred.

    Args:
        mesh: for the marks; needs no devices.
        batch_shape: sequences in a batch, and tokens in each.
    """
    params = jax.eval_shape(lambda key: fresh.init(key, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct(batch_shape, np.int32)
    return (
        sharding.mark_params(params, mesh, config, table),
        jax.eval_shape(partial(initial_state, optimizer), params),
        sharding.mark_batch({"inputs": tokens, "targets": tokens}, mesh, table),
    )
