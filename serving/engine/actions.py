"""The scheduler's vocabulary: requests go in, actions and progress come out."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from serving.engine.backend import Sampling

GREEDY = Sampling(temperature=0)

Finish = Literal["stop", "length"]
"""Why a request ended: it drew one of its stop ids, or all the tokens that it asked for."""


class QueueFull(RuntimeError):
    """Too many requests wait already; the client should try again later."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion, as the scheduler sees it.

    Attributes:
      key: a number that no other request has.
      client: who asks; clients get equal shares of the tokens.
      prompt: token ids, at least one.
      max_tokens: the most tokens to draw. With 0 only the prompt is run.
      sampling: how tokens are drawn.
      stop_ids: drawing one of these ends the completion.
      interactive: whether a person watches the tokens come, so that they are drawn one by one.
      score_prompt: whether the log-probabilities of the prompt's tokens are wanted. If so the
        whole prompt is run, even if a slot holds the beginning of it.
      alternatives: whether the likeliest tokens are wanted beside each one that is drawn.
    """

    key: int
    client: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    interactive: bool = False
    score_prompt: bool = False
    alternatives: bool = False


class Copy(NamedTuple):
    """Call `Backend.copy`: the prompt of request `key` begins like what slot `source` holds."""

    key: int
    source: int
    target: int
    length: int


class Prefill(NamedTuple):
    """Call `Backend.prefill` for request `key`.

    Attributes:
      key: which request.
      slot: its slot.
      tokens: the prompt from its beginning to the end of the chunk.
      start: where the chunk begins in `tokens`.
      sampling: how to draw the first token; None before the last chunk.
      targets: the prompt's token after each one of the chunk, if scores are wanted.
      is_last: whether the prompt ends with this chunk.
    """

    key: int
    slot: int
    tokens: tuple[int, ...]
    start: int
    sampling: Sampling | None
    targets: tuple[int, ...] | None
    is_last: bool

    @property
    def size(self) -> int:
        """How many tokens the chunk has."""
        return len(self.tokens) - self.start


class Decode(NamedTuple):
    """Call `Backend.decode`.

    Attributes:
      keys: the request of each active slot, None for the others.
      steps: how many tokens to draw for each.
      alternatives: whether one of the requests wants the likeliest tokens.
      held: tokens in the active slots, all together.
    """

    keys: tuple[int | None, ...]
    steps: int
    alternatives: bool
    held: int

    @property
    def active(self) -> tuple[bool, ...]:
        """For each slot whether it takes part."""
        return tuple(key is not None for key in self.keys)


Action = Copy | Prefill | Decode


class Progress(NamedTuple):
    """What an action did for one request.

    Attributes:
      key: which request.
      slot: the slot in which its tokens were drawn.
      tokens: how many of the tokens drawn in this slot belong to the request. Those behind them
        were drawn after its end and are dropped.
      finish: why the request ended with these tokens; None if it goes on.
    """

    key: int
    slot: int
    tokens: int
    finish: Finish | None


@dataclasses.dataclass
class Counts:
    """Totals since the start.

    Attributes:
      prefilled: prompt tokens that were run.
      reused: prompt tokens that need not be run, as a slot held them already.
      drawn: tokens that were drawn and went to their reader.
      wasted: tokens that were drawn after the end of their request, or for a cancelled one.
      cancelled: requests that were cancelled.
    """

    prefilled: int = 0
    reused: int = 0
    drawn: int = 0
    wasted: int = 0
    cancelled: int = 0
