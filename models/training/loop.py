"""The training step and the loop around it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models.training.metrics import StepCost

StepMetrics = dict[str, jax.Array]
TrainStep = Callable[[Any, Any, Any], tuple[Any, Any, StepMetrics]]
"""(params, opt_state, batch) -> (params, opt_state, metrics)."""

Record = dict[str, float]
"""Of one step: `step`, `seconds`, the step's metrics, and the rates of `StepCost`."""


class TrainingError(RuntimeError):
    """A run that has gone wrong beyond recovery."""


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and the number of steps that have been taken."""

    params: Any
    opt_state: Any
    step: int = 0


def make_train_step(
    loss_fn: Callable[[Any, Any], jax.Array], optimizer: optax.GradientTransformation
) -> TrainStep:
    """The single-device step that minimizes `loss_fn(params, batch)`.

    Its metrics are `loss` and `grad_norm` (before clipping), both from before the update.
    """

    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, StepMetrics]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    return train_step


def train(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Any],
    *,
    steps: int,
    cost: StepCost,
    console: Console | None = None,
    log_every: int = 10,
    jsonl: Path | None = None,
) -> tuple[TrainState, list[Record]]:
    """Take steps until `steps` of them have been taken, counted from the very first.

    The numbers of a step are read once the next one has been dispatched, so that devices do not
    wait for the host.

    Args:
        step: the (compiled) training step; may donate its first two arguments.
        state: where to start. Do not use it afterwards if `step` donates.
        batches: step number -> batch.
        steps: total number of steps.
        cost: turns seconds into rates.
        console: where progress goes; None is standard output.
        log_every: steps between lines of progress.
        jsonl: a file to which the record of every step is appended, one JSON object a line.

    Returns:
        The state after the last step and one record for each step taken. The first one's seconds
        include what compilation was left to do.

    Raises:
        TrainingError: the loss is not finite.
    """
    console = console or Console()
    records: list[Record] = []
    with _progress(console, steps, state.step) as show, _appending(jsonl) as log:
        for record, reached in _steps(step, state, batches, steps, cost):
            state = reached
            records.append(record)
            show(record)
            if log is not None:
                print(json.dumps(record), file=log, flush=True)
            number = int(record["step"])
            if number % log_every == 0 or number in (1, steps):
                console.print(describe(record, steps), highlight=False)
    return state, records


def _steps(
    step: TrainStep,
    state: TrainState,
    batches: Callable[[int], Any],
    steps: int,
    cost: StepCost,
) -> Iterator[tuple[Record, TrainState]]:
    """(record, state) of each step, one step late: the state may be ahead of the record."""
    started = time.perf_counter()
    pending: StepMetrics | None = None
    while state.step < steps or pending is not None:
        ready, pending, number = pending, None, state.step
        if state.step < steps:
            params, opt_state, pending = step(state.params, state.opt_state, batches(state.step))
            state = TrainState(params, opt_state, state.step + 1)
        if ready is None:
            continue
        metrics = {name: float(value) for name, value in ready.items()}
        now = time.perf_counter()
        yield _record(number, now - started, metrics, cost), state
        started = now


def _record(number: int, seconds: float, metrics: Record, cost: StepCost) -> Record:
    if not math.isfinite(metrics["loss"]):
        raise TrainingError(
            f"the loss of step {number} is {metrics['loss']}; a lower learning rate, a longer "
            "warmup or clipping may help"
        )
    return {"step": number, "seconds": seconds, **metrics, **cost.rates(seconds)}


def describe(record: Record, steps: int) -> str:
    """One line on one step."""
    text = f"step {record['step']:>5}/{steps}  loss {record['loss']:.3f}"
    text += f"  grad norm {record['grad_norm']:.2f}  {record['tokens_per_s']:,.0f} tokens/s"
    for name, value in record.items():
        if name.startswith("mfu_"):
            text += f"  MFU {value:.1%} ({name.removeprefix('mfu_')})"
    return text


def typical_seconds(records: list[Record]) -> float:
    """Median seconds of a step, leaving out the first if there are others."""
    return statistics.median(record["seconds"] for record in records[1:] or records)


@contextlib.contextmanager
def _progress(console: Console, steps: int, done: int) -> Iterator[Callable[[Record], None]]:
    """A bar on a terminal; nothing where output is kept."""
    if not console.is_terminal:
        yield lambda record: None
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps, completed=done, loss=math.nan, rate=0.0)
        yield lambda record: bar.update(
            task,
            completed=int(record["step"]),
            loss=record["loss"],
            rate=record["tokens_per_s"],
        )


@contextlib.contextmanager
def _appending(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    with path.open("a") as file:
        yield file
