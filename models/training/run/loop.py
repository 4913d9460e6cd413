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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from spmd.launch import Unwatched, Watch
from spmd.models.training.errors import TrainingError
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.audit import check_copies, check_step
from spmd.models.training.run.metrics import StepCost, memory_in_use
from spmd.models.training.run.profile import Profiler
from spmd.models.training.run.sinks import Record, Sink
from spmd.models.training.run.step import StepMetrics, TrainStep

# Reads what steps computed, one step late, so that the devices do not wait for the host.

TYPICAL_OF = 1000
"""The time of a typical step is the median of this many of the last steps."""

NAMES = {"loss": "loss", "grad_norm": "gradient norm", "update_norm": "norm of the update"}
"""Metrics that have to be finite, and what they are called."""


@dataclasses.dataclass
class MetricsReader:
    """Reads the metrics of steps, one step late, and collects what an `Outcome` needs."""

    cost: StepCost
    max_skipped: int  # the most steps in a row that may be skipped; one more ends the run
    sinks: Sequence[Sink]
    watch: Watch  # gets a beat for each step whose metrics have arrived
    after_step: Callable[[Record], bool | None]  # called with each step's record
    ends: bool = False  # whether it has asked for the end of the run
    pending: tuple[int, int, int, StepMetrics] | None = None
    first: Record | None = None
    last: Record | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: collections.deque[float] = collections.deque(maxlen=TYPICAL_OF)

    def push(self, number: int, samples: int, rows: int, metrics: StepMetrics) -> None:
        """Reads the metrics of the step before, and keeps these for the next call."""
        self.flush()
        self.pending = number, samples, rows, metrics

    def flush(self) -> None:
        """Reads the metrics that are still to be read, if there are any."""
        if self.pending is None:
            return
        (number, samples, rows, arrays), self.pending = self.pending, None
        metrics = {name: float(value) for name, value in jax.device_get(arrays).items()}
        now = time.perf_counter()
        seconds, self.started = now - self.started, now
        self.watch.beat(step=number)
        record: Record = {"step": number, "samples": samples, "seconds": seconds, **metrics}
        record |= self.cost.rates(seconds, rows) | memory_in_use()
        self._keep(record)
        self.tell(record)
        self._check(record)
        self.ends |= bool(self.after_step(record))

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


class Best(NamedTuple):
    """The best evaluation of a run so far."""

    step: int
    eval_loss: float
    since: int = 0  # evaluations after it


class Saver(Protocol):
    """What the loop needs of checkpoints; `checkpoints.store.Checkpoints` has it."""

    def save(self, state: TrainState, notes: Mapping[str, Any]) -> None:
        """Begins to save, with notes beside the state; returns when that may be changed."""

    def poll(self) -> list[Record]:
        """Returns records of saves that have ended since the last call."""

    def finish(self) -> None:
        """Waits for the last save; raises an error if it failed."""


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
    # the parameters as evaluations and exports use them: `Hooks.eval_params` of the state's
    params: Any
    samples: int  # seen so far
    best: Best | None  # the best evaluation; None if there was none
    is_done: bool  # whether a hook or `patience` has ended the run before its last step


