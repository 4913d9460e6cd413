"""dm-haiku: a network that it ships."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from benchmarks.corpus.packages.program import Size, normal
from benchmarks.corpus.program import Made


def vector_quantizer(size: Size) -> Made:
    """An autoencoder around hk.nets.VectorQuantizerEMA, whose codebook is state."""
    width, code, codes, batch = size((16, 8, 32, 16), (2048, 256, 8192, 8192))

    def forward(x: Any) -> Any:
        h = hk.nets.MLP([width, code])(x)
        quantized = hk.nets.VectorQuantizerEMA(code, codes, 0.25, 0.99)(h, is_training=True)
        y = hk.nets.MLP([width, x.shape[-1]])(quantized["quantize"])
        return jnp.mean((x - y) ** 2) + quantized["loss"]

    network = hk.transform_with_state(forward)
    x = normal(1, batch, width)
    params, state = network.init(jax.random.key(0), x)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, slots: Any, x: Any) -> Any:
        loss = jax.value_and_grad(network.apply, has_aux=True)
        (value, new), grads = loss(params, state, None, x)
        updates, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, updates), new, slots, value

    args = (params, state, optimizer.init(params), x)
    return Made(step, args, ("params", "open", "open", "batch"))


PROGRAMS = (vector_quantizer,)
