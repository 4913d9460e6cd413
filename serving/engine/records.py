"""What the engine reports about itself: requests' times, device time, and its present state."""

from typing import NamedTuple, Protocol

from spmd.serving.engine.actions import Counts, EngineStep


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


class Observer(Protocol):
    """Is told what the engine does, on the engine's threads; the server's metrics are one."""

    def ran(self, step: EngineStep, seconds: float) -> None:
        """A step is done, `seconds` after the device began it."""

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""

    def next_tokens(self, seconds: float, times: int) -> None:
        """So many requests got another token each, `seconds` after the one before."""

    def finished(self, record: Finished) -> None:
        """A request has ended."""


class _Unobserved:
    def ran(self, step: EngineStep, seconds: float) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def next_tokens(self, seconds: float, times: int) -> None: ...
    def finished(self, record: Finished) -> None: ...


UNOBSERVED: Observer = _Unobserved()
"""Is told and does nothing."""


class EngineState(NamedTuple):
    """What the engine has to do at this moment."""

    waiting: int  # requests without a slot
    running: int  # requests with a slot
    pages: int  # how many there are, over all groups
    held: int  # pages of running requests
    cached: int  # pages whose tokens are known, but that nobody holds
    counts: Counts  # totals since the start
