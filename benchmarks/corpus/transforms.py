"""jax's transformations of a small sharded network."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.corpus.program import Made, normal, trained

BATCH = 8


def network(params: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ params["w1"]) @ params["w2"])


def parameters() -> dict[str, Any]:
    return {"w1": normal(0, 4, 8) * 0.5, "w2": normal(1, 8, 4) * 0.5}


def squared(params: Any, x: Any) -> Any:
    return jnp.mean(network(params, x) ** 2)


def per_example() -> Made:
    """vmap(grad) for each example, clipped one by one; vmap(jacrev); vmap over parameters."""

    def fn(params: Any, x: Any) -> Any:
        grads = jax.vmap(jax.grad(squared), (None, 0))(params, x)
        norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in jax.tree.leaves(grads)))
        scale = jnp.minimum(1.0, 0.01 / norms)
        clipped = jax.tree.map(lambda g: jnp.einsum("b,bij->ij", scale, g), grads)
        stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
        return {
            "grads": grads,
            "clipped": clipped,
            "jacobians": jax.vmap(jax.jacrev(network, 1), (None, 0))(params, x),
            "ensemble": jax.vmap(network, (0, None), out_axes=1)(stacked, x),
        }

    return Made(fn, (parameters(), normal(2, BATCH, 4)), ("params", "batch"))


def remat() -> Made:
    """jax.checkpoint with policies, under scan, and with named residuals: one SGD step."""
    params = {"w": normal(0, 3, 8, 8) * 0.4, "v": normal(1, 8, 8) * 0.4}

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.sin(x @ w) + x, None

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("kept"))
    def last(x: Any, v: Any) -> Any:
        return jnp.tanh(checkpoint_name(jnp.cos(x @ v), "kept"))

    def loss(params: Any, x: Any) -> Any:
        x, _ = lax.scan(layer, x, params["w"])
        return jnp.mean(jax.checkpoint(last)(x, params["v"]) ** 2)

    return trained(loss, params, normal(2, BATCH, 8))


def implicit() -> Made:
    """custom_root and custom_linear_solve with conjugate gradients: implicit derivatives."""

    def loss(w: Any, x: Any) -> Any:
        matrix = w @ w.T + 4 * jnp.eye(4)
        solved, _ = jax.scipy.sparse.linalg.cg(lambda v: v @ matrix, x, maxiter=8)

        def iterate(f: Any, start: Any) -> Any:
            return lax.fori_loop(0, 20, lambda _, z: z - f(z), start)

        def linear(f: Any, y: Any) -> Any:
            return lax.fori_loop(0, 20, lambda _, z: z - (f(z) - y), y)

        root = lax.custom_root(lambda z: z - 0.3 * jnp.tanh(z @ w) - x, x, iterate, linear)
        return jnp.mean(solved**2) + jnp.mean(root**2)

    args = (normal(0, 4, 4) * 0.4, normal(1, BATCH, 4))
    return Made(jax.value_and_grad(loss, (0, 1)), args, ("params", "batch"))
