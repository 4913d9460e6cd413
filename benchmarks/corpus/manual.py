"""Programs that place some communication themselves, with `jax.shard_map` over `model`.

The other axes of the mesh are free: the batch is marked, and the rest is the compiler's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.corpus.program import Made, normal, trained

BATCH, LENGTH, HEADS, WIDTH = 8, 16, 2, 8
HIDDEN = 4 * WIDTH


def over_model(mesh: Any, body: Any, ins: Any, outs: Any) -> Any:
    return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, axis_names={"model"})


def megatron_mlp(mesh: Any) -> Made:
    """A Megatron layer by hand: columns, then rows, one psum; LayerNorm outside; an SGD step."""
    params = {
        "up": normal(0, WIDTH, HIDDEN) * 0.3,
        "down": normal(1, HIDDEN, WIDTH) * 0.3,
        "bias": jnp.zeros(WIDTH),
        "scale": jnp.ones(WIDTH),
    }

    def body(x: Any, up: Any, down: Any) -> Any:
        return lax.psum(jax.nn.gelu(x @ up) @ down, "model")

    layer = over_model(mesh, body, (P(), P(None, "model"), P("model", None)), P())

    def loss(params: Any, x: Any, y: Any) -> Any:
        x = x * params["scale"] / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        for _ in range(2):
            x = x + layer(x, params["up"], params["down"]) + params["bias"]
        return jnp.mean((x - y) ** 2)

    batch = normal(2, BATCH, LENGTH, WIDTH), normal(3, BATCH, LENGTH, WIDTH)
    return trained(loss, params, *batch)


def ring_attention(mesh: Any) -> Made:
    """Ring attention: keys and values go round by ppermute in a scan; value and gradients."""
    size = mesh.shape["model"]
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def body(q: Any, k: Any, v: Any) -> Any:
        def block(carry: Any, _: Any) -> Any:
            total, weight, most, k, v = carry
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5
            new = jnp.maximum(most, scores.max(-1))
            scale, p = jnp.exp(most - new), jnp.exp(scores - new[..., None])
            total = total * scale[..., None] + jnp.einsum("bhqk,bkhd->bhqd", p, v)
            weight = weight * scale + p.sum(-1)
            k, v = (lax.ppermute(t, "model", to_next) for t in (k, v))
            return (total, weight, new, k, v), None

        start = jnp.swapaxes(q * 0, 1, 2)
        lowest = jnp.full_like(start[..., 0], -1e30)
        carry = (start, start[..., 0], lowest, k, v)
        (total, weight, *_), _ = lax.scan(block, carry, None, length=size)
        return jnp.swapaxes(total / weight[..., None], 1, 2)

    spec = P(None, "model")
    attention = over_model(mesh, body, (spec, spec, spec), spec)

    def loss(params: Any, x: Any) -> Any:
        q, k, v = jnp.moveaxis((x @ params["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
        return jnp.mean((attention(q, k, v).reshape(x.shape) @ params["out"] - x) ** 2)

    params = {"qkv": normal(0, WIDTH, 3 * WIDTH) * 0.5, "out": normal(1, WIDTH, WIDTH) * 0.5}
    args = (params, normal(2, BATCH, LENGTH, WIDTH))
    return Made(jax.value_and_grad(loss), args, ("params", "batch"))
