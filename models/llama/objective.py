"""What training makes small: the cross-entropy of the next token, and the experts' balance.

Shapes are in the names, as in `model.py`.
"""

import functools

import jax
import jax.numpy as jnp

import spmd
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.experts import balance
from spmd.models.llama.marks import Mark, no_marks
from spmd.models.llama.model import logits_and_loads
from spmd.models.llama.parameters import Params


def loss(
    params: Params,
    inputs_BS: jax.Array,
    targets_BS: jax.Array,
    config: LlamaConfig,
    mark: Mark = no_marks,
    z_loss: float = 0.0,
    *,
    segment_ids_BS: jax.Array | None = None,
    positions_BS: jax.Array | None = None,
    weights_BS: jax.Array | None = None,
) -> jax.Array:
    """Mean cross-entropy of the next token at each position, in nats and float32.

    With experts, `router_aux_loss_coef` times their load-balancing loss is added.

    Args:
        params: as from `fresh.init`.
        targets_BS: the token after each of them.
        config: the model; `zigzag` says in which order the tokens are computed.
        mark: as for `model.forward`.
        z_loss: as for `cross_entropy`.
        segment_ids_BS: as for `model.forward`.
        positions_BS: as for `model.forward`.
        weights_BS: the weight of each target in the mean; None weighs all the same.
    """
    if config.zigzag > 1:  # a mean over positions does not depend on their order
        order = functools.partial(spmd.ops.zigzag, parts=config.zigzag, dim=-1)
        inputs_BS, targets_BS = order(inputs_BS), order(targets_BS)
        positions_BS = order(
            jnp.arange(inputs_BS.shape[1]) if positions_BS is None else positions_BS
        )
        segment_ids_BS, weights_BS = (
            None if x_BS is None else order(x_BS) for x_BS in (segment_ids_BS, weights_BS)
        )
    logits_BSV, loads = logits_and_loads(
        params, inputs_BS, config, mark, segment_ids_BS, positions_BS
    )
    loss = cross_entropy(logits_BSV, targets_BS, weights_BS, z_loss=z_loss)
    if loads is not None and config.router_aux_loss_coef:
        loss += config.router_aux_loss_coef * balance(loads)
    return loss


def cross_entropy(
    logits_BSV: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array | None = None,
    *,
    z_loss: float = 0.0,
) -> jax.Array:
    """Mean of `-log softmax(logits)[target]`, in float32.

    Args:
        weights_BS: the weight of each target in the mean; None weighs all the same. If all weights
            are 0, so is the result.
        z_loss: times the square of the softmax's log-normalizer is added at each position
            (Chowdhery et al. 2022, section 5). It keeps logits from drifting.
    """
    logits_BSV = logits_BSV.astype(jnp.float32)
    # A masked sum, not a gather: it needs no communication of logits when V is split.
    is_target_BSV = targets_BS[..., None] == jnp.arange(logits_BSV.shape[-1])
    target_BS = jnp.sum(jnp.where(is_target_BSV, logits_BSV, 0.0), axis=-1)
    normalizer_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    loss_BS = normalizer_BS - target_BS
    if z_loss:
        loss_BS += z_loss * jnp.square(normalizer_BS)
    if weights_BS is None:
        return jnp.mean(loss_BS)
    total = jnp.sum(weights_BS)
    return jnp.sum(weights_BS * loss_BS) / jnp.where(total > 0, total, 1.0)
