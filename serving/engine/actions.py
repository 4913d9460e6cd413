"""The scheduler's vocabulary: jobs go in, steps and progress come out."""

import dataclasses
from typing import TYPE_CHECKING, Literal, NamedTuple

from spmd.serving.engine.backend import Sampling, SlotPart, Words

if TYPE_CHECKING:  # the scheduler starts no threads, and imports nothing that does
    from spmd.serving.engine.guide import Guide, Masks
    from spmd.serving.engine.thought import Marks

GREEDY = Sampling(temperature=0)

Finish = Literal["stop", "length"]
"""Why a request ended: it drew one of its stop ids, or all the tokens that it asked for."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One completion that a client asks for; the engine fills in whose it is."""

    prompt: tuple[int, ...]  # token ids, at least one
    max_tokens: int  # the most tokens to draw. With 0 only the prompt is run.
    sampling: Sampling = GREEDY  # how they are drawn
    stop_ids: frozenset[int] = frozenset()  # ids that end the completion; their text is not shown
    stops: tuple[str, ...] = ()  # strings that end the completion; they are not shown either
    # how many of the likeliest tokens to report beside each one; with 0 only the token's own
    # log-probability, with None no log-probabilities at all
    logprobs: int | None = None
    # whether to report the log-probabilities of the prompt's tokens too. If so the whole prompt is
    # run, even if pages hold the beginning of it.
    score_prompt: bool = False
    min_tokens: int = 0  # stop strings count behind so many tokens only
    hidden: frozenset[int] = frozenset()  # ids that have no text
    reports_ids: bool = False  # whether its reader gets the ids of tokens
    salt: str = ""  # pages are shared with those jobs alone that have the same
    adapter: int = -1  # as of `SlotPart`
    thought: "Marks | None" = None  # stop strings count behind the thought only, if it may begin so
    # which tokens may be drawn, by how many were drawn before; a guide's first one, too
    masks: "Masks" = dataclasses.field(default=(), compare=False)
    # says which tokens may be drawn next. From the second token on each waits for its mask
    # (`Scheduler.allow`).
    guide: "Guide | None" = None
    key: int = 0  # a number that no other job of the engine has
    client: str = ""  # who asks; clients get equal shares of the tokens
    user: str = ""  # whom the client asks for; users of a client share what it gets
    priority: int = 0  # of what a client asks for, those with the lowest are first

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


@dataclasses.dataclass
class EngineStep:
    """A call of `Backend.step`, and those of `Backend.begin` and `Backend.allow` before it."""

    room: list[int]  # for each group, how many more rows it might have
    begins: list[Begin]  # the slots in which the first token is drawn
    # by slot, where other tokens may be drawn than before; behind `begins`
    masks: dict[int, Words | None]
    parts: list[SlotPart]  # what the step does
    keys: list[int]  # the request of each part
    # (request, how many of its tokens pages held already), of those that got a slot for this step
    placed: list[tuple[int, int]]
    alternatives: bool = False  # whether one that draws wants the likeliest tokens
    rows: int = 0  # how many there are, all parts together
    decoding: int = 0  # how many of them are latest drawn tokens, not chunks of prompts
    seen: int = 0  # positions that the last rows of the parts see, all together


class Progress(NamedTuple):
    """What a step did for one request."""

    key: int  # which request
    row: int | None  # its token among those that the step drew; None if it wanted none
    finish: Finish | None  # why the request ended with it; None if it goes on


@dataclasses.dataclass
class Counts:
    """Totals since the start."""

    prefilled: int = 0  # prompt tokens that were run
    reused: int = 0  # prompt tokens that need not be run, as pages held them already
    repeated: int = 0  # tokens that were run once more, since their pages were taken from a request
    drawn: int = 0  # tokens that were drawn and went to their reader
    wasted: int = 0  # tokens that were drawn after the end of their request, or for a cancelled one
    cancelled: int = 0  # requests that were cancelled
    drafted: int = 0  # guesses of tokens that were tried
    accepted: int = 0  # how many of them were right
    preempted: int = 0  # how often a request lost its slot and pages to older ones
