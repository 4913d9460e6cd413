"""flax.nnx: modules split into graph and state, `nnx.Optimizer`, LoRA, scanned layers."""

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.corpus.packages.program import Size, cross_entropy, integers, normal
from benchmarks.corpus.program import Made


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.gate = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        x = x + self.attention(self.norms[0](x), mask=mask)
        h = self.norms[1](x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


class Decoder(nnx.Module):
    def __init__(self, vocab: int, width: int, layers: int, rngs: nnx.Rngs) -> None:
        heads = max(width // 128, 2)
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def with_optimizer(model: Any, loss: Any, *batch: Any, wrt: Any = nnx.Param) -> Made:
    """A step of `nnx.Optimizer`; model and optimizer travel as graph and state."""
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, eps=1e-3), wrt=wrt)
    graph, params, rest = nnx.split((model, optimizer), nnx.Param, ...)  # type: ignore[misc]

    def step(params: Any, rest: Any, *batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, params, rest)
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, *batch)
        optimizer.update(model, grads)
        return (*nnx.split((model, optimizer), nnx.Param, ...)[1:], value)  # type: ignore[misc]

    return Made(step, (params, rest, *batch), ("params", "open", *["batch"] * len(batch)))


def decoder(size: Size) -> Made:
    """A decoder of nnx's layers."""
    vocab, width, layers, batch, length = size((64, 32, 1, 8, 8), (32000, 2048, 2, 32, 512))

    def loss(model: Any, tokens: Any) -> Any:
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    model = Decoder(vocab, width, layers, nnx.Rngs(0))
    return with_optimizer(model, loss, integers(0, vocab, batch, length + 1))


def lora(size: Size) -> Made:
    """nnx.LoRA beside frozen layers: only the low-rank factors are trained."""
    width, rank, batch = size((32, 4, 8), (4096, 16, 1024))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.base = nnx.Linear(width, width, rngs=rngs)
            self.lora = nnx.LoRA(width, rank, width, base_module=self.base, rngs=rngs)
            self.head = nnx.LoRALinear(width, width, lora_rank=rank, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.head(nnx.gelu(self.lora(x)))

    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((model(x) - y) ** 2)

    batch_of = (normal(0, batch, width), normal(1, batch, width))
    return with_optimizer(Net(nnx.Rngs(0)), loss, *batch_of, wrt=nnx.LoRAParam)


def scanned(size: Size) -> Made:
    """Layers made by nnx.vmap and run by nnx.scan."""
    width, layers, batch = size((32, 3, 8), (4096, 4, 4096))

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Any:
        return nnx.Linear(width, width, rngs=rngs)

    def loss(model: Any, x: Any, y: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer: Any, x: Any) -> Any:
            return nnx.tanh(layer(x))

        return jnp.mean((forward(model, x) - y) ** 2)

    batch_of = (normal(0, batch, width), normal(1, batch, width))
    return with_optimizer(make(nnx.Rngs(0)), loss, *batch_of)


def convolutions(size: Size) -> Made:
    """Convolutions, batch statistics, dropout and its counters."""
    width, pixels, batch = size((8, 8, 8), (256, 64, 128))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(width, rngs=rngs)
            self.second = nnx.Conv(width, width, (3, 3), feature_group_count=4, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, deterministic=False, rngs=rngs)
            self.head = nnx.Linear(width, 16, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.max_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
            return self.head(self.dropout(nnx.relu(self.second(x)).mean((1, 2))))

    def loss(model: Any, images: Any, labels: Any) -> Any:
        return cross_entropy(model(images), labels)

    batch_of = (normal(0, batch, pixels, pixels, 3), integers(1, 16, batch))
    return with_optimizer(Net(nnx.Rngs(0)), loss, *batch_of)


PROGRAMS = (decoder, lora, scanned, convolutions)
