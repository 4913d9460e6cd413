"""Faults for tools/resume_test.py: a disk that fills up, and processes that share no folder."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

DISK_MIB = 48
BLOCK = bytes(2**16)
FILL = "fill"


class Disk:
    """A small file system in memory.

    Args:
        folder: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Leaves no space: another program writes until nothing fits any more."""
        with contextlib.suppress(OSError), (self.folder / FILL).open("ab", buffering=0) as file:
            while True:
                file.write(BLOCK)

    def free(self) -> None:
        """The other program's file is removed."""
        (self.folder / FILL).unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Disk | None]:
    """Mounts a small disk; None where that is not allowed, as it is to root alone."""
    folder.mkdir(parents=True, exist_ok=True)
    call = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    try:
        is_there = subprocess.run(call, capture_output=True, check=False).returncode == 0
    except OSError:
        is_there = False
    if not is_there:
        yield None
        return
    try:
        yield Disk(folder)
    finally:
        # Lazily: a process that was killed may not be gone yet.
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