@dataclasses.dataclass
class Loop:
    """Takes steps until the end of the run, or until it is asked to stop.

    A step's metrics are read after the next step was dispatched, so that the devices do not wait
    for the host. Before an evaluation, a checkpoint and the end they are read at once.
    """

    step: TrainStep  # the (compiled) training step; may donate its first two arguments
    state: TrainState  # where to start. Do not use it afterwards if `step` donates.
    batches: Iterator[Any]  # iterates over the batches, beginning with that of the next step
    options: TrainerOptions  # say what happens after which step
    _: dataclasses.KW_ONLY
    cost: dataclasses.InitVar[StepCost]  # turns seconds into rates
    sinks: dataclasses.InitVar[Sequence[Sink]] = ()
    # parameters -> `loss` and other means over held-out batches
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    # the state -> the parameters that are evaluated
    eval_params: Callable[[TrainState], Any] = lambda state: state.params
    # called with the record of each step, one step late, and of each evaluation, with what was
    # evaluated; if one returns True, on all processes alike, the run ends
    after_step: Callable[[Record], bool | None] = lambda record: None
    after_eval: Callable[[Record, Any], bool | None] | None = None
    # as `step`, by other devices, to be compared with it at every `audit_every`-th step
    elsewhere: TrainStep | None = None
    trained: Callable[[Any], Any] = lambda params: params  # what checkpoints hold of parameters
    saver: Saver | None = None  # saves checkpoints, also before a stop
    profiler: Profiler = dataclasses.field(default_factory=lambda: Profiler(None))
    # called with the step's number, before the first step and after each. If it returns True, the
    # loop saves and ends.
    should_stop: Callable[[int], bool] = lambda step: False
    # gets a beat for each step whose metrics have arrived, and hears what takes longer
    watch: Watch = dataclasses.field(default_factory=Unwatched)
    samples: int = 0  # seen before the first step
    best: Best | None = None
    eval_loss: float | None = None
    is_stopped: bool = False
    is_done: bool = False

    def __post_init__(self, cost: StepCost, sinks: Sequence[Sink]) -> None:
        self.started = time.perf_counter()
        skips = self.options.max_skipped
        self.reader = MetricsReader(cost, skips, sinks, self.watch, self.after_step)
        self.saved = self.state.step if self.saver else 0  # the latest checkpoint's; 0 is none
        self.is_done = self._is_hopeless()

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
        ended = (self.eval_params(self.state), self.samples, self.best, self.is_done)
        return Outcome(self.state, *steps, seconds, reader.skipped, self.is_stopped, *ended)

    def _run(self) -> None:
        if not self._is_over():
            self._hear_stop()
        with self.profiler:
            if self.options.eval_first and not self._is_over() and self._evaluate():
                self._save()
            while not self._is_over():
                self._take_step()
            self.reader.flush()
            self._finish_saving()

    def _is_over(self) -> bool:
        return self.is_stopped or self.is_done or self._is_last()

    def _is_last(self) -> bool:
        return self.state.step >= self.options.steps

    def _is_due(self, every: int) -> bool:
        """Whether it is time for what is done every so many steps; with 0 at the end only."""
        is_turn = every > 0 and self.state.step % every == 0
        return self.is_done or self._is_last() or is_turn

    def _is_hopeless(self) -> bool:
        patience = self.options.patience
        return bool(patience and self.best is not None and self.best.since >= patience)

    def _hear_stop(self) -> None:
        """Asks whether to stop; after the last step there is nothing to stop."""
        self.is_stopped = self.should_stop(self.state.step) and not self._is_last()

    def _take_step(self) -> None:
        """A step, then signals, traces, records of saves, an evaluation, a save."""
        number = self.state.step + 1
        self.profiler.before(number)
        batch = next(self.batches)
        given = self.state.params, self.state.opt_state, batch
        again = None
        if self.elsewhere is not None and number % self.options.audit_every == 0:
            self.reader.flush()  # so that the step before is not as slow as this one
            with self.watch.may_take("computing a step by other devices"):
                again = self.elsewhere(*given)
        params, opt_state, metrics = self.step(*given)
        if again is not None:
            check_step((params, opt_state, metrics), again, number)
        self.state = TrainState(params, opt_state, number)
        rows = max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.shape(leaf)), default=0)
        self.samples += rows
        self.reader.push(number, self.samples, rows, metrics)
        self.is_done |= self.reader.ends
        self._hear_stop()
        if self.profiler.ends_with(number):
            self.reader.flush()
            self.profiler.stop()
        if self.saver is not None:
            self.reader.tell(*self.saver.poll())
        if self._is_due(self.options.audit_every):
            self._audit()
        is_best = False
        if self._is_due(self.options.eval_every) and not self.is_stopped:
            is_best = self._evaluate()
        if self._is_due(self.options.save_every) or self.is_stopped or is_best:
            self._save()

    def _evaluate(self) -> bool:
        """Evaluates; whether the state is to be kept as the best so far."""
        if self.evaluate is None and self.after_eval is None:
            return False
        self.reader.flush()
        record: Record = {"step": self.state.step, "samples": self.samples}
        is_best = False
        with self.watch.may_take("evaluating"):
            params = self.eval_params(self.state)
            if self.evaluate is not None:
                means = self.evaluate(params)
                record |= {f"eval_{name}": x for name, x in means.items()}
                self.eval_loss = means["loss"]
                is_best = self.best is None or self.eval_loss < self.best.eval_loss
                self.reader.tell(record)
            if is_best and self.eval_loss is not None:
                self.best = Best(self.state.step, self.eval_loss)
            elif self.best is not None:
                self.best = self.best._replace(since=self.best.since + 1)
            ends = self.after_eval is not None and self.after_eval(record, params)
        self.is_done |= bool(ends) or self.reader.ends or self._is_hopeless()
        self.reader.restart_clock()
        return is_best and self.options.keep_best

    def _audit(self) -> None:
        self.reader.flush()
        if self.options.audit_every:
            check_copies(self.state.params, self.state.opt_state, self.state.step)
            self.reader.restart_clock()

    def _save(self) -> None:
        if self.saver is None:
            return
        self._audit()
        for sink in self.reader.sinks:  # a resumed run does not take the steps before again
            sink.flush()
        with self.watch.may_take("saving"):
            state = dataclasses.replace(self.state, params=self.trained(self.state.params))
            notes = {"samples": self.samples, "best": self.best and self.best._asdict()}
            self.saver.save(state, notes)
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
