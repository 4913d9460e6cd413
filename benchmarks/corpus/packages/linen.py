"""flax.linen: its layers, lifted transformations and `TrainState`."""

from typing import Any

import jax
import optax
from flax import linen
from flax.training.train_state import TrainState

from benchmarks.corpus.packages.program import Size, cross_entropy, integers, normal, training
from benchmarks.corpus.program import Made


class Block(linen.Module):
    heads: int

    @linen.compact
    def __call__(self, x: Any, mask: Any, memory: Any = None) -> Any:
        width = x.shape[-1]
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(self.heads)(h, mask=mask)
        if memory is not None:
            x = x + linen.MultiHeadDotProductAttention(self.heads)(linen.LayerNorm()(x), memory)
        h = linen.gelu(linen.Dense(4 * width)(linen.LayerNorm()(x)))
        return x + linen.Dense(width)(h)


class Translator(linen.Module):
    vocab: int
    width: int
    layers: int

    @linen.compact
    def __call__(self, source: Any, target: Any) -> Any:
        embed = linen.Embed(self.vocab, self.width)
        heads = max(self.width // 64, 2)
        x, y = embed(source), embed(target)
        for _ in range(self.layers):
            x = Block(heads)(x, linen.make_attention_mask(source > 0, source > 0))
        for _ in range(self.layers):
            y = Block(heads)(y, linen.make_causal_mask(target), x)
        return embed.attend(linen.LayerNorm()(y))


def translator(size: Size) -> Made:
    """An encoder-decoder transformer; embeddings are shared with the output."""
    vocab, width, layers, batch, length = size((64, 32, 1, 8, 8), (32000, 1024, 2, 64, 256))
    model = Translator(vocab, width, layers)
    source = integers(0, vocab, batch, length)
    target = integers(1, vocab, batch, length)

    def loss(params: Any, source: Any, target: Any) -> Any:
        return cross_entropy(model.apply(params, source, target[:, :-1]), target[:, 1:])

    params = model.init(jax.random.key(0), source, target[:, :-1])
    return training(loss, params, source, target)


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


PROGRAMS = (translator, scanned_decoder, decode_step)
