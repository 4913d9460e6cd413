"""`Store`: files in the user's cache folder that keep results, such as plans, for later processes.

An entry's name is a hash of all that decides its content, this package's source included: no entry
is ever out of date, and those not used for longest are deleted when the folder is full. Entries are
data, never code; one that cannot be read or written is computed again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

import jax

NOWHERE = "none"  # the folder of those who want nothing kept
FOLDER_VARIABLE = "SPMD_CACHE_DIR"  # in the environment: the folder for programs that name none
MOST_BYTES = 512 << 20  # that one kind of entries may take


def user_folder() -> Path:
    """Returns `spmd`'s folder in the user's cache: `$XDG_CACHE_HOME/spmd`, else `~/.cache/spmd`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "spmd"


def store_in(folder: str | os.PathLike[str] | None, kind: str) -> Store | None:
    """Returns the store `folder/kind`; None if the folder is `none`, or the user has no home.

    The folder is `$SPMD_CACHE_DIR` when left out, else `spmd` in that of jax's compilation cache if
    that is on disk, else `user_folder()`.
    """
    folder = folder or os.environ.get(FOLDER_VARIABLE)
    if not folder:
        jaxs = getattr(jax.config, "jax_compilation_cache_dir", None)
        try:
            folder = Path(jaxs) / "spmd" if jaxs and "://" not in str(jaxs) else user_folder()
        except RuntimeError:  # a user without a home
            return None
    return None if str(folder) == NOWHERE else Store(Path(folder) / kind)


def key_of(*decisive: object) -> str:
    """Hashes the reprs of `decisive`, this package's source and versions of jax, numpy, scipy."""
    parts = (*map(repr, decisive), _environment())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Store:
    """A folder of entries, each a file of bytes, that several processes may share.

    `put` makes the folder. When all entries take more than `most_bytes`, those not used for longest
    are deleted.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    def get(self, key: str) -> bytes | None:
        """Returns the bytes of the entry `key`; None if there is none, or its file is damaged."""
        path = self.folder / key
        try:
            digest, _, content = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        if digest != _digest(content):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Writes an entry; if that fails, as on a full disk, there is no entry and no error."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, unfinished = tempfile.mkstemp(dir=self.folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(_digest(content) + b"\n" + content)
                os.replace(unfinished, self.folder / key)
            except BaseException:
                os.unlink(unfinished)
                raise
            self._drop()

    def _drop(self) -> None:
        """Deletes the least recently used files, until the others take at most `most_bytes`."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process was faster
                about = path.stat()
                found.append((about.st_mtime_ns, about.st_size, path))
        total = 0
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > self.most_bytes:
                with contextlib.suppress(OSError):
                    path.unlink()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@functools.cache
def _environment() -> str:
    digest, top = hashlib.sha256(), Path(__file__).parent
    for path in sorted(top.rglob("*.py")):
        digest.update(f"{path.relative_to(top)}\n".encode() + path.read_bytes())
    packages = "jax", "jaxlib", "numpy", "scipy"
    return repr((digest.hexdigest(), [importlib.metadata.version(name) for name in packages]))
