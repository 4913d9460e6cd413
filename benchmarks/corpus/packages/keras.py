"""keras on jax: models of its layers, trained by its stateless functions."""

import os

os.environ["KERAS_BACKEND"] = "jax"  # keras reads it when it is imported

from typing import Any

import jax
import keras

from benchmarks.corpus.packages.program import Size, integers
from benchmarks.corpus.program import Made


def trained(model: Any, *batch: Any) -> Made:
    """A step of keras's Adam; variables are lists of arrays."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-3, epsilon=1e-3)
    optimizer.build(model.trainable_variables)

    def step(params: Any, rest: Any, slots: Any, x: Any, y: Any) -> Any:
        def of_params(params: Any) -> Any:
            out, new = model.stateless_call(params, rest, x, training=True)
            return loss(y, out), new

        (value, new), grads = jax.value_and_grad(of_params, has_aux=True)(params)
        params, slots = optimizer.stateless_apply(slots, grads, params)
        return params, new, slots, value

    params, rest, slots = (
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    )
    return Made(step, (params, rest, slots, *batch), ("params", "open", "open", "batch", "batch"))


def transformer(size: Size) -> Made:
    """A classifier of keras.layers.MultiHeadAttention with dropout."""
    vocab, width, batch, length = size((64, 32, 8, 8), (32000, 1024, 64, 512))
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocab, width)(tokens)
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        heads = max(width // 64, 2)
        x = x + layers.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=True)
        h = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1, seed=0)(layers.Dense(width)(h))
    out = layers.Dense(16)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(tokens, out)
    return trained(model, integers(0, vocab, batch, length), integers(1, 16, batch))


PROGRAMS = (transformer,)
