"""The scheduler's vocabulary: requests go in, steps and progress come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from serving.engine.backend import Part, Sampling, Words
from serving.engine.masks import Masks

GREEDY = Sampling(temperature=0)

Finish = Literal["stop", "length"]
"""Why a request ended: it drew one of its stop ids, or all the tokens that it asked for."""


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
      score_prompt: whether the log-probabilities of the prompt's tokens are wanted. If so the
        whole prompt is run, even if pages hold the beginning of it.
      alternatives: whether the likeliest tokens are wanted beside each one that is drawn.
      user: whom the client asks for; users of a client share what it gets.
      masks: which tokens may be drawn, by how many were drawn before.
      guided: whether, from its second token on, the caller gives a mask for each (`allow`). It
        draws none before that.
    """

    key: int
    client: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    score_prompt: bool = False
    alternatives: bool = False
    user: str = ""
    masks: Masks = dataclasses.field(default=(), compare=False)
    guided: bool = False


class Begin(NamedTuple):
    """The arguments of a call of `Backend.begin`."""

    slot: int
    sampling: Sampling
    seen: tuple[int, ...]
    drawn: tuple[int, ...]


class Step(NamedTuple):
    """A call of `Backend.step`, and those of `Backend.begin` and `Backend.allow` before it.

    Attributes:
      begins: the slots in which the first token is drawn.
      masks: by slot, where other tokens may be drawn than before; behind `begins`.
      parts: what the step does.
      keys: the request of each part.
      placed: requests that got a slot for this step.
      alternatives: whether one that draws wants the likeliest tokens.
      rows: how many there are, all parts together.
      decoding: how many of them are latest drawn tokens, not chunks of prompts.
      seen: positions that the last rows of the parts see, all together.
    """

    begins: tuple[Begin, ...]
    masks: Mapping[int, Words | None]
    parts: tuple[Part, ...]
    keys: tuple[int, ...]
    placed: tuple[int, ...]
    alternatives: bool
    rows: int
    decoding: int
    seen: int


class Progress(NamedTuple):
    """What a step did for one request.

    Attributes:
      key: which request.
      row: its token among those that the step drew; None if it wanted none.
      finish: why the request ended with it; None if it goes on.
    """

    key: int
    row: int | None
    finish: Finish | None


@dataclasses.dataclass
class Counts:
    """Totals since the start.

    Attributes:
      prefilled: prompt tokens that were run.
      reused: prompt tokens that need not be run, as pages held them already.
      repeated: tokens that were run once more, since their pages were taken from a request.
      drawn: tokens that were drawn and went to their reader.
      wasted: tokens that were drawn after the end of their request, or for a cancelled one.
      cancelled: requests that were cancelled.
      preempted: how often a request lost its slot and pages to older ones.
    """

    prefilled: int = 0
    reused: int = 0
    repeated: int = 0
    drawn: int = 0
    wasted: int = 0
    cancelled: int = 0
    preempted: int = 0
