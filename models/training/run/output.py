"""What a run says, and the files that it writes for people: its numbers, and its end."""

import functools
from collections.abc import Iterator
from typing import IO, cast

from rich.console import Console

from spmd import launch
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.background import Background
from spmd.models.training.run.description import RunFolder
from spmd.models.training.run.loop import Outcome
from spmd.models.training.run.metrics import StepCost
from spmd.models.training.run.sinks import Forgiving, JsonLines, Sinks, TensorBoard, Terminal


def make_console() -> Console:
    """Where a run prints; process 0 alone does."""
    return Console(
        file=cast(IO[str], Forgiving()),
        markup=False,
        highlight=False,
        soft_wrap=True,
        quiet=not launch.is_main_process(),
    )


def make_sinks(
    options: TrainerOptions, folder: RunFolder | None, console: Console, step: int
) -> Sinks:
    """Where numbers go; nowhere but on process 0.

    Args:
        options: which files are written, and how often a line is printed.
        folder: holds the files; None writes none.
        step: the one to go on from: what files have of later ones is dropped.
    """
    if not launch.is_main_process():
        return Sinks()
    sinks = Sinks([Terminal(console, options.steps, options.lines_every)])
    if folder is not None and "jsonl" in options.metrics:
        lines = functools.partial(JsonLines, folder.metrics, after=step)
        sinks.append(Background(str(folder.metrics), lines))
    if folder is not None and "tensorboard" in options.metrics:
        events = functools.partial(TensorBoard, folder.tensorboard, after=step)
        sinks.append(Background(str(folder.tensorboard), events))
    return sinks


def ending(
    outcome: Outcome,
    options: TrainerOptions,
    cost: StepCost,
    signal: str | None,
    folder: RunFolder | None,
) -> Iterator[str]:
    """What training achieved, and if it was stopped, how to go on.

    Args:
        signal: what it was stopped by.
        folder: where it was saved.
    """
    first, last, seconds = outcome.first, outcome.last, outcome.typical_seconds
    if first is not None and last is not None and seconds is not None:
        rate = last[f"{cost.unit}_per_s"] * last["seconds"] / seconds
        held_out = "" if outcome.eval_loss is None else f", held out {outcome.eval_loss:.3f}"
        skipped = f"; {outcome.skipped} steps skipped" if outcome.skipped else ""
        yield (
            f"loss {first['loss']:.3f} -> {last['loss']:.3f}{held_out}; "
            f"{1000 * seconds:.0f} ms a step, {rate:,.0f} {cost.unit}/s; "
            f"{outcome.seconds:.0f} s in all{skipped}"
        )
    elif not outcome.is_stopped and not outcome.is_done:
        yield f"nothing left to do: {options.steps} steps have been taken"
    if (options.keep_best or options.patience) and (best := outcome.best):
        kept = ", kept" if options.keep_best and folder is not None else ""
        yield f"best held out {best.eval_loss:.3f}, after step {best.step}{kept}"
    if outcome.is_done:
        why = "a hook asked for it"
        if options.patience and outcome.best and outcome.best.since >= options.patience:
            why = f"{outcome.best.since} evaluations have not been better"
        yield f"ended after step {outcome.state.step} of {options.steps}: {why}"
    if outcome.is_stopped:
        if folder is None:
            then = "nothing was saved: there is no run_dir"
        elif last is None:
            then = "there was nothing new to save, resuming goes on"
        else:
            then = f"saved in {folder.checkpoints}, resuming goes on"
        yield f"stopped by {signal} after step {outcome.state.step}: {then}"
