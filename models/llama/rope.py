"""Rotary embeddings: their frequencies, scaled for long sequences if the model asks for it.

Shapes are in the names, as in `model.py`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from spmd.models.llama.config import LlamaConfig, RopeScaling


def rope_frequencies(config: LlamaConfig, is_local: bool = False) -> npt.NDArray[np.float32]:
    """By how many radians each pair of a head's entries turns from one position to the next.

    They are computed in float64 and become constants of the program. At position 100,000 a relative
    error of 1e-6 would be a tenth of a radian, and backends differ in how they compute powers.

    Args:
        is_local: whether the layer has a window, and perhaps frequencies of its own.

    Returns:
        (E,) in float32.
    """
    half, base = config.rope_width // 2, config.rope_local_base_freq if is_local else None
    frequencies_E = (base or config.rope_theta) ** (-np.arange(half) / half)
    if config.rope_scaling is not None and base is None:
        frequencies_E = _scaled(frequencies_E, config.rope_scaling, config.rope_theta)
    return frequencies_E.astype(np.float32)


def _scaled(
    frequencies_E: npt.NDArray[np.float64], scaling: RopeScaling, base: float
) -> npt.NDArray[np.float64]:
    slow_E = frequencies_E / scaling.factor
    if scaling.rope_type == "linear":
        return slow_E
    length = scaling.original_max_position_embeddings
    if scaling.rope_type == "yarn":
        slow, fast = scaling.beta_slow, scaling.beta_fast
        assert slow is not None and fast is not None and length is not None  # RopeScaling checks
        # Between which pairs the turns within a sequence of pretraining go from `fast` to `slow`.
        pairs = len(frequencies_E) / math.log(base)
        begin, end = (pairs * math.log(length / (2 * math.pi * n)) for n in (fast, slow))
        is_exact = scaling.truncate is False
        first = max(begin if is_exact else math.floor(begin), 0)
        last = min(end if is_exact else math.ceil(end), 2 * len(frequencies_E) - 1)
        last = max(last, first + 0.001)
        turned_E = (np.arange(len(frequencies_E)) - first) / (last - first)
        slowed_E: npt.NDArray[np.float64] = np.clip(turned_E, 0.0, 1.0)
        return slowed_E * slow_E + (1 - slowed_E) * frequencies_E
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None and length is not None  # RopeScaling checks
    # Turns within a sequence of pretraining: below `low` it is slowed down, above `high` kept.
    turns_E = length * frequencies_E / (2 * math.pi)
    kept_E = np.clip((turns_E - low) / (high - low), 0.0, 1.0)
    return (1 - kept_E) * slow_E + kept_E * frequencies_E


def rope_angles(positions: jax.Array, config: LlamaConfig, is_local: bool = False) -> jax.Array:
    """The angle by which each frequency turns at each position, in radians and float32.

    Args:
        positions: (S,), or (B, S) if rows differ.
        is_local: as for `rope_frequencies`.

    Returns:
        Angles (S, E) or (B, S, E).
    """
    return positions.astype(jnp.float32)[..., None] * rope_frequencies(config, is_local)


def apply_rope(x_BSND: jax.Array, angles: jax.Array, magnitude: float = 1.0) -> jax.Array:
    """Rotary embedding (Su et al. 2021), which rotates a head's first half against its second half.

    Hugging Face's weights are laid out for that; the paper pairs neighbouring entries instead.

    Args:
        angles: (S, E) or (B, S, E).
        magnitude: what the result is multiplied by.
    """
    cos_S1E, sin_S1E = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if magnitude != 1:
        cos_S1E, sin_S1E = magnitude * cos_S1E, magnitude * sin_S1E
    first_BSNE, second_BSNE = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    rotated = (
        first_BSNE * cos_S1E - second_BSNE * sin_S1E,
        second_BSNE * cos_S1E + first_BSNE * sin_S1E,
    )
    return jnp.concatenate(rotated, axis=-1).astype(x_BSND.dtype)


def halves(x: jax.Array) -> jax.Array:
    """Neighbouring pairs (..., 2 E) -> first halves, then second ones, as `apply_rope` takes them.

    DeepSeek's weights make pairs.
    """
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)
