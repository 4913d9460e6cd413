"""How rotary frequencies are slowed down for long sequences: what is said of it, and checked."""

from __future__ import annotations

import dataclasses
from typing import Literal

from models.llama.errors import ConfigError

RopeType = Literal["linear", "llama3"]
ROPE_TYPES: tuple[RopeType, ...] = ("linear", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are slowed down for sequences longer than those of pretraining.

    `linear` divides all of them by `factor`. `llama3` divides those whose wavelength is above
    `original_max_position_embeddings / low_freq_factor`, keeps those below
    `original_max_position_embeddings / high_freq_factor`, and interpolates in between.

    Args:
        rope_type: `"linear"` or `"llama3"`.
        factor: at least 1.
        low_freq_factor: of `llama3` only; below `high_freq_factor`.
        high_freq_factor: of `llama3` only.
        original_max_position_embeddings: of `llama3` only; tokens of a sequence in pretraining.

    Raises:
        ConfigError: another type, a number that is missing, superfluous or out of range.
    """

    rope_type: RopeType
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type {self.rope_type!r} is not supported; {' and '.join(ROPE_TYPES)} are"
            )
        if self.factor < 1:
            raise ConfigError(f"the factor of rope scaling must be at least 1, not {self.factor}")
        own = (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings)
        if self.rope_type == "linear":
            if any(number is not None for number in own):
                raise ConfigError("linear rope scaling has a factor and nothing else")
            return
        low, high, original = own
        if low is None or high is None or original is None:
            raise ConfigError(
                "llama3 rope scaling needs low_freq_factor, high_freq_factor and "
                "original_max_position_embeddings"
            )
        if not 0 < low < high or original < 1:
            raise ConfigError(
                f"llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, not {low} and "
                f"{high}, and positive original_max_position_embeddings, not {original}"
            )
