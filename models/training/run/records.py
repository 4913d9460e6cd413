"""Files of records: JSON lines, and TensorBoard's event files. A record is there whole or not."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.training.run.sinks import Record


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

    def close(self) -> None:
        self._file.close()


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
        self._file = _Appended(path)

    def write(self, record: Record) -> None:
        """Appends a line."""
        line = json.dumps({name: _finite(x) for name, x in record.items()})
        self._file.append(f"{line}\n".encode())

    def flush(self) -> None:
        """Lines are written at once."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _finite(x: Any) -> Any:
    return None if isinstance(x, float) and not math.isfinite(x) else x


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


class TensorBoard:
    """Writes scalars into TensorBoard's event files.

    Args:
        after: if a run resumes from this step, TensorBoard is told to hide later ones.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        with _without_torch():
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c
        self._event, self._summary, self._crc = event_pb2.Event, summary_pb2.Summary, masked_crc32c
        stamp = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = _Appended(folder / f"events.out.tfevents.{stamp}")
        self._append(file_version="brain.Event:2")
        if after is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(step=after + 1, session_log=start)

    def _append(self, **fields: Any) -> None:
        content: bytes = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(content))
        crcs = [struct.pack("<I", self._crc(part)) for part in (length, content)]
        self._file.append(length + crcs[0] + content + crcs[1])

    def write(self, record: Record) -> None:
        """Writes every number of the record."""
        values = [
            self._summary.Value(tag=_tag(name), simple_value=value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._append(step=int(record["step"]), summary=self._summary(value=values))

    def flush(self) -> None:
        """Events are written at once."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


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
