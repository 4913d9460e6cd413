"""Where the metrics of a run go: the terminal, a file of JSON lines, TensorBoard.

A record has a `step` and some of these: a training step's loss and rates, an evaluation's
`eval_loss`, a checkpoint's `save_seconds` and `save_stall_seconds`. Every sink gets every record.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Record = dict[str, Any]
"""`step`, and numbers by name; `error`, if present, is a sentence."""


class Sink(Protocol):
    """Takes the records of a run."""

    def write(self, record: Record) -> None:
        """Takes one record."""

    def close(self) -> None:
        """Is called after the last record."""


class Sinks(list[Sink]):
    """Several sinks, closed together: `with Sinks([...]) as sinks:`."""

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *exception: object) -> None:
        for sink in self:
            sink.close()


class JsonLines:
    """Writes one JSON object a line, at once; numbers that are not finite become null.

    Args:
        path: the file; lines are appended.
        after: if a run resumes from this step, lines of later steps are dropped first: it takes
            those steps again.
    """

    def __init__(self, path: Path, after: int | None = None) -> None:
        if after is not None and path.exists():
            _drop_later_steps(path, after)
        self.file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends a line."""
        print(json.dumps({name: _finite(x) for name, x in record.items()}), file=self.file)
        self.file.flush()

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


def _finite(x: Any) -> Any:
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _drop_later_steps(path: Path, step: int) -> None:
    """Drops lines of later steps, and a last line that was cut off when its process was killed."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    path.write_text("".join(kept), encoding="utf-8")


class TensorBoard:
    """Writes scalars into TensorBoard's event files.

    Args:
        folder: where the files go.
        after: if a run resumes from this step, TensorBoard is told to hide later ones.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        with _without_torch():
            from tensorboardX import SummaryWriter
        purge = None if after is None else after + 1
        self.writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def write(self, record: Record) -> None:
        """Writes every number of the record."""
        step = int(record["step"])
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(_tag(name), value, step)

    def close(self) -> None:
        """Flushes and closes the file."""
        self.writer.close()


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Keeps tensorboardX from importing PyTorch, which takes two seconds and is not needed here."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _tag(name: str) -> str:
    """TensorBoard's name of a metric: `eval_loss` -> `eval/loss`, `loss` -> `train/loss`."""
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in ("eval", "mfu", "memory", "save") else f"train/{name}"


class Terminal:
    """Prints lines of progress, and shows a bar if there is a terminal.

    Args:
        console: where they go.
        steps: total number of steps.
        log_every: training steps between lines. Evaluations and checkpoints always have a line.
    """

    def __init__(self, console: Console, steps: int, log_every: int = 10) -> None:
        self.console, self.steps, self.log_every = console, steps, log_every
        self.is_first = True
        self.bar = _bar(console) if console.is_terminal else None
        if self.bar is not None:
            self.task = self.bar.add_task("", total=steps, loss=math.nan, rate=0.0)
            self.bar.start()

    def write(self, record: Record) -> None:
        """Moves the bar, and prints a line if one is due."""
        number = int(record["step"])
        if self.bar is not None and "loss" in record:
            self.bar.update(
                self.task, completed=number, loss=record["loss"], rate=record["tokens_per_s"]
            )
        is_due = number % self.log_every == 0 or number == self.steps or self.is_first
        if is_due or "loss" not in record or record.get("skipped"):
            self.console.print(describe(record, self.steps), highlight=False)
        self.is_first = False

    def close(self) -> None:
        """Removes the bar."""
        if self.bar is not None:
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
    text += f"  {record['tokens_per_s']:,.0f} tokens/s  {1000 * record['seconds']:.0f} ms"
    for name, value in record.items():
        if name.startswith("mfu_"):
            text += f"  MFU {value:.1%} ({name.removeprefix('mfu_')})"
    if "memory_peak_bytes" in record:
        text += f"  {record['memory_peak_bytes'] / 2**30:.1f} GiB"
    return text + ("  not finite: skipped" if record.get("skipped") else "")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
