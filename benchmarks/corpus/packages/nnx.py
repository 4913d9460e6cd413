"""flax.nnx: modules split into graph and state, `nnx.Optimizer`, LoRA, scanned layers."""

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.corpus.packages.program import Size, normal
from benchmarks.corpus.program import Made


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


PROGRAMS = (lora, scanned)
