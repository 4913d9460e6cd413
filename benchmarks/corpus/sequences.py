"""Sequence models in plain jax: recurrent, mixtures of experts, state space."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.corpus.program import Made, normal, trained

BATCH, LENGTH, WIDTH = 8, 16, 16


def regression() -> tuple[Any, Any]:
    return normal(10, BATCH, LENGTH, WIDTH), normal(11, BATCH, LENGTH, WIDTH)


def lstm() -> Made:
    """Two LSTM layers by scan over time, one of them reversed: one SGD step."""
    layer = {"w": 0.2 * normal(0, WIDTH, 4 * WIDTH), "u": 0.2 * normal(1, WIDTH, 4 * WIDTH)}
    layer["b"] = jnp.zeros(4 * WIDTH)
    params = {"first": layer, "second": jax.tree.map(lambda a: a * 0.5, layer)}

    def run(p: Any, xs: Any, reverse: bool) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros(xs.shape[1:])
        return lax.scan(step, (zeros, zeros), xs, reverse=reverse)[1]

    def loss(params: Any, x: Any, y: Any) -> Any:
        h = run(params["first"], x.swapaxes(0, 1), False)
        return jnp.mean((run(params["second"], h, True).swapaxes(0, 1) - y) ** 2)

    return trained(loss, params, *regression())


def experts() -> Made:
    """A mixture of experts: top-2 routing, one-hot dispatch with a capacity, balance loss."""
    count, capacity = 4, 8
    params = {
        "gate": normal(0, WIDTH, count) * 0.3,
        "up": normal(1, count, WIDTH, 32) * 0.2,
        "down": normal(2, count, 32, WIDTH) * 0.2,
    }

    def loss(params: Any, x: Any, y: Any) -> Any:
        gates = jax.nn.softmax(x @ params["gate"])
        weights, chosen = lax.top_k(gates, 2)
        onehot = jax.nn.one_hot(chosen, count)
        order = onehot.swapaxes(1, 2).reshape(BATCH, -1, count).cumsum(1)
        place = (order.reshape(BATCH, 2, LENGTH, count).swapaxes(1, 2) - 1) * onehot
        slot = (
            jax.nn.one_hot(place.sum(-1).astype(int), capacity)
            * (place.sum(-1) < capacity)[..., None]
        )
        dispatch = jnp.einsum("bske,bskc->bsec", onehot, slot)
        combine = jnp.einsum("bsk,bske,bskc->bsec", weights, onehot, slot)
        h = jnp.einsum("bsec,bsd->becd", dispatch, x)
        h = jax.nn.gelu(jnp.einsum("becd,edf->becf", h, params["up"]))
        h = jnp.einsum("becf,efd->becd", h, params["down"])
        out = jnp.einsum("bsec,becd->bsd", combine, h)
        balance = jnp.sum(gates.mean((0, 1)) * onehot.mean((0, 1, 2))) * count
        return jnp.mean((out - y) ** 2) + 0.01 * balance

    return trained(loss, params, *regression())


def state_space() -> Made:
    """A diagonal state space model: associative_scan over time, gated, depthwise convolution."""
    params = {
        "decay": normal(0, WIDTH),
        "b": normal(1, WIDTH, WIDTH) * 0.2,
        "c": normal(2, WIDTH, WIDTH) * 0.2,
        "kernel": normal(3, 4, 1, WIDTH),
    }

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def loss(params: Any, x: Any, y: Any) -> Any:
        x = lax.conv_general_dilated(
            x, params["kernel"], (1,), [(3, 0)],
            dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=WIDTH,
        )  # fmt: skip
        gate = jax.nn.sigmoid(params["decay"] + x @ params["b"])
        _, h = lax.associative_scan(combine, (gate, (1 - gate) * x), axis=1)
        return jnp.mean((h @ params["c"] - y) ** 2)

    return trained(loss, params, *regression())
