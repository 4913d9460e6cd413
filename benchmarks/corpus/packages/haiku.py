"""dm-haiku: the networks that it ships."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from benchmarks.corpus.packages.program import Size, cross_entropy, integers, normal
from benchmarks.corpus.program import Made


def with_state(network: Any, *batch: Any, loss: Callable[..., Any]) -> Made:
    """A step of SGD with momentum of a network that has parameters and state."""
    params, state = network.init(jax.random.key(0), batch[0])
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, slots: Any, *batch: Any) -> Any:
        def of_params(params: Any) -> Any:
            out, new = network.apply(params, state, None, batch[0])
            return loss(out, *batch[1:]), new

        (value, new), grads = jax.value_and_grad(of_params, has_aux=True)(params)
        updates, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, updates), new, slots, value

    args = (params, state, optimizer.init(params), *batch)
    return Made(step, args, ("params", "open", "open", *["batch"] * len(batch)))


def mobilenet(size: Size) -> Made:
    """hk.nets.MobileNetV1, whose convolutions are depthwise."""
    pixels, batch = size((64, 32), (128, 128))
    network = hk.transform_with_state(lambda x: hk.nets.MobileNetV1()(x, is_training=True))
    images, labels = normal(0, batch, pixels, pixels, 3), integers(1, 1000, batch)
    return with_state(network, images, labels, loss=cross_entropy)


def vector_quantizer(size: Size) -> Made:
    """An autoencoder around hk.nets.VectorQuantizerEMA, whose codebook is state."""
    width, code, codes, batch = size((16, 8, 32, 16), (2048, 256, 8192, 8192))

    def forward(x: Any) -> Any:
        h = hk.nets.MLP([width, code])(x)
        quantized = hk.nets.VectorQuantizerEMA(code, codes, 0.25, 0.99)(h, is_training=True)
        y = hk.nets.MLP([width, x.shape[-1]])(quantized["quantize"])
        return jnp.mean((x - y) ** 2) + quantized["loss"]

    network = hk.transform_with_state(forward)
    return with_state(network, normal(1, batch, width), loss=lambda value: value)


PROGRAMS = (mobilenet, vector_quantizer)
