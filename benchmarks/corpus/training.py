"""Pieces that the corpus's models share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def normal(seed: int, *shape: int) -> Any:
    """Deterministic normal numbers."""
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape), np.float32)


def integers(seed: int, high: int, *shape: int) -> Any:
    """Deterministic integers below `high`."""
    return jnp.asarray(np.random.RandomState(seed).randint(0, high, shape), jnp.int32)


def momentum_step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """(params, trace, *rest) -> (params, trace, loss, gradients), with SGD and momentum."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, *rest: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *rest)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    return step


def momentum_state(params: Any) -> Any:
    """The state that `momentum_step` starts with."""
    return optax.sgd(0.1, momentum=0.9).init(params)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over everything."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
