"""What the engine reports about itself: requests' times, its steps, and its present state."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from spmd.serving.engine.actions import Counts


@dataclasses.dataclass(slots=True)
class StepRecord:
    """A step that is done; times are in seconds, by `time.monotonic`."""

    begun: float  # when the device could begin it
    done: float  # when its results were on the host
    waited: float  # how long the engine's thread waited for them
    gap: float  # before it, how long requests ran and no step was under way
    rows: int  # how many it had, all requests together
    padded: int  # how many rows beside these the device ran
    seen: int  # positions that the last rows of its parts see, all together
    keys: Sequence[int]  # the requests that took part
    # request -> (rows, whether a token is drawn behind them), of pieces of prompts
    chunks: dict[int, tuple[int, bool]]
    told: float = math.inf  # when the text of its tokens was handed out
    placed: Sequence[tuple[int, int]] = ()  # as of `EngineStep`
    chosen: float = 0.0  # when the engine began it, behind steps that were under way


class Finished(NamedTuple):
    """A request that has ended; all times are in seconds."""

    choice: int  # the number of the completion, among those asked for together
    # `stop`, `length`, `error`, `grammar` if what it asked for left no token to draw, or `abort` if
    # its reader went away
    reason: str
    prompt_tokens: int
    generated: int  # tokens that were drawn for it
    queued: float  # from its arrival until it got a slot, or until its end if it never got one
    prefill: float  # from there until its first token
    decode: float  # from there until its last token
    total: float  # from its arrival until its end
    ended: float  # when it ended, by `time.monotonic`
    # the last parts of `prefill`: the step that drew the first token, and the making of its text
    step: float = 0.0
    text: float = 0.0
    guided: bool = False  # whether it waits for a mask before each token


class Observer:
    """Is told what the engine does, on the engine's threads; this one does nothing."""

    def ran(self, step: StepRecord) -> None:
        """A step is done; its text is not made yet."""

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""

    def next_tokens(self, seconds: float, times: int) -> None:
        """So many requests got another token each, `seconds` after the one before."""

    def finished(self, record: Finished) -> None:
        """A request has ended."""


UNOBSERVED = Observer()


class EngineState(NamedTuple):
    """What the engine has to do at this moment."""

    waiting: int  # requests without a slot
    running: int  # requests with a slot
    pages: int  # how many there are, over all groups
    held: int  # pages of running requests
    cached: int  # pages whose tokens are known, but that nobody holds
    counts: Counts  # totals since the start
