"""The frequencies of rotary embeddings, scaled for long sequences if the model asks for it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from models.llama.config import LlamaConfig, RopeScaling


def rope_frequencies(config: LlamaConfig) -> npt.NDArray[np.float32]:
    """By how many radians each pair of a head's entries turns from one position to the next.

    They are computed in float64 and become constants of the program. At position 100,000 a relative
    error of 1e-6 would be a tenth of a radian, and backends differ in how they compute powers.

    Returns:
        (E,) in float32.
    """
    half = config.head_width // 2
    frequencies_E = config.rope_theta ** (-np.arange(half) / half)
    if config.rope_scaling is not None:
        frequencies_E = _scaled(frequencies_E, config.rope_scaling)
    return frequencies_E.astype(np.float32)


def _scaled(
    frequencies_E: npt.NDArray[np.float64], scaling: RopeScaling
) -> npt.NDArray[np.float64]:
    slow_E = frequencies_E / scaling.factor
    if scaling.rope_type == "linear":
        return slow_E
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length = scaling.original_max_position_embeddings
    assert low is not None and high is not None and length is not None  # RopeScaling checks
    # Turns within a sequence of pretraining: below `low` it is slowed down, above `high` kept.
    turns_E = length * frequencies_E / (2 * math.pi)
    kept_E = np.clip((turns_E - low) / (high - low), 0.0, 1.0)
    return (1 - kept_E) * slow_E + kept_E * frequencies_E
