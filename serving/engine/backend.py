"""What the engine asks of a model: slots of a KV cache, filled chunk by chunk, decoded together.

The engine and the scheduler know of no jax; a backend knows of no requests. A slot holds one
sequence: its tokens' keys and values at positions 0, 1, ... Calls only begin things, which are done
one after the other; what a call returns is called for what came of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a backend was compiled for.

    Attributes:
      slots: sequences that are decoded together.
      max_length: tokens of a slot, prompt and completion together.
      chunks: sizes of prefill's buckets, ascending; one call takes at most the last.
      decode_steps: tokens that one call of `decode` makes at most.
      top_logprobs: how many of the likeliest alternatives are reported with each token.
      vocab_size: ids are below it.
    """

    slots: int
    max_length: int
    chunks: tuple[int, ...]
    decode_steps: int
    top_logprobs: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the logits, in this order.

    Attributes:
      repetition_penalty: logits of tokens in the sequence, prompt included, are divided by it if
        positive, multiplied if negative (Keskar et al. 2019); 1 changes nothing.
      frequency_penalty: taken off a token's logit for each time that it has been drawn.
      presence_penalty: taken off the logits of tokens that have been drawn.
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: only so many of the likeliest; 0 is all.
      top_p: the likeliest whose probabilities reach this sum (Holtzman et al. 2019).
      min_p: only tokens at least this likely, as a share of the likeliest one's probability.
      seed: with the position it decides the draw; in [0, 2**32).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0


class Tokens(NamedTuple):
    """Tokens with their log-probabilities, of the model itself (temperature and filters left out).

    Attributes:
      ids: (N, ...) token ids.
      logprobs: (N, ...) of those.
      top_ids: (N, ..., P) the `Limits.top_logprobs` likeliest alternatives, likeliest first.
      top_logprobs: (N, ..., P) of those.
    """

    ids: Ints
    logprobs: Floats
    top_ids: Ints
    top_logprobs: Floats


class Prefilled(NamedTuple):
    """What a chunk of a prompt gives.

    Attributes:
      first: the first token after the prompt, arrays with leading dim 1; None if not asked for.
      scores: for each token of the chunk the given next one and what the model says of it,
        leading dim the chunk's length; None if not asked for.
    """

    first: Tokens | None
    scores: Tokens | None


class Backend(Protocol):
    """A model behind slots.

    Attributes:
      limits: what it was compiled for.
      info: facts about it to show to people and metrics, such as mesh, device kind, bytes that a
        decode step reads and the devices' bandwidth.
    """

    limits: Limits
    info: dict[str, Any]

    @property
    def compile_total(self) -> int:
        """Programs compiled so far; does not change after start."""

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int,
        *,
        sampling: Sampling | None = None,
        targets: Sequence[int] | None = None,
    ) -> Callable[[], Prefilled]:
        """Run a chunk of a prompt: its keys and values go to positions start, start + 1, ...

        Args:
          slot: which.
          tokens: ids from the beginning of the prompt to the end of the chunk.
          start: how many of them the slot holds before, so that the chunk is `tokens[start:]`, at
            least one and at most `limits.chunks[-1]`; what it held behind is forgotten.
          sampling: given with a prompt's last chunk: draws the first token, which `decode` goes on
            from, and is what `decode` uses for this slot from then on.
          targets: the token after each one of the chunk (of the last one of a prompt: any), to have
            scores of them.

        Returns:
          What waits until the chunk is done, and gives what came of it.
        """

    def decode(
        self, active: Sequence[bool], steps: int, alternatives: bool = True
    ) -> Callable[[], Tokens]:
        """Make tokens in several slots at once.

        Each step writes the keys and values of a slot's latest token and draws the next one. Slots
        that are not active are left as they are. A slot that would pass `max_length` is a mistake.

        Args:
          active: for each slot whether it takes part; its prompt has to be there.
          steps: how many tokens, 1 to `limits.decode_steps`.
          alternatives: whether the likeliest others are wanted; else they mean nothing.

        Returns:
          What waits, and gives arrays (steps, slots, ...); those of inactive slots mean nothing.
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of the first `length` tokens from one slot to another."""
