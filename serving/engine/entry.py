"""What the engine knows of one completion while it works on it."""

from __future__ import annotations

from serving.engine.choice import Choice
from serving.engine.records import Finished, Observer
from serving.engine.stream import Stream


class Entry:
    """A completion that the engine works on: its text so far, its reader, and its times."""

    def __init__(self, choice: Choice, stream: Stream, now: float) -> None:
        self.choice = choice
        self.stream = stream
        self._arrived = now
        self._placed: float | None = None
        self._first: float | None = None
        self._last = now

    def note_placed(self, now: float) -> None:
        """Notes when it got its slot; later calls change nothing."""
        if self._placed is None:
            self._placed = now

    def note_token(self, now: float, observer: Observer) -> None:
        """Tells an observer of a token that has come."""
        if self._first is None:
            self._first = now
            observer.first_token(now - self._arrived)
        else:
            observer.next_token(now - self._last)
        self._last = now

    def finished(self, reason: str, now: float) -> Finished:
        """The record of it, at its end."""
        placed = now if self._placed is None else self._placed
        first = now if self._first is None else self._first
        return Finished(
            self.choice.index,
            reason,
            len(self.choice.job.prompt),
            self.choice.generated,
            queued=placed - self._arrived,
            prefill=first - placed,
            decode=now - first,
            total=now - self._arrived,
            ended=now,
        )
