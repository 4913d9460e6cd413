"""qwix: quantized training of flax's layers."""

from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import linen

from benchmarks.corpus.packages.program import Size, normal, training
from benchmarks.corpus.program import Made


class Mlp(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x: Any) -> Any:
        h = linen.gelu(linen.Dense(self.width)(x))
        return linen.Dense(x.shape[-1])(h)


def qwix_training(size: Size) -> Made:
    """qwix.QtProvider: int8 forward and backward in linen.Dense."""
    inner, batch = size((32, 16), (2048, 4096))
    rules = [qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8)]
    model = qwix.quantize_model(Mlp(size(64, 8192)), qwix.QtProvider(rules))
    x, y = normal(0, batch, inner), normal(1, batch, inner)

    def loss(params: Any, x: Any, y: Any) -> Any:
        out = model.apply(params, x, rngs={"params": jax.random.key(3)})
        return jnp.mean((out - y) ** 2)

    return training(loss, model.init(jax.random.key(0), x), x, y)


PROGRAMS = (qwix_training,)
