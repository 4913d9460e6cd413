"""flax.linen: its layers, lifted transformations and `TrainState`."""

from typing import Any

import jax
import optax
from flax import linen
from flax.training.train_state import TrainState

from benchmarks.corpus.packages.program import Size, cross_entropy, integers, normal
from benchmarks.corpus.program import Made


class Block(linen.Module):
    heads: int

    @linen.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        width = x.shape[-1]
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(self.heads)(h, mask=mask)
        h = linen.gelu(linen.Dense(4 * width)(linen.LayerNorm()(x)))
        return x + linen.Dense(width)(h)


def scanned_decoder(size: Size) -> Made:
    """Blocks under linen.scan and linen.remat, dropout in a `TrainState`."""
    vocab, width, layers, batch, length = size((64, 32, 2, 8, 8), (32000, 2048, 4, 32, 512))

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            x = Block(max(width // 64, 2))(x, mask)
            return linen.Dropout(0.1, deterministic=False)(x), None

    class Decoder(linen.Module):
        @linen.compact
        def __call__(self, tokens: Any) -> Any:
            x = linen.Embed(vocab, width)(tokens)
            stack = linen.scan(
                linen.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=linen.broadcast,
                length=layers,
            )
            x, _ = stack()(x, linen.make_causal_mask(tokens))
            return linen.Dense(vocab)(linen.RMSNorm()(x))

    model = Decoder()
    tokens = integers(0, vocab, batch, length + 1)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(keys, tokens[:, :-1])
    state = TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adamw(1e-3, eps=1e-3)
    )

    def step(state: Any, tokens: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            key_now = jax.random.fold_in(key, state.step)
            logits = state.apply_fn({"params": params}, tokens[:, :-1], rngs={"dropout": key_now})
            return cross_entropy(logits, tokens[:, 1:])

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return Made(step, (state, tokens, jax.random.key(2)), ("params", "batch", "open"))


def decode_step(size: Size) -> Made:
    """Attention with linen's own cache: one token is decoded for each sequence."""
    width, heads, batch, length = size((32, 4, 8, 8), (4096, 32, 64, 2048))
    model = linen.MultiHeadDotProductAttention(heads, decode=True)
    x = normal(0, batch, length, width)
    variables = model.init(jax.random.key(0), x)

    def step(params: Any, cache: Any, x: Any) -> Any:
        y, new = model.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return y, new["cache"]

    args = (variables["params"], variables["cache"], normal(1, batch, 1, width))
    return Made(step, args, ("params", "batch", "batch"))


PROGRAMS = (scanned_decoder, decode_step)
