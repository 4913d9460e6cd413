"""What goes into the scheduler, requests, and what comes out of it: actions and progress."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from serving.engine.backend import Sampling

GREEDY = Sampling(temperature=0)

Finish = Literal["stop", "length"]
"""Why a request ended: one of its stop ids was drawn, or it has all the tokens it asked for."""


class QueueFull(RuntimeError):
    """Too many requests wait."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion.

    Attributes:
      key: unique.
      client: whom to be fair to.
      prompt: ids, at least one.
      max_tokens: tokens to draw at most; with 0 the prompt is run and that is it.
      sampling: how tokens are drawn.
      stop_ids: ids that end the completion; the last token may be one of them.
      interactive: somebody watches the tokens come, so decode makes them one by one.
      score_prompt: the prompt's tokens are wanted with their log-probabilities, so none is reused.
      alternatives: the likeliest others are wanted with each token.
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
    """`Backend.copy` for the request `key`."""

    key: int
    source: int
    target: int
    length: int


class Prefill(NamedTuple):
    """`Backend.prefill` for the request `key`.

    `tokens` are those of the prompt up to the chunk's end; `is_last`, whether they are all.
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
        """Tokens of the chunk."""
        return len(self.tokens) - self.start


class Decode(NamedTuple):
    """`Backend.decode`.

    `keys` are the requests of the active slots, None of the others; `held`, tokens in these slots.
    """

    keys: tuple[int | None, ...]
    steps: int
    alternatives: bool
    held: int

    @property
    def active(self) -> tuple[bool, ...]:
        """Which slots take part."""
        return tuple(key is not None for key in self.keys)


Action = Copy | Prefill | Decode


class Progress(NamedTuple):
    """What an action did for a request.

    Attributes:
      key: which request.
      slot: the slot it is, or was, in.
      tokens: how many of the action's tokens are its own; those behind them are to be dropped.
      finish: why it ended with them; None if it goes on.
    """

    key: int
    slot: int
    tokens: int
    finish: Finish | None


@dataclasses.dataclass
class Counts:
    """Totals since the start.

    Attributes:
      prefilled: prompt tokens that were computed.
      reused: prompt tokens that slots held already.
      drawn: tokens that went to requests.
      wasted: tokens that were drawn behind the end of their request, or for one that was cancelled.
      cancelled: requests.
    """

    prefilled: int = 0
    reused: int = 0
    drawn: int = 0
    wasted: int = 0
    cancelled: int = 0
