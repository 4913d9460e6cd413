"""Where the metrics of a run go: the terminal, a file of JSON lines, TensorBoard.

A record has a `step` and some of these: a training step's loss, rates, `samples` seen so far and
metrics of one's own; an evaluation's `eval_loss`, and those metrics as `eval_NAME`; a checkpoint's
`save_seconds` and `save_stall_seconds`. Every sink gets every record.
"""

import contextlib
import errno
import json
import math
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spmd.models.training.run.stateful import TAKEN

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
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task("", total=steps, loss=math.nan, rate="")
            self.bar.start()

    def write(self, record: Record) -> None:
        """Moves the bar, and prints a line if one is due."""
        number = int(record["step"])
        with contextlib.suppress(OSError):  # its output may be a file on a full disk
            if self.bar is not None and "loss" in record:
                rate = _rate(record)
                self.bar.update(self.task, completed=number, loss=record["loss"], rate=rate)
            is_due = number % self.log_every == 0 or number == self.steps or self.is_first
            if is_due or "loss" not in record or record.get("skipped"):
                self.console.print(describe(record, self.steps), highlight=False)
            self.is_first = False

    def flush(self) -> None:
        """Lines are printed at once."""

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
    own = "".join(f"  {name} {record[name]:.3g}" for name in record if _is_own(name))
    if "eval_loss" in record:
        return text + f"held-out loss {record['eval_loss']:.3f}" + own
    if "save_seconds" in record:
        return text + (
            f"checkpoint saved in {record['save_seconds']:.1f} s, "
            f"training waited {record['save_stall_seconds']:.2f} s"
        )
    text += f"loss {record['loss']:.3f}  grad norm {record['grad_norm']:.2f}{own}"
    if "learning_rate" in record:
        text += f"  lr {record['learning_rate']:.2e}"
    text += f"  {_rate(record)}  {1000 * record['seconds']:.0f} ms"
    for name, value in record.items():
        if name.startswith("mfu_"):
            text += f"  MFU {value:.1%} ({name.removeprefix('mfu_')})"
    if "memory_peak_bytes" in record:
        text += f"  {record['memory_peak_bytes'] / 2**30:.1f} GiB"
    return text + ("  not finite: skipped" if record.get("skipped") else "")


def _is_own(name: str) -> bool:
    """Whether it is a metric of the user's loss."""
    others = name in TAKEN or name == "eval_loss" or name.endswith(PER_S)
    return not others and not name.startswith(("mfu_", "memory_"))


def _rate(record: Record) -> str:
    """`1,024 tokens/s`, or of what the run counts."""
    rates = {name: value for name, value in record.items() if name.endswith(PER_S)}
    return "".join(f"{value:,.0f} {name.removesuffix(PER_S)}/s" for name, value in rates.items())


# Files of records: JSON lines, and TensorBoard's event files. A record is there whole or not.


class _Appended:
    """A file that grows by whole pieces: of a piece that does not fit, nothing is left."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def append(self, piece: bytes) -> None:
        """Raises `OSError` if there is no space for it."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(piece) != len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def flush(self) -> None:
        """Each piece is written at once."""

    def close(self) -> None:
        self._file.close()


class JsonLines(_Appended):
    """Writes one JSON object a line, at once; numbers that are not finite become null.

    Args:
        path: the file; lines are appended.
        after: if a run resumes from this step, lines of later steps are dropped first: it takes
            those steps again.
    """

    def __init__(self, path: Path, after: int | None = None) -> None:
        if after is not None and path.exists():
            _drop_later_steps(path, after)
        super().__init__(path)

    def write(self, record: Record) -> None:
        """Appends a line."""
        plain = dict(record)
        for name, x in record.items():
            if isinstance(x, float) and not math.isfinite(x):
                plain[name] = None
        self.append(f"{json.dumps(plain)}\n".encode())


def _drop_later_steps(path: Path, step: int) -> None:
    """Drops lines of later steps, and a last line that was cut off when its process was killed."""
    kept, text = [], path.read_text(encoding="utf-8")
    for line in text.splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    if "".join(kept) == text:
        return
    shorter = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        shorter.write_text("".join(kept), encoding="utf-8")
        shorter.replace(path)  # a full disk must not cost the lines that are there
    finally:
        shorter.unlink(missing_ok=True)


class TensorBoard(_Appended):
    """Writes scalars into TensorBoard's event files.

    Args:
        after: if a run resumes from this step, TensorBoard is told to hide later ones.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        # It would import PyTorch, which takes two seconds and is not needed here.
        is_hidden = sys.modules.setdefault("torch", None) is None  # type: ignore[arg-type]
        try:
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c
        finally:
            if is_hidden:
                del sys.modules["torch"]
        self._event, self._summary, self._crc = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        stamp = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        super().__init__(folder / f"events.out.tfevents.{stamp}")
        self._add(file_version="brain.Event:2")
        if after is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=after + 1, session_log=start)

    def _add(self, **fields: Any) -> None:
        content: bytes = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(content))
        crcs = [struct.pack("<I", self._crc(part)) for part in (length, content)]
        self.append(length + crcs[0] + content + crcs[1])

    def write(self, record: Record) -> None:
        """Writes every number of the record."""
        values = [
            self._summary.Value(tag=_tag(name), simple_value=value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._add(step=int(record["step"]), summary=self._summary(value=values))


def _tag(name: str) -> str:
    """TensorBoard's name of a metric: `eval_loss` -> `eval/loss`, `loss` -> `train/loss`."""
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in ("eval", "mfu", "memory", "save") else f"train/{name}"
