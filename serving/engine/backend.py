"""What the engine asks of a model: slots of a KV cache, filled chunk by chunk, decoded together.

The engine and the scheduler do not know jax; a backend does not know requests. A slot holds one
sequence: the keys and values of its tokens, at positions 0, 1, ...

Calls are asynchronous. A call begins its work and returns a function; calling that function waits
until the work is done and gives its results. Work is done in the order of the calls:

    prefilled = backend.prefill(0, prompt, 0, sampling=sampling)
    drawn = backend.decode([True, False], steps=4)    # begun before the first token is known
    first, tokens = prefilled().first, drawn()
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
    """The sizes for which a backend was compiled.

    Attributes:
      slots: how many sequences are decoded together.
      max_length: the most tokens that a slot holds, prompt and completion together.
      chunks: sizes of the prefill buckets, ascending. One call takes at most the last of them.
      decode_steps: the most tokens that one call of `decode` draws for each slot.
      top_logprobs: how many of the likeliest tokens are reported beside each one.
      vocab_size: number of token ids.
    """

    slots: int
    max_length: int
    chunks: tuple[int, ...]
    decode_steps: int
    top_logprobs: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the logits; what is listed first is applied first.

    Attributes:
      repetition_penalty: for tokens that occur in the sequence, prompt included, positive logits
        are divided by it and negative ones multiplied (Keskar et al. 2019). 1 changes nothing.
      frequency_penalty: subtracted from a token's logit once for each time that it was drawn;
        occurrences in the prompt do not count. 0 changes nothing.
      presence_penalty: subtracted once from the logit of every token that was drawn.
      temperature: logits are divided by it. 0 takes the likeliest token.
      top_k: only the k likeliest tokens are kept; 0 keeps all.
      top_p: only the likeliest tokens are kept, as few as reach this sum of probabilities
        (Holtzman et al. 2019); 1 keeps all.
      min_p: only tokens are kept that have at least this share of the likeliest one's probability;
        0 keeps all.
      seed: in [0, 2**32). The seed and the token's position decide the draw, so that a request
        with a seed repeats exactly.
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
    """Tokens with their log-probabilities.

    These are the model's own: log-softmax of the logits before penalties, temperature and filters.

    Attributes:
      ids: (N, ...) token ids.
      logprobs: (N, ...) the log-probability of each.
      top_ids: (N, ..., P) the P = `Limits.top_logprobs` likeliest tokens, likeliest first.
      top_logprobs: (N, ..., P) the log-probabilities of these.
    """

    ids: Ints
    logprobs: Floats
    top_ids: Ints
    top_logprobs: Floats


class Prefilled(NamedTuple):
    """The results of a chunk of a prompt.

    Attributes:
      first: the token drawn after the prompt, arrays with leading dim 1; None if not asked for.
      scores: row i is the target of the chunk's token i with the log-probability that the model
        gives it there; None if not asked for.
    """

    first: Tokens | None
    scores: Tokens | None


class Backend(Protocol):
    """A model with slots for sequences.

    Attributes:
      limits: the sizes for which it was compiled.
      info: facts about it for people and metrics: the mesh, the device kind, the bytes that a
        decode step reads, the devices' bandwidth.
    """

    limits: Limits
    info: dict[str, Any]

    @property
    def compile_total(self) -> int:
        """How many programs have been compiled; it stays the same once the backend has started."""

    def prefill(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int,
        *,
        sampling: Sampling | None = None,
        targets: Sequence[int] | None = None,
    ) -> Callable[[], Prefilled]:
        """Begins to run a chunk of a prompt.

        A prompt of 20 tokens in chunks of at most 8:

            prefill(slot, prompt[:8], 0)
            prefill(slot, prompt[:16], 8)
            prefill(slot, prompt[:20], 16, sampling=sampling)

        Args:
          slot: which slot.
          tokens: ids from the beginning of the prompt to the end of the chunk.
          start: how many of them the slot holds already. The chunk is `tokens[start:]`, at least
            one token and at most `limits.chunks[-1]`. Whatever the slot held behind is forgotten.
          sampling: to be given with a prompt's last chunk, and only then. The first token is drawn
            with it, and so are those that `decode` draws for this slot.
          targets: to have scores: the prompt's token after each one of the chunk. Behind the
            prompt's last token there is none; any id will do.

        Returns:
          A function that waits until the chunk is done and returns its results.
        """

    def decode(
        self, active: Sequence[bool], steps: int, alternatives: bool = True
    ) -> Callable[[], Tokens]:
        """Begins to draw tokens in several slots at once.

        Each step writes the key and value of a slot's latest token and draws the next one. Slots
        that are not active keep their state. The caller sees to it that no active slot grows
        beyond `limits.max_length`.

        Args:
          active: for each slot whether it takes part. Its whole prompt has to have been run.
          steps: how many tokens to draw for each slot, from 1 to `limits.decode_steps`.
          alternatives: whether the likeliest tokens are wanted. If not, `top_ids` and
            `top_logprobs` of the results mean nothing.

        Returns:
          A function that waits and returns arrays (steps, slots, ...). Those of inactive slots mean
          nothing.
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Begins to copy the keys and values of the first `length` tokens to another slot."""
