"""`Store`: files in the user's cache folder that keep results, such as plans, for later processes.

An entry's name is a hash of all that decides its content, this package's source included: no entry
is ever out of date, and those not used for longest are deleted when the folder is full. Entries are
data, never code; one that cannot be read or written is computed again.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import tempfile
from pathlib import Path

import jax

from spmd.installed import source_digest

NOWHERE = "none"  # the folder of those who want nothing kept
FOLDER_VARIABLE = "SPMD_CACHE_DIR"  # in the environment: the folder for programs that name none
MOST_BYTES = 512 << 20  # that one kind of entries may take


def user_folder() -> Path:
    """Returns `spmd`'s folder in the user's cache: `$XDG_CACHE_HOME/spmd`, else `~/.cache/spmd`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmd"


def store_in(folder: str | os.PathLike[str] | None, kind: str) -> "Store | None":
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
    """Returns a hash of `decisive` (by repr), our source, and versions of jax, numpy, scipy."""
    return hashlib.sha256("\n".join((*map(repr, decisive), _environment())).encode()).hexdigest()


class Store:
    """A folder, made by `put`, of at most `most_bytes` of entries; several processes may use it."""

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

    def put(self, key: str, content: bytes) -> str:
        """Writes an entry; returns an empty text, or why it failed: then no part of it is left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=self.folder) as unfinished:
                file = Path(unfinished, key)
                file.write_bytes(_digest(content) + b"\n" + content)
                file.replace(self.folder / key)
            self._drop()
        except OSError as error:
            return str(error.strerror or error)
        return ""

    def _drop(self) -> None:
        """Deletes the least recently used files, until the others take at most `most_bytes`."""
        with contextlib.suppress(OSError):  # another process was faster
            found = [(path.stat(), path) for path in self.folder.iterdir() if path.is_file()]
            total = 0
            for about, path in sorted(found, key=lambda entry: -entry[0].st_mtime_ns):
                total += about.st_size
                if total > self.most_bytes:
                    path.unlink()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@functools.cache
def _environment() -> str:
    packages = "jax", "jaxlib", "numpy", "scipy"
    return repr((source_digest(), [importlib.metadata.version(name) for name in packages]))
