"""The training loop: takes steps, and decides what happens after which step.

    step 1 dispatched
    step 2 dispatched, then the metrics of step 1 are read
    step 3 dispatched, then the metrics of step 2 are read

Reading metrics waits for the device. One step late, the device has its next step by then.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from models.training.run.metrics import StepCost, memory_in_use
from models.training.run.profile import Profiler
from models.training.run.sinks import Record, Sink
from models.training.run.step import StepMetrics, TrainStep
from spmd.launch import Unwatched, Watch

TYPICAL_OF = 1000
"""The time of a typical step is the median of this many of the last steps."""


class TrainingError(RuntimeError):
    """A run that cannot go on: loss or gradients are not finite."""


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
    """What happens after which step.

    Args:
        steps: total number of steps, counted from the very first.
        eval_every: steps between evaluations; 0 evaluates at the end only.
        save_every: steps between checkpoints; 0 saves at the end only.
        evaluates_first: whether to evaluate before the first step that is taken.
        max_skipped: the most steps in a row that may be skipped; one more ends the run.
    """

    steps: int
    eval_every: int = 0
    save_every: int = 0
    evaluates_first: bool = False
    max_skipped: int = 10

    def is_last(self, step: int) -> bool:
        """Whether this is the last step of the run, or beyond it."""
        return step >= self.steps

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate after this step."""
        return self.is_last(step) or bool(self.eval_every and step % self.eval_every == 0)

    def saves_after(self, step: int) -> bool:
        """Whether to save after this step."""
        return self.is_last(step) or bool(self.save_every and step % self.save_every == 0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        state: after the last step.
        first: the record of the first step; None if no step was taken.
        last: the record of the last step; None if no step was taken.
        eval_loss: the loss of the last evaluation; None if there was none.
        typical_seconds: median time of a step, without the first one, which may compile.
        seconds: time of the whole run.
        skipped: number of steps that changed nothing because something was not finite.
        is_stopped: whether the run was asked to stop before its last step.
    """

    state: TrainState
    first: Record | None
    last: Record | None
    eval_loss: float | None
    typical_seconds: float | None
    seconds: float
    skipped: int
    is_stopped: bool


def train(
    step: TrainStep,
    state: TrainState,
    batches: Iterator[Any],
    schedule: Schedule,
    *,
    cost: StepCost,
    sinks: Sequence[Sink] = (),
    evaluate: Callable[[Any], float] | None = None,
    saver: Saver | None = None,
    profiler: Profiler | None = None,
    should_stop: Callable[[int], bool] = lambda step: False,
    watch: Watch | None = None,
) -> Outcome:
    """Takes steps until the schedule's end, or until it is asked to stop.

    A step's metrics are read after the next step was dispatched, so that the devices do not wait
    for the host. Before an evaluation, a checkpoint and the end they are read at once.

    Args:
        step: the (compiled) training step; may donate its first two arguments.
        state: where to start. Do not use it afterwards if `step` donates.
        batches: iterates over the batches, beginning with that of the next step.
        schedule: what happens after which step.
        cost: turns seconds into rates.
        sinks: get the records.
        evaluate: parameters -> held-out loss.
        saver: saves checkpoints, also before a stop.
        profiler: traces some steps.
        should_stop: called with the step's number, before the first step and after each. If it
            returns True, the loop saves and ends.
        watch: gets a beat for each step whose metrics have arrived, and hears what takes longer.

    Returns:
        The state after the last step, and what the steps were like.

    Raises:
        TrainingError: loss or gradients are not finite, and steps may not be skipped, or too many
            were skipped.
    """
    started = time.perf_counter()
    watch = Unwatched() if watch is None else watch
    reader = _Reader(cost, schedule, sinks, watch)
    profiler = profiler or Profiler(None)
    is_stopped = not schedule.is_last(state.step) and should_stop(state.step)
    eval_loss: float | None = None

    def evaluated() -> float | None:
        if evaluate is None:
            return None
        reader.flush()
        with watch.may_take("evaluating"):
            loss = evaluate(state.params)
        _tell(sinks, {"step": state.step, "eval_loss": loss})
        reader.restart_clock()
        return loss

    with profiler:
        if schedule.evaluates_first and not (is_stopped or schedule.is_last(state.step)):
            eval_loss = evaluated()
        while not schedule.is_last(state.step) and not is_stopped:
            profiler.before(state.step + 1)
            params, opt_state, metrics = step(state.params, state.opt_state, next(batches))
            state = TrainState(params, opt_state, state.step + 1)
            reader.push(state.step, metrics)
            is_stopped = should_stop(state.step) and not schedule.is_last(state.step)
            if profiler.ends_with(state.step):
                reader.flush()
                profiler.after(state.step)
            if saver is not None:
                _tell(sinks, *saver.poll())
            if schedule.evaluates_after(state.step) and not is_stopped:
                eval_loss = evaluated()
            if saver is not None and (schedule.saves_after(state.step) or is_stopped):
                reader.flush()
                for sink in sinks:  # a resumed run does not take the steps before again
                    sink.flush()
                with watch.may_take("saving"):
                    saver.save(state)
                reader.restart_clock()
        reader.flush()
        if saver is not None:
            try:
                with watch.may_take("waiting for the last save"):
                    saver.finish()
            finally:  # the record of the last save, even if it failed
                _tell(sinks, *saver.poll())
    seconds = time.perf_counter() - started
    return reader.outcome(state, seconds, eval_loss, is_stopped)


def _tell(sinks: Sequence[Sink], *records: Record) -> None:
    for record in records:
        for sink in sinks:
            sink.write(record)


class _Reader:
    """Reads the metrics of steps, one step late, and collects what an `Outcome` needs."""

    def __init__(
        self,
        cost: StepCost,
        schedule: Schedule,
        sinks: Sequence[Sink],
        watch: Watch,
    ) -> None:
        self.cost, self.schedule, self.sinks, self.watch = cost, schedule, sinks, watch
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
        _tell(self.sinks, record)
        self._check(record)

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
        if self.skipped_in_a_row > self.schedule.max_skipped:
            raise TrainingError(
                f"the {name} of step {number} is {record[bad[0]]}, and so it was in the "
                f"{self.schedule.max_skipped} steps before, all skipped; {advice}"
            )

    def outcome(
        self, state: TrainState, seconds: float, eval_loss: float | None, is_stopped: bool
    ) -> Outcome:
        typical = statistics.median(self.seconds) if self.seconds else None
        return Outcome(
            state, self.first, self.last, eval_loss, typical, seconds, self.skipped, is_stopped
        )
