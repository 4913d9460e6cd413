"""Files of object stores, with the methods of `pathlib.Path` that make sense there.

fsspec's drivers do the work, which take the credentials from where the store's own tools do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import fnmatch
import functools
import importlib.util
import io
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

# Open files of an object store, and errors of its drivers in one line.


class StoreError(OSError):
    """An object store that cannot be reached or used; the message is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> Any:
        return StoreError, (str(self),)


@contextlib.contextmanager
def one_error(path: object) -> Iterator[None]:
    """Errors of any driver become `OSError`s with one line that says where."""
    try:
        yield
    except FileNotFoundError as error:
        text = "there is no such file, or no such bucket"
        raise FileNotFoundError(errno.ENOENT, text, str(path)) from error
    except StoreError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StoreError(f"{path}: {lines[0]}") from error


class StoreFile(io.RawIOBase):
    """A file of a store whose errors are `StoreError`s."""

    def __init__(self, file: Any, path: object) -> None:
        self._file, self._path = file, path

    def readable(self) -> bool:
        """Whether it was opened to be read."""
        return bool(self._file.readable())

    def writable(self) -> bool:
        """Whether it was opened to be written."""
        return bool(self._file.writable())

    def seekable(self) -> bool:
        """Whether `seek` works."""
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer; returns how many bytes there were."""
        with one_error(self._path):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes; all that are left without a size."""
        with one_error(self._path):
            return bytes(self._file.read(-1 if size is None else size))

    def readline(self, size: int | None = -1) -> bytes:
        """The next line, with its end."""
        with one_error(self._path):
            return bytes(self._file.readline())

    def write(self, content: Any) -> int:
        """Adds bytes; returns their number."""
        with one_error(self._path):
            return int(self._file.write(content))

    def seek(self, place: int, whence: int = 0) -> int:
        """Goes to a place; returns it."""
        return int(self._file.seek(place, whence))

    def tell(self) -> int:
        """The place."""
        return int(self._file.tell())

    def discard(self) -> None:
        """Closes a file that was being written, so that nothing of it appears."""
        with contextlib.suppress(Exception):
            self._file.discard()
        self._file.closed = True
        super().close()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None and self.writable():
            self.discard()
        self.close()

    def close(self) -> None:
        """Closes it; what was written appears."""
        if not self.closed:
            with one_error(self._path):
                self._file.close()
            super().close()


PACKAGES: Mapping[str, str] = MappingProxyType({"s3": "s3fs", "gs": "gcsfs"})
"""What begins the URLs of an object store -> the package with fsspec's driver of it."""

AT_ONCE = 32
"""So many requests of a process are under way at a time: each waits for the network."""

T = TypeVar("T")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Status:
    """What `StorePath.stat` says: bytes, and when the file was written."""

    st_size: int
    st_mtime_ns: int


