"""Paths that users give: on a disk, or `s3://` and `gs://`. Whether one is local is decided here.

`as_path` turns what a user wrote into a `pathlib.Path`, or into a `StorePath`, which has the same
methods over an object store. Code that reads and writes by these methods works with both. What an
object store lacks (renaming, appending, mapping into memory) is asked for by `isinstance`.

Files go through fsspec, arrays through tensorstore's own drivers; both take the credentials from
where the store's own tools do.
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
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

PACKAGES: Mapping[str, str] = MappingProxyType({"s3": "s3fs", "gs": "gcsfs"})
"""What begins the URLs of an object store -> the package with fsspec's driver of it."""

AT_ONCE = 32
"""So many requests of a process are under way at a time: each waits for the network."""

T = TypeVar("T")
R = TypeVar("R")

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://")


class StoreError(OSError):
    """An object store that cannot be reached or used; the message is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)

    def __str__(self) -> str:
        return str(self.strerror)

    def __reduce__(self) -> Any:
        return StoreError, (str(self),)


def as_path(where: str | AnyPath) -> AnyPath:
    """The path that a user names.

    Raises:
        StoreError: it is a URL of an unknown kind, or the package for its kind is not installed.

    Example:
        >>> as_path("runs/a"), as_path("s3://bucket/runs/a")
        (PosixPath('runs/a'), StorePath('s3://bucket/runs/a'))
    """
    if not isinstance(where, str):
        return where
    match = _URL.match(where)
    if match is None:
        return Path(where)
    return StorePath.parse(where, match[1])


def is_url(where: str | AnyPath) -> bool:
    """Whether a path is no local one."""
    return isinstance(where, StorePath) or _URL.match(str(where)) is not None


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

    Args:
        scheme: `s3` or `gs`.
        place: the bucket, and the path within it.
    """

    scheme: str
    place: str

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
        with _one_error(self):
            return bool(self._files.isfile(self.place))

    def is_dir(self) -> bool:
        """Whether there are files below this name."""
        with _one_error(self):
            return bool(self._files.isdir(self.place))

    def iterdir(self) -> Iterator[StorePath]:
        """What is in the folder; nothing if it is not there."""
        with _one_error(self):
            try:
                names = self._files.ls(self.place, detail=False, refresh=True)
            except FileNotFoundError:
                names = []
        places = {str(name).rstrip("/") for name in names} - {self.place}
        return iter(sorted(StorePath(self.scheme, place) for place in places))

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """What matches a pattern below the folder; `**` stands for any number of folders."""
        with _one_error(self):
            found = self._files.glob(f"{self.place}/{pattern}")
        return iter(sorted(StorePath(self.scheme, str(place).rstrip("/")) for place in found))

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        """The files below the folder whose names match a pattern; no folders."""
        found = (self / name for name in file_sizes(self))
        return (path for path in found if fnmatch.fnmatchcase(path.name, pattern))

    def stat(self) -> Status:
        """Size and time of a file."""
        with _one_error(self):
            info = self._files.info(self.place)
            written = info.get("LastModified") or info.get("mtime") or info.get("updated")
        stamp = written.timestamp() if hasattr(written, "timestamp") else 0.0
        return Status(int(info["size"] or 0), int(stamp * 1e9))

    # Reading and writing.

    def open(self, mode: str = "rb") -> StoreFile:
        """Opens a file, to read it by ranges (`rb`) or to write it anew (`wb`)."""
        with _one_error(self):
            return StoreFile(self._files.open(self.place, mode), self)

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """A file's bytes, or those from `start` to before `stop`."""
        if start is not None and start == stop:
            return b""
        with _one_error(self):
            return bytes(self._files.cat_file(self.place, start=start, end=stop))

    def read_text(self, encoding: str = "utf-8") -> str:
        """A file's text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> int:
        """Writes a file; it appears whole, in place of one that was there."""
        with _one_error(self):
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
            with _one_error(self):
                self._files.rm_file(self.place)
        except FileNotFoundError:
            if not missing_ok:
                raise


class StoreFile(io.RawIOBase):
    """A file of a store whose errors are `StoreError`s."""

    def __init__(self, file: Any, path: StorePath) -> None:
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
        with _one_error(self._path):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes; all that are left without a size."""
        with _one_error(self._path):
            return bytes(self._file.read(-1 if size is None else size))

    def readline(self, size: int | None = -1) -> bytes:
        """The next line, with its end."""
        with _one_error(self._path):
            return bytes(self._file.readline())

    def write(self, content: Any) -> int:
        """Adds bytes; returns their number."""
        with _one_error(self._path):
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
            with _one_error(self._path):
                self._file.close()
            super().close()


