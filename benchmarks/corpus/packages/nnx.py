"""flax.nnx: modules split into graph and state, `nnx.Optimizer`, LoRA."""

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.corpus.packages.program import Size, normal
from benchmarks.corpus.program import Made


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

    made, wrt = Net(nnx.Rngs(0)), nnx.LoRAParam
    graph, params, rest = nnx.split(  # type: ignore[misc]
        (made, nnx.Optimizer(made, optax.adamw(1e-3, eps=1e-3), wrt=wrt)), nnx.Param, ...
    )

    def step(params: Any, rest: Any, *batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, params, rest)
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model, *batch)
        optimizer.update(model, grads)
        return (*nnx.split((model, optimizer), nnx.Param, ...)[1:], value)  # type: ignore[misc]

    args = (params, rest, normal(0, batch, width), normal(1, batch, width))
    return Made(step, args, ("params", "open", "batch", "batch"))


PROGRAMS = (lora,)