@dataclasses.dataclass(frozen=True, order=True)
class StorePath:
    """A file or folder of an object store, with the methods of `pathlib.Path` that make sense.

    Folders are only the beginnings of their files' names, so an empty one is not there. A file
    appears whole when it is closed. There is no `rename`: see `move_tree`. It is no `os.PathLike`,
    so that nobody mistakes it for a local path.
    """

    scheme: str  # `s3` or `gs`
    place: str  # the bucket, and the path within it

    @classmethod
    def parse(cls, url: str, scheme: str) -> StorePath:
        """The path of a URL; raises `StoreError` if its kind is unknown or lacks its package."""
        if scheme not in PACKAGES:
            known = " and ".join(f"{name}://" for name in PACKAGES)
            raise StoreError(f"{url}: {scheme}:// is not supported, only {known} and local paths")
        if importlib.util.find_spec(PACKAGES[scheme]) is None:
            raise StoreError(f"{url} needs a package: pip install {PACKAGES[scheme]}")
        place = posixpath.normpath(url.removeprefix(f"{scheme}://").lstrip("/"))
        if place == ".":
            raise StoreError(f"{url} names no bucket")
        return cls(scheme, place)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    # Names.

    def __truediv__(self, part: str) -> StorePath:
        return StorePath(self.scheme, posixpath.normpath(posixpath.join(self.place, part)))

    @property
    def name(self) -> str:
        """What comes after the last slash."""
        return posixpath.basename(self.place)

    @property
    def suffix(self) -> str:
        """The ending of the name, such as `.gz`."""
        return posixpath.splitext(self.name)[1]

    @property
    def stem(self) -> str:
        """The name without its ending."""
        return posixpath.splitext(self.name)[0]

    @property
    def parent(self) -> StorePath:
        """The folder that it is in."""
        return StorePath(self.scheme, posixpath.dirname(self.place) or self.place)

    @property
    def bucket(self) -> str:
        """The bucket."""
        return self.place.partition("/")[0]

    @property
    def key(self) -> str:
        """The path within the bucket."""
        return self.place.partition("/")[2]

    def with_name(self, name: str) -> StorePath:
        """Another name in the same folder."""
        return self.parent / name

    def absolute(self) -> StorePath:
        """Itself."""
        return self

    # Looking.

    @property
    def _files(self) -> Any:
        return _file_system(self.scheme)

    def exists(self) -> bool:
        """Whether there is a file or folder of this name."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether there is a file of this name."""
        with one_error(self):
            return bool(self._files.isfile(self.place))

    def is_dir(self) -> bool:
        """Whether there are files below this name."""
        with one_error(self):
            return bool(self._files.isdir(self.place))

    def iterdir(self) -> Iterator[StorePath]:
        """What is in the folder; nothing if it is not there."""
        with one_error(self):
            try:
                names = self._files.ls(self.place, detail=False, refresh=True)
            except FileNotFoundError:
                names = []
        places = {str(name).rstrip("/") for name in names} - {self.place}
        return iter(sorted(StorePath(self.scheme, place) for place in places))

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """What matches a pattern below the folder; `**` stands for any number of folders."""
        with one_error(self):
            found = self._files.glob(f"{self.place}/{pattern}")
        return iter(sorted(StorePath(self.scheme, str(place).rstrip("/")) for place in found))

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        """The files below the folder whose names match a pattern; no folders."""
        found = (self / name for name in self.sizes())
        return (path for path in found if fnmatch.fnmatchcase(path.name, pattern))

    def sizes(self) -> dict[str, int]:
        """Path within the folder -> bytes, of all files below it."""
        with one_error(self):
            found = self._files.find(self.place, detail=True, withdirs=False)
        return {
            place.removeprefix(f"{self.place}/"): int(info["size"])
            for place, info in sorted(found.items())
            if info["type"] == "file" and not place.endswith("/") and place != self.place
        }

    def stat(self) -> Status:
        """Size and time of a file."""
        with one_error(self):
            info = self._files.info(self.place)
            written = info.get("LastModified") or info.get("mtime") or info.get("updated")
        stamp = written.timestamp() if hasattr(written, "timestamp") else 0.0
        return Status(int(info["size"] or 0), int(stamp * 1e9))

    # Reading and writing.

    def open(self, mode: str = "rb") -> StoreFile:
        """Opens a file, to read it by ranges (`rb`) or to write it anew (`wb`)."""
        with one_error(self):
            return StoreFile(self._files.open(self.place, mode), self)

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """A file's bytes, or those from `start` to before `stop`."""
        if start is not None and start == stop:
            return b""
        with one_error(self):
            return bytes(self._files.cat_file(self.place, start=start, end=stop))

    def read_text(self, encoding: str = "utf-8") -> str:
        """A file's text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> int:
        """Writes a file; it appears whole, in place of one that was there."""
        with one_error(self):
            self._files.pipe_file(self.place, content)
        return len(content)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        """Writes a file of text."""
        return self.write_bytes(text.encode(encoding))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: folders come with their files. Buckets are never made."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes a file."""
        try:
            with one_error(self):
                self._files.rm_file(self.place)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self) -> None:
        """Removes all files below the folder."""
        if self.sizes():
            with one_error(self):
                self._files.rm(self.place, recursive=True)

    def copy_to(self, target: StorePath) -> None:
        """Copies a file within the store: its bytes do not come here."""
        with one_error(self):
            self._files.cp_file(self.place, target.place)


@functools.cache
def _file_system(scheme: str) -> Any:
    import fsspec  # type: ignore[import-untyped]

    # Others write to the same folders: what was listed once is not true for long.
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="store")


def at_once(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results of calls that wait for the network, in order."""
    return list(_pool().map(call, items))
