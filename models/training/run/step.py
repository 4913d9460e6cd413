"""The training step: gradients summed over microbatches, a guard against NaN, and the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from models.training.run.optimizer import updates_taken

LossFn = Callable[[Any, Any], jax.Array]
"""(params, batch) -> mean loss; over `batch["weights"]` where the batch has them."""

StepMetrics = dict[str, jax.Array]
TrainStep = Callable[[Any, Any, Any], tuple[Any, Any, StepMetrics]]
"""(params, opt_state, batch) -> (params, opt_state, metrics)."""

OnNonfinite = Literal["stop", "skip"]
ON_NONFINITE: tuple[OnNonfinite, ...] = ("stop", "skip")


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    on_nonfinite: OnNonfinite = "stop",
    schedule: optax.Schedule | None = None,
) -> TrainStep:
    """The single-device step that minimizes `loss_fn(params, batch)`.

    Args:
        loss_fn: mean loss of a batch.
        optimizer: makes updates of gradients.
        microbatches: parts that a batch is worked through in, one after the other; their gradients
            are summed in float32. Has to divide the batch.
        on_nonfinite: `"skip"` keeps parameters and optimizer state as they were if loss or
            gradients are not finite; `"stop"` leaves it to the loop to end the run.
        schedule: step -> learning rate, if that is to be among the metrics.

    Returns:
        The step. Its metrics are `loss`, `grad_norm` (before clipping) and `learning_rate`, all of
        before the update, and `skipped` (0 or 1) if steps may be skipped.

    Raises:
        ValueError: (when traced) the microbatches do not divide the batch.
    """

    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, StepMetrics]:
        loss, grads = loss_and_grads(loss_fn, params, batch, microbatches)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(updates_taken(opt_state)), jnp.float32)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        if on_nonfinite == "stop":
            return new_params, new_state, metrics
        is_good = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
        metrics["skipped"] = 1.0 - is_good.astype(jnp.float32)
        kept = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            (new_params, new_state),
            (params, opt_state),
        )
        return *kept, metrics

    return train_step


def loss_and_grads(
    loss_fn: LossFn, params: Any, batch: Any, microbatches: int = 1
) -> tuple[jax.Array, Any]:
    """Mean loss and its gradients, as of the whole batch, one microbatch after the other.

    Sums run over the microbatches and are divided once: a microbatch counts by its weights. The
    gradients are linear in every microbatch, so that a partitioner may leave them unreduced until
    the end: one reduction a step, however many microbatches there are.
    """
    if microbatches == 1:
        return jax.value_and_grad(loss_fn)(params, batch)

    def add(sums: Any, micro: Any) -> tuple[Any, None]:
        weight, micro = batch_weight(micro), _not_weightless(micro)
        terms = (weight, *jax.value_and_grad(lambda p: weight * loss_fn(p, micro))(params))
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, terms), None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), zeros)
    (weight, loss, grads), _ = jax.lax.scan(add, start, split_batch(batch, microbatches))
    grads = jax.tree.map(lambda total, leaf: (total / weight).astype(leaf.dtype), grads, params)
    return loss / weight, grads


def split_batch(batch: Any, microbatches: int) -> Any:
    """Every leaf (B, ...) -> (M, B / M, ...), where microbatch `m` has the rows `m`, `m + M`, ...

    Rows next to each other go to different microbatches: a device that holds a block of rows has
    as many of each microbatch, and nothing moves.

    Raises:
        ValueError: M does not divide B.
    """
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if any(count % microbatches for count in rows):
        raise ValueError(f"{microbatches} microbatches do not divide a batch of {max(rows)} rows")
    return jax.tree.map(
        lambda leaf: jnp.moveaxis(
            leaf.reshape(leaf.shape[0] // microbatches, microbatches, *leaf.shape[1:]), 1, 0
        ),
        batch,
    )


def _not_weightless(batch: Any) -> Any:
    """A microbatch that weighs nothing, with weights of 1: its mean exists, and counts 0 times."""
    if not isinstance(batch, Mapping) or "weights" not in batch:
        return batch
    weights = batch["weights"]
    return {**batch, "weights": jnp.where(jnp.sum(weights) > 0, weights, jnp.ones_like(weights))}


def batch_weight(batch: Any) -> jax.Array:
    """What the mean over a batch was divided by: its summed weights, or 1 where it has none."""
    if isinstance(batch, Mapping) and "weights" in batch:
        return jnp.sum(batch["weights"].astype(jnp.float32))
    return jnp.ones((), jnp.float32)
