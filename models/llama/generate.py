"""Generates text by running the whole model over a fixed window for every token.

It keeps no cache, so it is slow but simple: enough to see what a model has learned during training.
Serving uses `models.decode`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from models.llama.config import LlamaConfig
from models.llama.model import forward
from models.llama.parameters import Params

NextLogits = Callable[[Any, Any, Any], Any]
"""(params, tokens (1, W), position) -> logits (V,) of the token after `position`."""


def make_next_logits(config: LlamaConfig) -> NextLogits:
    """Returns the function that `generate` calls; compile it once."""
    config = dataclasses.replace(config, stages=1)  # one sequence is no batch to cut

    def next_logits(params: Params, tokens_1W: jax.Array, position: jax.Array) -> jax.Array:
        logits_WV = forward(params, tokens_1W, config)[0]
        row_1V = jax.lax.dynamic_slice_in_dim(logits_WV, position, 1)
        return row_1V[0].astype(jnp.float32)

    return next_logits


def generate(
    next_logits: NextLogits,
    params: Any,
    prompt: Sequence[int],
    *,
    tokens: int,
    window: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """Continues a prompt.

    Args:
        next_logits: `make_next_logits`'s function, compiled for a window of this length.
        params: the model's parameters.
        prompt: token ids, at least one; only the last `window` of them are used.
        tokens: how many to add.
        window: how many tokens the model sees.
        temperature: logits are divided by it; 0 takes the likeliest token.
        seed: for drawing tokens; the same seed gives the same text.

    Returns:
        The new tokens, without the prompt.

    Raises:
        ValueError: the prompt is empty or the temperature negative.
    """
    if not len(prompt):
        raise ValueError("the prompt is empty; it needs at least one token")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, and is {temperature}")
    generator = np.random.default_rng(seed)
    text = [int(token) for token in prompt]
    for _ in range(tokens):
        seen = text[-window:]
        tokens_1W = np.zeros((1, window), np.int32)
        tokens_1W[0, : len(seen)] = seen
        logits_V = np.asarray(next_logits(params, tokens_1W, np.int32(len(seen) - 1)))
        text.append(sample(logits_V, temperature, generator))
    return text[len(prompt) :]


def sample(
    logits_V: npt.NDArray[np.float32], temperature: float, generator: np.random.Generator
) -> int:
    """Draws one token from `softmax(logits / temperature)`."""
    if temperature == 0:
        return int(np.argmax(logits_V))
    # The largest of logits + Gumbel noise is distributed as their softmax.
    return int(np.argmax(logits_V / temperature + generator.gumbel(size=logits_V.shape)))
