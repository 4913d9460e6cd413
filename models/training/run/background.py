"""Sinks on threads of their own: a disk that is full, slow or gone never stops or slows a run."""

import collections
import contextlib
import sys
import threading
from collections.abc import Callable

from spmd.models.training.run.sinks import Record, Sink

KEPT = 10_000
"""So many records wait for a disk that takes none; of more the oldest are lost."""

RETRY_S = 5.0
"""Seconds between attempts."""

FLUSH_S = 1.0
CLOSE_S = 10.0


class Background:
    """Hands records to a sink on a thread of its own.

    If the sink raises `OSError`, the record waits and is written again later. What happens is said
    once, on standard error, and once more when records are written again.

    Args:
        name: what the sink writes, for messages.
        open_sink: makes the sink; called on the thread, at the first record.

    Example:
        >>> sink = Background("metrics.jsonl", lambda: JsonLines(path))
        >>> sink.write({"step": 1, "loss": 2.0})  # returns at once, whatever the disk does
    """

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name, self._open = name, open_sink
        self._sink: Sink | None = None
        self._waiting: collections.deque[Record] = collections.deque()
        self._change = threading.Condition()
        self._problem: str | None = None
        self._lost = self._failed = 0
        self._is_hurried = self._is_closing = self._is_stuck = False
        self._thread = threading.Thread(target=self._run, name=f"{name} sink", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Takes a record; returns at once."""
        with self._change:
            if len(self._waiting) >= KEPT:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(record)
            self._change.notify_all()

    def flush(self) -> None:
        """Waits a moment for what was taken to be written; a full disk is tried once more."""
        with self._change:
            if self._is_stuck:  # it did not answer the last time, and has not since
                return
            failed, self._is_hurried = self._failed, True
            self._change.notify_all()
            self._is_stuck = not self._change.wait_for(
                lambda: not self._waiting or self._failed > failed, FLUSH_S
            )

    def close(self) -> None:
        """Waits some seconds for the rest; what a disk does not take by then is lost, and said."""
        with self._change:
            self._is_closing = True
            self._change.notify_all()
        self._thread.join(CLOSE_S)
        with self._change:
            lost = self._lost + len(self._waiting)
        if lost:
            say(self.name, f"{lost} records were lost ({self._problem or 'the disk is too slow'})")

    # The thread.

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting) or self._is_closing)
                if not self._waiting:
                    break
                self._is_hurried = False
                record = self._waiting[0]
            is_written = self._is_written(record)
            self._is_stuck = False
            if is_written:
                with self._change:
                    # Meanwhile it may have been dropped for want of room.
                    if self._waiting and self._waiting[0] is record:
                        self._waiting.popleft()
                    self._change.notify_all()
            elif self._is_closing:
                break
            else:
                with self._change:
                    self._change.wait_for(lambda: self._is_closing or self._is_hurried, RETRY_S)
        if self._sink is not None:
            with contextlib.suppress(OSError):
                self._sink.close()

    def _is_written(self, record: Record) -> bool:
        try:
            if self._sink is None:
                self._sink = self._open()
            self._sink.write(record)
        except OSError as error:
            reason = error.strerror or str(error)
            if self._problem is None:
                say(self.name, f"{reason}; training goes on, and records wait")
            with self._change:
                self._problem = reason
                self._failed += 1
                self._change.notify_all()
            return False
        if self._problem is not None:
            self._problem = None
            lost = f", {self._lost} records were lost" if self._lost else ""
            say(self.name, f"written again{lost}")
            self._lost = 0
        return True


def say(who: object, text: str) -> None:
    """Says what happens to a run's files, on standard error, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"{who}: {text}", file=sys.stderr, flush=True)
