"""equinox: modules for one example, mapped over the batch; state; filtered transformations."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.corpus.packages.program import Size, cross_entropy, integers, normal, training
from benchmarks.corpus.program import Made


def of_model(model: Any, loss: Callable[..., Any], *batch: Any) -> Made:
    """A step of a model's inexact arrays; its other arrays are an argument that stays."""
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    arrays, static = eqx.partition(rest, eqx.is_array)

    def of_params(params: Any, arrays: Any, *batch: Any) -> Any:
        return loss(eqx.combine(params, arrays, static), *batch)

    made = training(of_params, params, arrays, *batch)
    return made._replace(specs=("params", "open", "open", *["batch"] * len(batch)))


class Convolutions(eqx.Module):
    layers: eqx.nn.Sequential

    def __init__(self, width: int, key: Any) -> None:
        keys = jax.random.split(key, 4)
        self.layers = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, width, 3, padding=1, use_bias=False, key=keys[0]),
                eqx.nn.BatchNorm(width, "batch", mode="batch"),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Conv2d(width, 2 * width, 3, padding=1, key=keys[1]),
                eqx.nn.GroupNorm(4, 2 * width),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.ConvTranspose2d(2 * width, width, 2, stride=2, key=keys[2]),
                eqx.nn.AdaptiveAvgPool2d(2),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(4 * width, 16, key=keys[3]),
            ]
        )

    def __call__(self, x: Any, state: Any) -> Any:
        return self.layers(x, state)


def stateful(size: Size) -> Made:
    """Convolutions with eqx.nn.BatchNorm, whose statistics are an eqx.nn.State."""
    width, pixels, batch = size((8, 8, 8), (128, 64, 128))
    model, state = eqx.nn.make_with_state(Convolutions)(width, jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adamw(1e-3, eps=1e-3)

    def step(params: Any, state: Any, slots: Any, images: Any, labels: Any) -> Any:
        @eqx.filter_value_and_grad(has_aux=True)
        def loss(params: Any) -> Any:
            forward = jax.vmap(
                eqx.combine(params, static),
                axis_name="batch",
                in_axes=(0, None),
                out_axes=(0, None),
            )
            logits, new = forward(images, state)
            return cross_entropy(logits, labels), new

        (value, new), grads = loss(params)
        updates, slots = optimizer.update(grads, slots, params)
        return eqx.apply_updates(params, updates), new, slots, value

    images, labels = normal(0, batch, 3, pixels, pixels), integers(1, 16, batch)
    args = (params, state, optimizer.init(params), images, labels)
    return Made(step, args, ("params", "open", "open", "batch", "batch"))


PROGRAMS = (stateful,)
