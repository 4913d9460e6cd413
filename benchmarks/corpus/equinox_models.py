"""A model of equinox's layers, written for one example and mapped over the batch."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.corpus.program import Made, cross_entropy, integers

BATCH = 8


class Attention(eqx.Module):
    embed: eqx.nn.Embedding
    rope: eqx.nn.RotaryPositionalEmbedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(64, 32, key=keys[0])
        self.rope = eqx.nn.RotaryPositionalEmbedding(8)
        self.attention = eqx.nn.MultiheadAttention(4, 32, dropout_p=0.1, key=keys[1])
        self.norm = eqx.nn.LayerNorm(32)
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.Linear(32, 64, key=keys[2])

    def __call__(self, tokens: Any, key: Any) -> Any:
        def rotate(q: Any, k: Any, v: Any) -> Any:
            turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return turn(q), turn(k), v

        keys = jax.random.split(key)
        x = jax.vmap(self.embed)(tokens)
        h = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        h = self.attention(h, h, h, mask, key=keys[0], process_heads=rotate)
        return jax.vmap(self.head)(x + self.dropout(h, key=keys[1]))


def attention() -> Made:
    """eqx.nn.MultiheadAttention with rotary embedding and dropout, a key for each example."""
    params, static = eqx.partition(Attention(jax.random.key(0)), eqx.is_inexact_array)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))

    def step(params: Any, state: Any, tokens: Any, keys: Any) -> Any:
        @eqx.filter_value_and_grad
        def loss(params: Any) -> Any:
            model = eqx.combine(params, static)
            return cross_entropy(jax.vmap(model)(tokens[:, :-1], keys), tokens[:, 1:])

        value, grads = loss(params)
        updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value, grads

    batch = integers(0, 64, BATCH, 9), jax.random.split(jax.random.key(2), BATCH)
    args = (params, optimizer.init(params), *batch)
    return Made(step, args, ("params", "open", "batch", "open"))
