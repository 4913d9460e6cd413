"""What training makes small: the cross-entropy of the next token, and the experts' balance.

For tuning also the loss of preferences (DPO), and the divergence from a teacher. Shapes are in the
names, as in `model.py`.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

import spmd
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.experts import balance
from spmd.models.llama.marks import Mark, no_marks
from spmd.models.llama.model import logits_and_loads
from spmd.models.llama.parameters import TEACHER, Params

Batch = Mapping[str, jax.Array]
"""The leaves of a batch, by name: `inputs` and `targets`, token ids (B, S), and for packed
documents also `segment_ids`, `positions` and `weights` (B, S)."""


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
    given = {"inputs": inputs_BS, "targets": targets_BS, "segment_ids": segment_ids_BS}
    given |= {"positions": positions_BS, "weights": weights_BS}
    batch = {name: x_BS for name, x_BS in given.items() if x_BS is not None}
    return batch_loss(params, batch, config, mark, z_loss)


def batch_loss(
    params: Params, batch: Batch, config: LlamaConfig, mark: Mark = no_marks, z_loss: float = 0.0
) -> jax.Array:
    """`loss` of a batch."""
    logits_BSV, batch, added = _predicted(params, batch, config, mark)
    targets_BS, weights_BS = batch["targets"], batch.get("weights")
    return cross_entropy(logits_BSV, targets_BS, weights_BS, z_loss=z_loss) + added


def _predicted(
    params: Params, batch: Batch, config: LlamaConfig, mark: Mark
) -> tuple[jax.Array, Batch, jax.Array | float]:
    """(logits (B, S, V), the batch in the order of their positions, the loss of experts)."""
    if config.zigzag > 1:  # a mean over positions does not depend on their order
        order = functools.partial(spmd.ops.zigzag, parts=config.zigzag, dim=-1)
        batch = {"positions": jnp.arange(batch["inputs"].shape[1]), **batch}
        batch = {n: x if n.startswith("reference_") else order(x) for n, x in batch.items()}
    rows = batch.get("segment_ids"), batch.get("positions")
    logits_BSV, loads = logits_and_loads(params, batch["inputs"], config, mark, *rows)
    if loads is None or not config.router_aux_loss_coef:
        return logits_BSV, batch, 0.0
    return logits_BSV, batch, config.router_aux_loss_coef * balance(loads)


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
    return weighted_mean(token_losses(logits_BSV, targets_BS, z_loss), weights_BS)


def token_losses(logits_BSV: jax.Array, targets_BS: jax.Array, z_loss: float = 0.0) -> jax.Array:
    """`-log softmax(logits)[target]` (B, S), in float32; `z_loss` as for `cross_entropy`."""
    logits_BSV = logits_BSV.astype(jnp.float32)
    # A masked sum, not a gather: it needs no communication of logits when V is split.
    is_target_BSV = targets_BS[..., None] == jnp.arange(logits_BSV.shape[-1])
    target_BS = jnp.sum(jnp.where(is_target_BSV, logits_BSV, 0.0), axis=-1)
    normalizer_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    loss_BS = normalizer_BS - target_BS
    return loss_BS + z_loss * jnp.square(normalizer_BS) if z_loss else loss_BS


def weighted_mean(x_BS: jax.Array, weights_BS: jax.Array | None) -> jax.Array:
    """The mean over all positions; 0 where all weights are."""
    if weights_BS is None:
        return jnp.mean(x_BS)
    total = jnp.sum(weights_BS)
    return jnp.sum(weights_BS * x_BS) / jnp.where(total > 0, total, 1.0)


# Tuning.


def pair_logps(
    params: Params, batch: Batch, config: LlamaConfig, mark: Mark = no_marks
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Log-probabilities of what was chosen and of what was rejected (B,), and experts' loss.

    A row of the batch is a pair, each in a segment of its own; `answers` (B, S) is 1 at targets
    that belong to an answer, else 0.
    """
    logits_BSV, batch, added = _predicted(params, batch, config, mark)
    logps_BS = -token_losses(logits_BSV, batch["targets"]) * batch["answers"]
    first, second = (
        jnp.sum(jnp.where(batch["segment_ids"] == segment, logps_BS, 0.0), axis=-1)
        for segment in (1, 2)
    )
    return first, second, added


def preference_loss(
    params: Params, batch: Batch, config: LlamaConfig, mark: Mark = no_marks, beta: float = 0.1
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of direct preference optimization (Rafailov et al. 2023, equation 7), and metrics.

    Args:
        batch: as for `pair_logps`, with `reference_chosen` and `reference_rejected` (B,), the
            log-probabilities under the reference.
        beta: how much it costs to leave the reference.

    Returns:
        (loss, means over pairs, by TRL's names).
    """
    chosen, rejected, added = pair_logps(params, batch, config, mark)
    rewards = {
        "chosen": beta * (chosen - batch["reference_chosen"]),
        "rejected": beta * (rejected - batch["reference_rejected"]),
    }
    rewards["margins"] = rewards["chosen"] - rewards["rejected"]
    rewards["accuracies"] = (rewards["margins"] > 0).astype(jnp.float32)
    metrics = {f"rewards/{name}": jnp.mean(x) for name, x in rewards.items()}
    metrics |= {"logps/chosen": jnp.mean(chosen), "logps/rejected": jnp.mean(rejected)}
    return -jnp.mean(jax.nn.log_sigmoid(rewards["margins"])) + added, metrics


def distillation_loss(
    params: Params,
    batch: Batch,
    config: LlamaConfig,
    teacher_config: LlamaConfig,
    marks: tuple[Mark, Mark] = (no_marks, no_marks),
    *,
    temperature: float = 1.0,
    share: float = 0.5,
    z_loss: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`(1 - share) * cross-entropy + share * temperature**2 * KL(teacher || student)`, and both.

    In the divergence both models' logits are divided by the temperature; its square keeps the two
    gradients of a size (Hinton et al. 2015, section 2).

    Args:
        params: with those of the teacher, which are not trained, as `TEACHER`.
        teacher_config: as many tokens, and the same `zigzag`.
        marks: of the two models.
    """
    logits_BSV, given, added = _predicted(params, batch, config, marks[0])
    theirs_BSV, _, _ = _predicted(
        jax.lax.stop_gradient(params[TEACHER]), batch, teacher_config, marks[1]
    )
    ours_BSV, theirs_BSV = (
        jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (logits_BSV, theirs_BSV)
    )
    divergence_BS = jnp.sum(jnp.exp(theirs_BSV) * (theirs_BSV - ours_BSV), axis=-1)
    weights_BS = given.get("weights")
    apart = weighted_mean(divergence_BS, weights_BS)
    entropy = cross_entropy(logits_BSV, given["targets"], weights_BS, z_loss=z_loss)
    loss = (1 - share) * entropy + share * temperature**2 * apart
    return loss + added, {"cross_entropy": entropy, "kl": apart}
