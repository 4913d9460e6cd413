"""`Store`: what an earlier start worked out, as files in a folder of the user.

An entry's name is a digest of all that decides its content, this package's source among it, so no
entry is ever out of date: one that nobody asks for any more is dropped when the folder is full.
Entries are data, never code; what cannot be read or written is worked out anew.
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
    """Returns the user's cache folder: `$XDG_CACHE_HOME/spmd`, else `~/.cache/spmd`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "spmd"


def store_in(folder: str | os.PathLike[str] | None, kind: str) -> Store | None:
    """Returns the store of one kind of entries; None if nothing is to be kept.

    Where no folder is given it is `$SPMD_CACHE_DIR`, else one in that of jax's compilation cache if
    it is on disk, else `user_folder()`.
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
    """Hashes the reprs of `decisive` with this source and the versions of jax, numpy and scipy."""
    parts = (*map(repr, decisive), _environment())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Store:
    """Keeps bytes under names in a folder, for all processes that share it.

    The folder is made when something is put there. Entries that were not used for longest are
    dropped when all take more than `most_bytes`.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    def get(self, key: str) -> bytes | None:
        """Returns an entry's bytes; None if there is none, or if it is damaged."""
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

    def put(self, key: str, content: bytes) -> str:
        """Writes an entry; if that fails, returns why, and none is left behind."""
        try:
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
        except OSError as error:
            return str(error.strerror or error)
        return ""

    def _drop(self) -> None:
        """Deletes the least recently used files beyond `most_bytes`, unfinished ones included."""
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
