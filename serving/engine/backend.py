"""What the engine asks of a model: steps over rows of sequences whose keys and values lie in pages.

The engine and the scheduler do not know jax; a backend does not know requests. A slot holds one
sequence, whose tokens are at positions 0, 1, ... Their keys and values lie in pages of a pool:
position t is in the slot's page t // P, at t % P. A row is one token of a slot. One step of the
model runs rows of many slots: the latest token of those that draw, beside chunks of prompts.

Slots and pages are split among groups, which may lie on different devices: slot s is of group
s // B, where B is the number of slots of a group, and pages are numbered within a group.

Calls are asynchronous: `step` begins its work and returns a function, which waits until the work is
done and gives its results. Work is done in the order of the calls:

    backend.begin(0, sampling, seen=prompt)
    first = backend.step([Part(0, 0, prompt, pages, draws=True)])
    second = backend.step([Part(0, len(prompt), None, pages, draws=True)])  # of a token not yet known
    tokens = [first().drawn.ids[0], second().drawn.ids[0]]
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
      slots: how many sequences there are at a time, over all groups.
      max_length: the most tokens of a sequence, prompt and completion together.
      rows: sizes that a step has, ascending: rows of a group. The last is at least the slots of a
        group, so that all can draw in one step.
      groups: into how many parts slots and pages are split.
      page: positions of a page.
      pages: pages of a group.
      top_logprobs: how many of the likeliest tokens are reported beside each one.
      vocab_size: number of token ids.
    """

    slots: int
    max_length: int
    rows: tuple[int, ...]
    groups: int
    page: int
    pages: int
    top_logprobs: int
    vocab_size: int

    @property
    def longest(self) -> int:
        """The most tokens that a sequence can have: a small pool may hold fewer than `max_length`."""
        return min(self.max_length, self.pages * self.page)


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


class Part(NamedTuple):
    """What a step does in one slot.

    Attributes:
      slot: over all groups.
      start: the position of its first row.
      tokens: the ids of a chunk, one for each row. With None there is one row: the slot's latest
        drawn token, perhaps of a call that is under way.
      pages: of the slot, in order, at least up to its last row.
      draws: whether to draw the token behind its last row, which becomes the slot's latest.
      targets: to have scores: the token behind each row. Any id will do where there is none.
    """

    slot: int
    start: int
    tokens: tuple[int, ...] | None
    pages: tuple[int, ...]
    draws: bool
    targets: tuple[int, ...] | None = None


class Stepped(NamedTuple):
    """The results of a step.

    Attributes:
      drawn: the tokens of the parts that draw, in the order of the parts.
      scores: for each part: its targets with the log-probabilities that the model gives them; None
        if it has no targets.
    """

    drawn: Tokens
    scores: tuple[Tokens | None, ...]


class Backend(Protocol):
    """A model with slots for sequences and a pool of pages.

    Attributes:
      limits: the sizes for which it was compiled.
      info: facts about it for people and metrics: the mesh, the device kind, the bytes that a
        step reads, the devices' bandwidth.
      budget: rows of a group in one step beyond which a step takes noticeably longer.
    """

    limits: Limits
    info: dict[str, Any]
    budget: int

    @property
    def compile_total(self) -> int:
        """How many programs have been compiled; it stays the same once the backend has started."""

    def begin(
        self, slot: int, sampling: Sampling, seen: Sequence[int], drawn: Sequence[int] = ()
    ) -> None:
        """Sets how tokens are drawn in a slot, before the first one is.

        Args:
          slot: which slot.
          sampling: how tokens are drawn in it from now on.
          seen: the ids of the sequence so far, those of `drawn` among them.
          drawn: those of them that were drawn, if the sequence was interrupted and goes on.
        """

    def step(self, parts: Sequence[Part], alternatives: bool = True) -> Callable[[], Stepped]:
        """Begins to run the model over rows of several slots.

        In every layer the keys and values of all rows are written before any is read. So a part
        may also read pages that another part of this step fills.

        A prompt of 20 tokens in chunks of at most 16, then the first token behind it:

            step([Part(slot, 0, prompt[:16], pages, False)])
            step([Part(slot, 16, prompt[16:], pages, True)])
            step([Part(slot, 20, None, pages, True)])

        Args:
          parts: at least one, at most one for each slot; those of a group have at most
            `limits.rows[-1]` rows together. No page may be written by two of them.
          alternatives: whether the likeliest tokens are wanted. If not, `top_ids` and
            `top_logprobs` of the drawn tokens mean nothing.

        Returns:
          A function that waits until the step is done and returns its results.
        """
