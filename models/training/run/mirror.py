"""Keeps the small files of a run on an object store, which cannot append to a file.

They are written into a local folder, as on a disk, and a thread copies what has changed:
metrics, TensorBoard's events, the report, traces and compiled programs. Checkpoints go to the
store directly.
"""

import threading
import time
from pathlib import Path

from spmd.models.training.paths import StorePath
from spmd.models.training.run.background import say

INTERVAL_S = 10.0
"""The least seconds between two copies."""

SHARE = 20
"""Between two copies passes at least so many times what the last one took."""

FETCHED = ("metrics.jsonl", "compiled")
"""What a run goes on with, so that it is there when it begins."""


class Mirror:
    """Copies a local folder to a store while a block runs, and once more at its end.

    A store that cannot be reached never stops a run: it is said once, and tried again.

    Args:
        folder: local; what earlier runs left on the store is fetched into it first.
        kept: where it is copied to.

    Raises:
        OSError: at the beginning, if the store cannot be read.
    """

    def __init__(self, folder: Path, kept: StorePath) -> None:
        self.folder, self.kept = folder, kept
        self._copied: dict[Path, tuple[int, int]] = {}
        self._end = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        for name in FETCHED:
            found = self.kept / name
            for path in [found] if found.is_file() else found.rglob("*"):
                local = self.folder / str(path).removeprefix(f"{self.kept}/")
                local.parent.mkdir(parents=True, exist_ok=True)
                local.write_bytes(path.read_bytes())
                self._copied[local] = _state(local)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()
        self.copy()

    def _run(self) -> None:
        pause = INTERVAL_S
        while not self._end.wait(pause):
            started = time.monotonic()
            self.copy()
            pause = max(INTERVAL_S, SHARE * (time.monotonic() - started))

    def copy(self) -> None:
        """Copies what has changed since the last time."""
        try:
            for path in sorted(self.folder.rglob("*")):
                self._copy_file(path)
        except OSError as error:
            if self._problem is None:
                say(self.kept, f"{error}; training goes on, and it is tried again")
            self._problem = str(error)
            return
        if self._problem is not None:
            self._problem = None
            say(self.kept, "written again")

    def _copy_file(self, path: Path) -> None:
        try:
            if not path.is_file() or self._copied.get(path) == _state(path):
                return
            before, content = _state(path), path.read_bytes()
        except FileNotFoundError:  # it was a temporary one
            return
        (self.kept / path.relative_to(self.folder).as_posix()).write_bytes(content)
        self._copied[path] = before


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