AnyPath = Path | StorePath


@functools.cache
def _file_system(scheme: str) -> Any:
    import fsspec  # type: ignore[import-untyped]

    # Others write to the same folders: what was listed once is not true for long.
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


@contextlib.contextmanager
def _one_error(path: StorePath) -> Iterator[None]:
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


# Many requests


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="store")


def at_once(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results of calls that wait for the network, in order."""
    return list(_pool().map(call, items))


# Whole folders


def name_within(folder: AnyPath, path: AnyPath) -> str:
    """The path within a folder of what is below it, with slashes."""
    return str(path).removeprefix(f"{folder}/")


def file_sizes(folder: AnyPath) -> dict[str, int]:
    """Path within the folder -> bytes, of all files below it."""
    if isinstance(folder, Path):
        files = (path for path in folder.rglob("*") if path.is_file())
        return {name_within(folder, path): path.stat().st_size for path in files}
    with _one_error(folder):
        found = folder._files.find(folder.place, detail=True, withdirs=False)
    return {
        place.removeprefix(f"{folder.place}/"): int(info["size"])
        for place, info in sorted(found.items())
        if info["type"] == "file" and not place.endswith("/") and place != folder.place
    }


def remove_tree(folder: AnyPath, first: str = "") -> None:
    """Removes a folder and all below it; nothing happens if it is not there.

    Args:
        folder: what to remove.
        first: a file of it that goes before all others.
    """
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    if first:
        (folder / first).unlink(missing_ok=True)
    if not file_sizes(folder):
        return
    with _one_error(folder):
        folder._files.rm(folder.place, recursive=True)


def move_tree(folder: AnyPath, target: AnyPath, last: str = "") -> None:
    """Gives a folder another name; a store copies all files, then removes them.

    Args:
        folder: what to move.
        target: is not there.
        last: a file that on a store is copied after all others, and removed before them.
    """
    if isinstance(folder, Path):
        assert isinstance(target, Path)
        folder.rename(target)
        return
    assert isinstance(target, StorePath)
    names = sorted(file_sizes(folder), key=lambda name: name == last)
    for name in names:
        with _one_error(folder / name):
            folder._files.cp_file((folder / name).place, (target / name).place)
    remove_tree(folder, last)


@contextlib.contextmanager
def local_copy(path: AnyPath) -> Iterator[Path]:
    """A local path with the content of a file or of a small folder, as long as the context."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made) / path.name
        if path.is_file():
            copy.write_bytes(path.read_bytes())
        else:
            download(path, copy)
        yield copy


def download(folder: StorePath, target: Path) -> None:
    """Copies all files below a folder into a local one."""
    for name in file_sizes(folder):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((folder / name).read_bytes())


# tensorstore


def kvstore(folder: AnyPath) -> dict[str, Any]:
    """The spec for tensorstore of a folder, by its own driver."""
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder.absolute()}/"}
    if folder.scheme == "gs":
        return {"driver": "gcs", "bucket": folder.bucket, "path": f"{folder.key}/"}
    spec: dict[str, Any] = {"driver": "s3", "bucket": folder.bucket, "path": f"{folder.key}/"}
    # fsspec's driver looks at these variables itself; tensorstore's does not.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def array_spec(state: AnyPath, key: str, driver: str) -> dict[str, Any]:
    """The spec for tensorstore of an array in orbax's layout.

    Args:
        state: the folder.
        key: the array's name, such as `params.w`.
        driver: `zarr` or `zarr3`.
    """
    store = {"driver": "ocdbt", "base": kvstore(state), "path": f"{key}/"}
    return {"driver": driver, "kvstore": store}
