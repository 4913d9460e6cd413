"""Reads what steps computed, one step late, so that the devices do not wait for the host."""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Sequence

import jax

from models.training.errors import TrainingError
from models.training.run.metrics import StepCost, memory_in_use
from models.training.run.sinks import Record, Sink
from models.training.run.step import StepMetrics
from spmd.launch import Watch

TYPICAL_OF = 1000
"""The time of a typical step is the median of this many of the last steps."""


class MetricsReader:
    """Reads the metrics of steps, one step late, and collects what an `Outcome` needs.

    Args:
        max_skipped: the most steps in a row that may be skipped; one more ends the run.
        watch: gets a beat for each step whose metrics have arrived.
    """

    def __init__(
        self,
        cost: StepCost,
        max_skipped: int,
        sinks: Sequence[Sink],
        watch: Watch,
    ) -> None:
        self.cost, self.max_skipped, self.sinks, self.watch = cost, max_skipped, sinks, watch
        self.pending: tuple[int, StepMetrics] | None = None
        self.started = time.perf_counter()
        self.first: Record | None = None
        self.last: Record | None = None
        self.seconds: collections.deque[float] = collections.deque(maxlen=TYPICAL_OF)
        self.skipped = self.skipped_in_a_row = 0

    def push(self, number: int, metrics: StepMetrics) -> None:
        """Reads the metrics of the step before, and keeps these for the next call."""
        self.flush()
        self.pending = number, metrics

    def flush(self) -> None:
        """Reads the metrics that are still to be read, if there are any."""
        if self.pending is None:
            return
        (number, arrays), self.pending = self.pending, None
        metrics = {name: float(value) for name, value in jax.device_get(arrays).items()}
        now = time.perf_counter()
        seconds, self.started = now - self.started, now
        self.watch.beat(step=number)
        record: Record = {"step": number, "seconds": seconds, **metrics}
        record |= self.cost.rates(seconds) | memory_in_use()
        self._keep(record)
        self.tell(record)
        self._check(record)

    def tell(self, *records: Record) -> None:
        """Hands records to all sinks."""
        for record in records:
            for sink in self.sinks:
                sink.write(record)

    @property
    def typical_seconds(self) -> float | None:
        """The median time of the last steps, without the first one; None if no step was taken."""
        return statistics.median(self.seconds) if self.seconds else None

    def restart_clock(self) -> None:
        """Leaves the time since the last step (an evaluation, a save) out of the next step's."""
        self.started = time.perf_counter()

    def _keep(self, record: Record) -> None:
        if self.first is None:
            self.first = record
        elif self.last is self.first:
            self.seconds.clear()  # the first step's seconds are not like the others'
        self.last = record
        self.seconds.append(record["seconds"])

    def _check(self, record: Record) -> None:
        number = int(record["step"])
        bad = [n for n in ("loss", "grad_norm") if not math.isfinite(record.get(n, 0.0))]
        if not bad:
            self.skipped_in_a_row = 0
            return
        name = "loss" if bad[0] == "loss" else "gradient norm"
        advice = "a lower learning rate, a longer warmup or clipping may help"
        if "skipped" not in record:
            raise TrainingError(f"the {name} of step {number} is {record[bad[0]]}; {advice}")
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.max_skipped:
            raise TrainingError(
                f"the {name} of step {number} is {record[bad[0]]}, and so it was in the "
                f"{self.max_skipped} steps before, all skipped; {advice}"
            )
