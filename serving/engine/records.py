"""What the engine reports about itself: requests' times, device time, and its present state."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from serving.engine.actions import Counts, EngineStep


class Finished(NamedTuple):
    """A request that has ended; all times are in seconds.

    Attributes:
      choice: the number of the completion, among those asked for together.
      reason: `stop`, `length`, `error`, `grammar` if what it asked for left no token to draw, or
        `abort` if its reader went away.
      prompt_tokens: tokens of the prompt.
      generated: tokens that were drawn for it.
      queued: from its arrival until it got a slot, or until its end if it never got one.
      prefill: from there until its first token.
      decode: from there until its last token.
      total: from its arrival until its end.
      ended: when it ended, by `time.monotonic`.
    """

    choice: int
    reason: str
    prompt_tokens: int
    generated: int
    queued: float
    prefill: float
    decode: float
    total: float
    ended: float


class Observer(Protocol):
    """Is told what the engine does, on the engine's threads; the server's metrics are one."""

    def ran(self, step: EngineStep, seconds: float) -> None:
        """A step is done, `seconds` after the device began it."""

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""

    def next_token(self, seconds: float) -> None:
        """A request got another token, `seconds` after the one before."""

    def finished(self, record: Finished) -> None:
        """A request has ended."""


class EngineState(NamedTuple):
    """What the engine has to do at this moment.

    Attributes:
      waiting: requests without a slot.
      running: requests with a slot.
      pages: how many there are, over all groups.
      held: pages of running requests.
      cached: pages whose tokens are known, but that nobody holds.
      counts: totals since the start.
    """

    waiting: int
    running: int
    pages: int
    held: int
    cached: int
    counts: Counts
