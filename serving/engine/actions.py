"""The scheduler's vocabulary: jobs go in, steps and progress come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from serving.engine.backend import Sampling, SlotPart, Words

if TYPE_CHECKING:  # the scheduler starts no threads, and imports nothing that does
    from serving.engine.guide import Guide, Masks

GREEDY = Sampling(temperature=0)

Finish = Literal["stop", "length"]
"""Why a request ended: it drew one of its stop ids, or all the tokens that it asked for."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One completion that a client asks for; the engine fills in whose it is.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: the most tokens to draw. With 0 only the prompt is run.
      sampling: how they are drawn.
      stop_ids: ids that end the completion; their text is not shown.
      stops: strings that end the completion; they are not shown either.
      logprobs: how many of the likeliest tokens to report beside each one; with 0 only the
        token's own log-probability, with None no log-probabilities at all.
      score_prompt: whether to report the log-probabilities of the prompt's tokens too. If so the
        whole prompt is run, even if pages hold the beginning of it.
      min_tokens: stop strings count behind so many tokens only.
      masks: which tokens may be drawn, by how many were drawn before; a guide's first one, too.
      guide: says which tokens may be drawn next. From the second token on each waits for its mask
        (`Scheduler.allow`).
      key: a number that no other job of the engine has.
      client: who asks; clients get equal shares of the tokens.
      user: whom the client asks for; users of a client share what it gets.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    score_prompt: bool = False
    min_tokens: int = 0
    masks: Masks = dataclasses.field(default=(), compare=False)
    guide: Guide | None = None
    key: int = 0
    client: str = ""
    user: str = ""

    @property
    def guided(self) -> bool:
        """Whether it draws no token before it was told which ones it may draw."""
        return self.guide is not None


class Begin(NamedTuple):
    """The arguments of a call of `Backend.begin`."""

    slot: int
    sampling: Sampling
    seen: tuple[int, ...]
    drawn: tuple[int, ...]


class EngineStep(NamedTuple):
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
    parts: tuple[SlotPart, ...]
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
