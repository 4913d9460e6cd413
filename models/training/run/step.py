"""The training step: gradients summed over microbatches, a guard against NaN, and the update."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from spmd.models.training.run.balance import OFF, Balance, largest_load
from spmd.models.training.run.frozen import Frozen
from spmd.models.training.run.optimizer import updated, updates_taken, weights_of
from spmd.models.training.run.stateful import joined, loss_and_state, parted
from spmd.ops import fp8

LossFn = Callable[[Any, Any], Any]
"""(params, batch) -> mean loss, weighted by `batch["weights"]` if the batch has them, or (mean
loss, {"name": another mean}); of a `Stateful` (mean loss, the next state), perhaps with metrics."""

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
    frozen: Frozen | None = None,
    balance: Balance = OFF,
) -> TrainStep:
    """Makes the single-device step that minimizes `loss_fn(params, batch)`.

    Args:
        loss_fn: mean loss of a batch.
        microbatches: number of parts that a batch is processed in, one after the other, to need
            less memory. Their gradients are summed in float32. It has to divide the batch.
        on_nonfinite: with `"skip"`, parameters and optimizer state stay as they were if loss,
            gradients or the update are not finite. With `"stop"`, the loop ends the run.
        schedule: step -> learning rate, to have that among the metrics.
        frozen: says what is not trained; the optimizer state is of the rest.
        balance: moves biases of experts, which are not the optimizer's either.

    Returns:
        The step. Its metrics are `loss`, `grad_norm` (before clipping) and `learning_rate`, all
        from before the update, `update_norm` (of what it changes in the parameters: finite only if
        they are before and after it), `skipped` (0 or 1) if steps may be skipped, those of the
        loss and of `balance`.

    Raises:
        ValueError: (when traced) the microbatches do not divide the batch.
    """
    held = frozen or Frozen((), None)

    def train_step(variables: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, StepMetrics]:
        params, rest = held.split(variables)

        def loss_of(params: Any, batch: Any) -> Any:
            return loss_fn(held.merge(params, rest), batch)

        loss, metrics, grads = loss_and_grads(loss_of, params, batch, microbatches, balance)
        (grads, loads), (weights, biases) = balance.split(grads), balance.split(params)
        metrics |= {"loss": loss, "grad_norm": optax.tree.norm(_wide(grads))}
        metrics |= largest_load(loads)
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(updates_taken(opt_state)), jnp.float32)
        new_params, new_state = updated(optimizer, loss, grads, opt_state, weights)
        metrics["update_norm"] = optax.tree.norm(optax.tree.sub(_wide(new_params), _wide(weights)))
        new_params = balance.merge(new_params, jax.tree.map(balance.moved, biases, loads))
        if on_nonfinite == "stop":
            return held.merge(new_params, rest), new_state, metrics
        is_good = jnp.isfinite(loss)
        for name in ("grad_norm", "update_norm"):
            is_good &= jnp.isfinite(metrics[name])
        metrics["skipped"] = 1.0 - is_good.astype(jnp.float32)
        new_params, new_state = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            (new_params, new_state),
            (params, opt_state),
        )
        return held.merge(new_params, rest), new_state, metrics

    return train_step


def _wide(variables: Any) -> Any:
    """What is trained, in float32: squares of 256 are infinite in float16."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), weights_of(variables)
    )


def loss_and_grads(
    loss_fn: LossFn, params: Any, batch: Any, microbatches: int = 1, balance: Balance = OFF
) -> tuple[jax.Array, StepMetrics, Any]:
    """The mean loss of a batch, its metrics and gradients, computed microbatch by microbatch.

    All are summed over the microbatches, each times its weight, and divided once at the end: the
    result is that of the whole batch. As the sum is linear, a partitioner can leave the gradients
    unreduced until the loop's end, and reduce them once. Of states of 8-bit products, whose
    gradients are the next states, the maximum is taken; loads of experts are not divided. The state
    of a `Stateful` goes from one microbatch to the next.

    Returns:
        (loss, metrics, gradients), these in the parameters' dtypes; where `params` have a state,
        gradients have the next one.
    """
    if microbatches == 1:
        return _loss_and_grads(loss_fn, params, batch)
    trained, first = parted(params)

    def add(sums: Any, micro: Any) -> tuple[Any, Any]:
        sums, states, state = sums
        weight, micro = batch_weight(micro), _not_weightless(micro)
        variables = joined(trained, state, params)
        loss, metrics, grads = _loss_and_grads(loss_fn, variables, micro, weight)
        grads, state = parted(grads)
        grads, found = fp8.split(grads)
        sums = jax.tree.map(
            lambda total, x: total + x.astype(total.dtype), sums, (weight, loss, grads)
        )
        return (sums, jax.tree.map(jnp.maximum, states, found), state), metrics

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
    zero, (zeros, states) = jnp.zeros((), jnp.float32), fp8.split(zeros)
    start = (zero, zero, zeros), states, first
    sums, metrics = jax.lax.scan(add, start, split_batch(batch, microbatches))
    (weight, loss, grads), states, state = sums
    (grads, loads), (like, _) = map(balance.split, (grads, fp8.split(trained)[0]))
    grads = jax.tree.map(lambda total, leaf: (total / weight).astype(leaf.dtype), grads, like)
    grads = balance.merge(grads, loads)
    metrics = jax.tree.map(lambda each: jnp.sum(each) / weight, metrics)
    return loss / weight, metrics, joined(fp8.merge(grads, states), state, params)


def _loss_and_grads(
    loss_fn: LossFn, params: Any, batch: Any, weight: jax.Array | None = None
) -> tuple[jax.Array, StepMetrics, Any]:
    """All of one batch, times a weight; where `params` have a state, gradients have the next."""
    trained, given = parted(params)

    def weighted(trained: Any) -> tuple[Any, Any]:
        # Its nodes are made anew here: flax lets variables be changed only in the trace of theirs.
        variables = joined(trained, jax.tree.map(lambda leaf: leaf, given), params)
        loss, state, metrics = loss_and_state(loss_fn(variables, batch), variables)
        if weight is not None:
            loss, metrics = jax.tree.map(lambda x: weight * x, (loss, metrics))
        return loss, (state, metrics)

    (loss, (state, metrics)), grads = jax.value_and_grad(weighted, has_aux=True)(trained)
    return loss, metrics, joined(grads, state, params)


def split_batch(batch: Any, microbatches: int) -> Any:
    """Cuts every leaf (B, ...) into microbatches (M, B / M, ...).

    Microbatch `m` has the rows m, m + M, m + 2M, ... So a device that holds a block of rows has
    equally many of each microbatch, and no row moves between devices: 8 rows on 2 devices, M = 2:

        device 0 holds 0 1 2 3    of these 0 2 in the first microbatch, 1 3 in the second
        device 1 holds 4 5 6 7    of these 4 6 in the first microbatch, 5 7 in the second

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
    """Replaces weights that are all 0 by 1, so that the mean is not 0 / 0; it counts 0 times."""
    if not isinstance(batch, Mapping) or "weights" not in batch:
        return batch
    weights = batch["weights"]
    return {**batch, "weights": jnp.where(jnp.sum(weights) > 0, weights, jnp.ones_like(weights))}


def batch_weight(batch: Any) -> jax.Array:
    """The sum of a batch's weights, by which its mean loss is divided; 1 if it has none."""
    if isinstance(batch, Mapping) and "weights" in batch:
        return jnp.sum(batch["weights"].astype(jnp.float32))
    return jnp.ones((), jnp.float32)
