"""What a model has done since the start: requests, calls, rows, and their times."""

import threading
import time

from spmd.serving.engine.records import Finished


class Tally:
    """How often something happened, and how long it took altogether, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Notes that it happened once more."""
        self.count += 1
        self.seconds += seconds


class Statistics:
    """Totals, which `/metrics` and KServe's statistics show.

    Attributes:
      success, fail: requests by their ends, from their arrival on.
      queue: how long requests waited for the model.
      infer: how long the model had them; calls of several requests count for each.
      calls: calls of a model of tensors.
      batches: the same by their rows, without those that were padding.
      rows: of all calls that succeeded.
      last_ms: when the last request ended, in milliseconds since 1970; 0 if there was none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.success, self.fail, self.queue, self.infer = Tally(), Tally(), Tally(), Tally()
        self.calls = Tally()
        self.batches: dict[int, Tally] = {}
        self.rows = 0
        self.last_ms = 0

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
