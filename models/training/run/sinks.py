"""Where the metrics of a run go: the terminal, a file of JSON lines, TensorBoard.

A record has a `step` and some of these: a training step's loss and rates, an evaluation's
`eval_loss`, a checkpoint's `save_seconds` and `save_stall_seconds`. Every sink gets every record.
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Record = dict[str, Any]
"""`step`, and numbers by name; `error`, if present, is a sentence."""


PER_S = "_per_s"
"""How the names of rates end."""


class Sink(Protocol):
    """Takes the records of a run."""

    def write(self, record: Record) -> None:
        """Takes one record; never raises for want of space, and never waits for long."""

    def flush(self) -> None:
        """Is called before a checkpoint: those who keep records see to it that they are written."""

    def close(self) -> None:
        """Is called after the last record."""


class Sinks(list[Sink]):
    """Several sinks, closed together: `with Sinks([...]) as sinks:`."""

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *exception: object) -> None:
        for sink in self:
            sink.close()


class Forgiving:
    """Standard output, of which nobody hears if it cannot be written: a file on a full disk."""

    def write(self, text: str) -> int:
        """Writes what can be written."""
        with contextlib.suppress(OSError):
            sys.stdout.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes what can be flushed."""
        with contextlib.suppress(OSError):
            sys.stdout.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class Terminal:
    """Prints lines of progress, and shows a bar if there is a terminal.

    Args:
        log_every: training steps between lines. Evaluations and checkpoints always have a line.
    """

    def __init__(self, console: Console, steps: int, log_every: int = 10) -> None:
        self.console, self.steps, self.log_every = console, steps, log_every
        self.is_first = True
        self.bar = _bar(console) if console.is_terminal else None
        if self.bar is not None:
            self.task = self.bar.add_task("", total=steps, loss=math.nan, rate="")
            self.bar.start()

    def write(self, record: Record) -> None:
        """Moves the bar, and prints a line if one is due."""
        with contextlib.suppress(OSError):  # its output may be a file on a full disk
            self._show(record)

    def flush(self) -> None:
        """Lines are printed at once."""

    def _show(self, record: Record) -> None:
        number = int(record["step"])
        if self.bar is not None and "loss" in record:
            rate = _rate(record)
            self.bar.update(self.task, completed=number, loss=record["loss"], rate=rate)
        is_due = number % self.log_every == 0 or number == self.steps or self.is_first
        if is_due or "loss" not in record or record.get("skipped"):
            self.console.print(describe(record, self.steps), highlight=False)
        self.is_first = False

    def close(self) -> None:
        """Removes the bar."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()


def describe(record: Record, steps: int) -> str:
    """The line on one record."""
    text = f"step {int(record['step']):>5}/{steps}  "
    if "error" in record:
        return text + str(record["error"])
    if "eval_loss" in record:
        return text + f"held-out loss {record['eval_loss']:.3f}"
    if "save_seconds" in record:
        return text + (
            f"checkpoint saved in {record['save_seconds']:.1f} s, "
            f"training waited {record['save_stall_seconds']:.2f} s"
        )
    return text + _describe_step(record)


def _describe_step(record: Record) -> str:
    text = f"loss {record['loss']:.3f}  grad norm {record['grad_norm']:.2f}"
    if "learning_rate" in record:
        text += f"  lr {record['learning_rate']:.2e}"
    text += f"  {_rate(record)}  {1000 * record['seconds']:.0f} ms"
    for name, value in record.items():
        if name.startswith("mfu_"):
            text += f"  MFU {value:.1%} ({name.removeprefix('mfu_')})"
    if "memory_peak_bytes" in record:
        text += f"  {record['memory_peak_bytes'] / 2**30:.1f} GiB"
    return text + ("  not finite: skipped" if record.get("skipped") else "")


def _rate(record: Record) -> str:
    """`1,024 tokens/s`, or of what the run counts."""
    rates = {name: value for name, value in record.items() if name.endswith(PER_S)}
    return "".join(f"{value:,.0f} {name.removesuffix(PER_S)}/s" for name, value in rates.items())


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
