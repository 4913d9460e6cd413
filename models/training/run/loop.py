"""The training loop: takes steps, and decides what happens after which step.

    step 1 dispatched
    step 2 dispatched, then the metrics of step 1 are read
    step 3 dispatched, then the metrics of step 2 are read

Reading metrics waits for the device. One step late, the device has its next step by then.
"""

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from spmd.launch import Unwatched, Watch
from spmd.models.training.errors import TrainingError
from spmd.models.training.run.audit import check_copies
from spmd.models.training.run.metrics import StepCost, memory_in_use
from spmd.models.training.run.profile import Profiler
from spmd.models.training.run.sinks import Record, Sink
from spmd.models.training.run.step import StepMetrics, TrainStep

# Reads what steps computed, one step late, so that the devices do not wait for the host.


TYPICAL_OF = 1000
"""The time of a typical step is the median of this many of the last steps."""


NAMES = {"loss": "loss", "grad_norm": "gradient norm", "update_norm": "norm of the update"}
"""Metrics that have to be finite, and what they are called."""


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
        bad = [n for n in NAMES if not math.isfinite(record.get(n, 0.0))]
        if not bad:
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        also = ""
        if "skipped" in record:
            if self.skipped_in_a_row <= self.max_skipped:
                return
            also = f", and so it was in the {self.max_skipped} steps before, all skipped"
        raise TrainingError(
            f"the {NAMES[bad[0]]} of step {number} is {record[bad[0]]}{also}; a lower learning "
            "rate, a longer warmup or clipping may help"
        )


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and how many steps have been taken."""

    params: Any
    opt_state: Any
    step: int = 0


class Saver(Protocol):
    """What the loop needs of checkpoints; `checkpoints.store.Checkpoints` has it."""

    def save(self, state: TrainState) -> None:
        """Begins to save; returns when the state may be changed."""

    def poll(self) -> list[Record]:
        """Returns records of saves that have ended since the last call."""

    def finish(self) -> None:
        """Waits for the last save; raises an error if it failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """What happens after which step."""

    steps: int  # total number of steps, counted from the very first
    eval_every: int = 0  # steps between evaluations; 0 evaluates at the end only
    save_every: int = 0  # steps between checkpoints; 0 saves at the end only
    audit_every: int = 0  # steps between comparisons of copies, also before saves; 0 makes none
    evaluates_first: bool = False  # whether to evaluate before the first step that is taken
    max_skipped: int = 10  # the most steps in a row that may be skipped; one more ends the run

    def is_last(self, step: int) -> bool:
        """Whether this is the last step of the run, or beyond it."""
        return step >= self.steps

    def is_due(self, step: int, every: int) -> bool:
        """Whether it is time for what is done every so many steps; with 0 at the end only."""
        return self.is_last(step) or (every > 0 and step % every == 0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: TrainState  # after the last step
    first: Record | None  # the record of the first step; None if no step was taken
    last: Record | None  # the record of the last step; None if no step was taken
    eval_loss: float | None  # the loss of the last evaluation; None if there was none
    typical_seconds: float | None  # median time of a step, without the first one, which may compile
    seconds: float  # time of the whole run
    skipped: int  # number of steps that changed nothing because something was not finite
    is_stopped: bool  # whether the run was asked to stop before its last step


@dataclasses.dataclass
class Loop:
    """Takes steps until the schedule's end, or until it is asked to stop.

    A step's metrics are read after the next step was dispatched, so that the devices do not wait
    for the host. Before an evaluation, a checkpoint and the end they are read at once.
    """

    step: TrainStep  # the (compiled) training step; may donate its first two arguments
    state: TrainState  # where to start. Do not use it afterwards if `step` donates.
    batches: Iterator[Any]  # iterates over the batches, beginning with that of the next step
    schedule: Schedule  # what happens after which step
    _: dataclasses.KW_ONLY
    cost: dataclasses.InitVar[StepCost]  # turns seconds into rates
    sinks: dataclasses.InitVar[Sequence[Sink]] = ()
    evaluate: Callable[[Any], float] | None = None  # parameters -> held-out loss
    saver: Saver | None = None  # saves checkpoints, also before a stop
    profiler: Profiler = dataclasses.field(default_factory=lambda: Profiler(None))
    # called with the step's number, before the first step and after each. If it returns True, the
    # loop saves and ends.
    should_stop: Callable[[int], bool] = lambda step: False
    # gets a beat for each step whose metrics have arrived, and hears what takes longer
    watch: Watch = dataclasses.field(default_factory=Unwatched)
    eval_loss: float | None = None
    is_stopped: bool = False

    def __post_init__(self, cost: StepCost, sinks: Sequence[Sink]) -> None:
        self.started = time.perf_counter()
        self.reader = MetricsReader(cost, self.schedule.max_skipped, sinks, self.watch)
        self.saved = self.state.step if self.saver else 0  # the latest checkpoint's; 0 is none

    def run(self) -> Outcome:
        """Returns the state after the last step, and what the steps were like.

        Raises:
            TrainingError: loss, gradients or an update are not finite, and steps may not be
                skipped, or too many were skipped.
        """
        try:
            self._run()
        except TrainingError as error:
            good = f"; the last good state is the checkpoint of step {self.saved}"
            raise TrainingError(f"{error}{good if self.saved else ''}") from None
        reader, seconds = self.reader, time.perf_counter() - self.started
        steps = (reader.first, reader.last, self.eval_loss, reader.typical_seconds)
        return Outcome(self.state, *steps, seconds, reader.skipped, self.is_stopped)

    def _run(self) -> None:
        if not self._is_over():
            self._hear_stop()
        with self.profiler:
            if self.schedule.evaluates_first and not self._is_over():
                self._evaluate()
            while not self._is_over():
                self._take_step()
            self.reader.flush()
            self._finish_saving()

    def _is_over(self) -> bool:
        return self.is_stopped or self.schedule.is_last(self.state.step)

    def _hear_stop(self) -> None:
        """Asks whether to stop; after the last step there is nothing to stop."""
        number = self.state.step
        self.is_stopped = self.should_stop(number) and not self.schedule.is_last(number)

    def _take_step(self) -> None:
        """A step, then signals, traces, records of saves, an evaluation, a save."""
        number = self.state.step + 1
        self.profiler.before(number)
        batch = next(self.batches)
        params, opt_state, metrics = self.step(self.state.params, self.state.opt_state, batch)
        self.state = TrainState(params, opt_state, number)
        self.reader.push(number, metrics)
        self._hear_stop()
        if self.profiler.ends_with(number):
            self.reader.flush()
            self.profiler.after(number)
        if self.saver is not None:
            self.reader.tell(*self.saver.poll())
        if self.schedule.is_due(number, self.schedule.audit_every):
            self._audit()
        if self.schedule.is_due(number, self.schedule.eval_every) and not self.is_stopped:
            self._evaluate()
        if self.schedule.is_due(number, self.schedule.save_every) or self.is_stopped:
            self._save()

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        self.reader.flush()
        with self.watch.may_take("evaluating"):
            self.eval_loss = self.evaluate(self.state.params)
        self.reader.tell({"step": self.state.step, "eval_loss": self.eval_loss})
        self.reader.restart_clock()

    def _audit(self) -> None:
        self.reader.flush()
        if self.schedule.audit_every:
            check_copies(self.state.params, self.state.opt_state, self.state.step)
            self.reader.restart_clock()

    def _save(self) -> None:
        if self.saver is None:
            return
        self._audit()
        for sink in self.reader.sinks:  # a resumed run does not take the steps before again
            sink.flush()
        with self.watch.may_take("saving"):
            self.saver.save(self.state)
        self.saved = self.state.step
        self.reader.restart_clock()

    def _finish_saving(self) -> None:
        if self.saver is None:
            return
        try:
            with self.watch.may_take("waiting for the last save"):
                self.saver.finish()
        finally:  # the record of the last save, even if it failed
            self.reader.tell(*self.saver.poll())
