"""What a model has done since the start: requests, calls, rows, and their times."""

import dataclasses
import threading
import time
from typing import Any

from spmd.serving.engine.records import Finished


@dataclasses.dataclass
class Tally:
    """How often something happened, and how long it took altogether, in seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Notes that it happened once more."""
        self.count += 1
        self.seconds += seconds


@dataclasses.dataclass(eq=False)
class Statistics:
    """Totals, which `/metrics` and KServe's statistics show."""

    # success, fail: requests by their ends, from their arrival on
    success: Tally = dataclasses.field(default_factory=Tally)
    fail: Tally = dataclasses.field(default_factory=Tally)
    queue: Tally = dataclasses.field(default_factory=Tally)  # how long they waited for the model
    # how long the model had them; calls of several requests count for each
    infer: Tally = dataclasses.field(default_factory=Tally)
    calls: Tally = dataclasses.field(default_factory=Tally)  # of a model of tensors
    # the same by their rows, without those that were padding
    batches: dict[int, Tally] = dataclasses.field(default_factory=dict)
    rows: int = 0  # of all calls that succeeded
    last_ms: int = 0  # when the last request ended, in milliseconds since 1970; 0 if none has
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    def finished(self, record: Finished) -> None:
        """Notes the end of a request; one whose client has left counts as failed."""
        with self._lock:
            if record.reason in ("abort", "grammar", "error"):
                self.fail.add(record.total)
                return
            self.success.add(record.total)
            self.queue.add(record.queued)
            self.infer.add(record.total - record.queued)
            self.last_ms = round(time.time() * 1000)

    def called(self, rows: int, seconds: float) -> None:
        """Notes a call of the model."""
        with self._lock:
            self.calls.add(seconds)
            self.batches.setdefault(rows, Tally()).add(seconds)
            self.rows += rows
