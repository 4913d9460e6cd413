"""Transformers and convolutional networks of flax's own layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.corpus.program import Made
from tests.corpus.training import (
    cross_entropy,
    integers,
    momentum_state,
    momentum_step,
    normal,
)

VOCAB, LENGTH, WIDTH, HEADS, BATCH = 64, 8, 32, 4, 8


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, mask: Any, train: bool) -> Any:
        h = linen.LayerNorm()(x)
        h = linen.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=not train)(
            h, mask=mask
        )
        x = x + linen.Dropout(0.1, deterministic=not train)(h)
        h = linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dropout(0.1, deterministic=not train)(linen.Dense(WIDTH)(h))


class LinenTransformer(linen.Module):
    @linen.compact
    def __call__(self, tokens: Any, train: bool) -> Any:
        embed = linen.Embed(VOCAB, WIDTH)
        x = embed(tokens) + self.param("positions", linen.initializers.normal(), (LENGTH, WIDTH))
        mask = linen.make_causal_mask(tokens)
        for _ in range(2):
            x = LinenBlock()(x, mask, train)
        return embed.attend(linen.LayerNorm()(x))


def linen_transformer() -> Made:
    """A flax.linen causal transformer with dropout: one SGD step."""
    model = LinenTransformer()
    tokens = integers(0, VOCAB, BATCH, LENGTH + 1)

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        logits = model.apply(params, tokens[:, :-1], True, rngs={"dropout": key})
        return cross_entropy(logits, tokens[:, 1:])

    init = jax.jit(lambda key, tokens: model.init(key, tokens, False))
    params = init(jax.random.key(0), tokens[:, :-1])
    args = (params, momentum_state(params), tokens, jax.random.key(1))
    return Made(momentum_step(loss), args, ("params", "open", "batch", "open"))


def linen_scanned() -> Made:
    """flax.linen blocks under nn.scan and nn.remat: one SGD step."""

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            return LinenBlock()(x, mask, False), None

    layers = linen.scan(
        linen.remat(Layer, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=linen.broadcast,
        length=3,
    )()
    x = normal(0, BATCH, LENGTH, WIDTH)
    mask = linen.make_causal_mask(jnp.ones((BATCH, LENGTH)))

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(layers.apply(params, x, mask)[0] ** 2)

    params = jax.jit(lambda key: layers.init(key, x, mask))(jax.random.key(0))
    args = (params, momentum_state(params), x)
    return Made(momentum_step(loss), args, ("params", "open", "batch"))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=False, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        x = x + self.dropout(self.attention(self.norms[0](x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def nnx_step(model: Any, loss: Any, batch: tuple[Any, ...]) -> Made:
    """An SGD step of an nnx model; its counters and statistics travel beside its parameters."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]

    def step(params: Any, state: Any, rest: Any, *batch: Any) -> Any:
        merged = nnx.merge(graph, params, rest)
        value, grads = nnx.value_and_grad(lambda model: loss(model, *batch))(merged)
        new = nnx.state(merged, nnx.Not(nnx.Param))
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, state, grads)
        return jax.tree.map(lambda p, t: p - 0.1 * t, params, trace), trace, new, value

    args = (params, jax.tree.map(jnp.zeros_like, params), rest, *batch)
    return Made(step, args, ("params", "open", "open", *["batch"] * len(batch)))


def nnx_transformer() -> Made:
    """A flax.nnx causal transformer with dropout: one SGD step, its rng counters advance."""
    tokens = integers(0, VOCAB, BATCH, LENGTH + 1)

    def loss(model: Any, tokens: Any) -> Any:
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    return nnx_step(NnxTransformer(nnx.Rngs(0, dropout=1)), loss, (tokens,))


class ResidualBlock(nnx.Module):
    def __init__(self, width: int, out: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(width, out, (3, 3), stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(out, rngs=rngs)
        self.conv2 = nnx.Conv(out, out, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(out, rngs=rngs)
        self.project = nnx.Conv(width, out, (1, 1), stride, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.project(x) + self.norm2(self.conv2(h)))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.blocks = nnx.List([ResidualBlock(8, 8, 1, rngs), ResidualBlock(8, 16, 2, rngs)])
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.norm(self.stem(x))), (2, 2), (2, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def resnet() -> Made:
    """A flax.nnx ResNet in training mode: max pooling, strided convolutions, batch statistics."""

    def loss(model: Any, images: Any, labels: Any) -> Any:
        return cross_entropy(model(images), labels)

    batch = (normal(0, BATCH, 16, 16, 3), integers(1, 8, BATCH))
    return nnx_step(ResNet(nnx.Rngs(0)), loss, batch)


def linen_lstm() -> Made:
    """A flax.linen OptimizedLSTMCell under nn.RNN: one SGD step."""
    model = linen.Sequential([linen.RNN(linen.OptimizedLSTMCell(WIDTH)), linen.Dense(VOCAB)])
    x, labels = normal(0, BATCH, LENGTH, 16), integers(1, VOCAB, BATCH, LENGTH)

    def loss(params: Any, x: Any, labels: Any) -> Any:
        return cross_entropy(model.apply(params, x), labels)

    params = jax.jit(lambda key: model.init(key, x))(jax.random.key(0))
    args = (params, momentum_state(params), x, labels)
    return Made(momentum_step(loss), args, ("params", "open", "batch", "batch"))


def linen_batch_norm() -> Made:
    """flax.linen BatchNorm, GroupNorm, WeightNorm and a grouped convolution, with statistics."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.Conv(16, (3, 3))(x)
            x = linen.relu(linen.BatchNorm(use_running_average=False)(x))
            x = linen.Conv(16, (3, 3), feature_group_count=4, strides=2)(x)
            x = linen.avg_pool(linen.GroupNorm(4)(x), (2, 2), (2, 2))
            return linen.WeightNorm(linen.Dense(8))(x.reshape(x.shape[0], -1))

    net = Net()
    images, labels = normal(0, BATCH, 8, 8, 4), integers(1, 8, BATCH)
    variables = jax.jit(lambda key: net.init(key, images))(jax.random.key(0))

    def step(params: Any, stats: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, new = net.apply(
                {"params": params, "batch_stats": stats}, images, mutable=["batch_stats"]
            )
            return cross_entropy(logits, labels), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new, value

    args = (variables["params"], variables["batch_stats"], images, labels)
    return Made(step, args, ("params", "open", "batch", "batch"))
