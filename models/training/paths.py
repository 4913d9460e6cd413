"""Paths that users give: on a disk, or `s3://` and `gs://`. Whether one is local is decided here.

`as_path` turns what a user wrote into a `pathlib.Path`, or into a `StorePath`, which has the same
methods over an object store. Code that reads and writes by these methods works with both. What an
object store lacks (renaming, appending, mapping into memory) is asked for by `isinstance`.

Files go through fsspec's drivers, arrays through tensorstore's own; both take the credentials from
where the store's own tools do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import importlib.util
import io
import json
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, TypeVar

PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # with fsspec's driver of a kind of store
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://")


class StoreError(OSError):
    """An object store that cannot be reached or used; the message is one line."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.strerror = text


class StorePath(PurePosixPath):
    """A file or folder of an object store: names as in `pathlib`, and what `Path` does with files.

    Folders are only the beginnings of their files' names, so an empty one is not there. A file
    appears whole when it is closed. Errors are `StoreError`, or `FileNotFoundError` with the URL.
    There is no `rename`: see `move_tree`.

    Example:
        >>> StorePath("s3://bucket/runs") / "a"
        StorePath('s3://bucket/runs/a')
    """

    @property
    def scheme(self) -> str:
        """`s3` or `gs`."""
        return self.parts[0].removesuffix(":")

    @property
    def place(self) -> str:
        """The bucket, and the path within it."""
        return "/".join(self.parts[1:])

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is no local path")

    def absolute(self) -> StorePath:
        """Itself."""
        return self

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """What a method of fsspec's driver answers; its errors become ours."""
        with one_error(self):
            return getattr(file_system(self.scheme), method)(self.place, *args, **options)

    def _named(self, places: Iterable[str]) -> list[StorePath]:
        return sorted({StorePath(f"{self.scheme}://{place}") for place in places} - {self})

    def _kind(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return str(self.ask("info")["type"])
        return None

    def exists(self) -> bool:
        """Whether there is a file or folder of this name."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Whether there is a file of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there are files below this name."""
        return bool(self.ask("isdir"))

    def iterdir(self) -> Iterator[StorePath]:
        """What is in the folder; nothing if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            yield from self._named(self.ask("ls", detail=False))

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """What matches a pattern below the folder; `**` stands for any number of folders."""
        return iter(self._named((self / pattern).ask("glob")))

    def rglob(self, pattern: str) -> Iterator[StorePath]:
        """The files below the folder whose names match a pattern; no folders."""
        return (self / name for name in file_sizes(self) if PurePosixPath(name).match(pattern))

    def stat(self) -> SimpleNamespace:
        """`st_size` and `st_mtime_ns` of a file."""
        info = self.ask("info")
        written = info.get("LastModified") or info.get("mtime")
        time_ns = int(written.timestamp() * 1e9) if written else 0
        return SimpleNamespace(st_size=int(info["size"]), st_mtime_ns=time_ns)

    def open(self, mode: str = "rb") -> Any:
        """Opens a file to read it by ranges (`rb`), or for a block that writes it anew (`wb`).

        Nothing appears if the block fails.
        """
        return io.BufferedReader(_Reading(self), 2**20) if mode == "rb" else _writing(self)

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """A file's bytes, or those from `start` to before `stop`."""
        if start is not None and start == stop:
            return b""
        return bytes(self.ask("cat_file", start=start, end=stop))

    def read_text(self, encoding: str = "utf-8") -> str:
        """A file's text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Writes a file; it appears whole, in place of one that was there."""
        self.ask("pipe_file", content)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Writes a file of text."""
        self.write_bytes(text.encode(encoding))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: folders come with their files. Buckets are never made."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes a file."""
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])):
            self.ask("rm_file")


AnyPath = Path | StorePath


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
    scheme, place = match[1], posixpath.normpath(where[match.end() :].lstrip("/"))
    if scheme not in PACKAGES:
        known = " and ".join(f"{name}://" for name in PACKAGES)
        raise StoreError(f"{where}: {scheme}:// is not supported, only {known} and local paths")
    if importlib.util.find_spec(PACKAGES[scheme]) is None:
        raise StoreError(f"{where} needs a package: pip install {PACKAGES[scheme]}")
    if place == ".":
        raise StoreError(f"{where} names no bucket")
    return StorePath(f"{scheme}://{place}")


def is_url(where: str | AnyPath) -> bool:
    """Whether a path is no local one."""
    return _URL.match(str(where)) is not None


# Drivers of stores, and their open files


@functools.cache
def file_system(scheme: str) -> Any:
    """Fsspec's driver of a kind of store."""
    import fsspec  # type: ignore[import-untyped]

    # Others write to the same folders: what was listed once is not true for long.
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


@contextlib.contextmanager
def one_error(path: object) -> Iterator[None]:
    """Errors of any driver become `OSError`s with one line that says where."""
    try:
        yield
    except FileNotFoundError as error:
        text = "there is no such file, or no such bucket"
        raise FileNotFoundError(errno.ENOENT, text, str(path)) from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise StoreError(f"{path}: {lines[0]}") from error


class _Reading(io.RawIOBase):
    def __init__(self, path: StorePath) -> None:
        self._path, self._file = path, path.ask("open")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = 0) -> int:
        return int(self._file.seek(place, whence))

    def readinto(self, buffer: Any) -> int:
        with one_error(self._path):
            return int(self._file.readinto(buffer))


@contextlib.contextmanager
def _writing(path: StorePath) -> Iterator[SimpleNamespace]:
    file = path.ask("open", "wb")

    def write(content: Any) -> None:
        with one_error(path):
            file.write(content)

    try:
        yield SimpleNamespace(write=write)
    except BaseException:
        with contextlib.suppress(Exception):
            file.discard()
        file.closed = True
        raise
    with one_error(path):
        file.close()


AT_ONCE = 32
"""So many requests of a process are under way at a time: each waits for the network."""

_pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="store")

T = TypeVar("T")
R = TypeVar("R")


def at_once(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results of calls that wait for the network, in order."""
    return list(_pool.map(call, items))


# Whole folders


def name_within(folder: AnyPath, path: AnyPath) -> str:
    """The path within a folder of what is below it, with slashes."""
    return str(path).removeprefix(f"{folder}/")


def file_sizes(folder: AnyPath) -> dict[str, int]:
    """Path within the folder -> bytes, of all files below it."""
    if isinstance(folder, Path):
        files = (path for path in folder.rglob("*") if path.is_file())
        return {name_within(folder, path): path.stat().st_size for path in files}
    return {
        place.removeprefix(f"{folder.place}/"): int(info["size"])
        for place, info in sorted(folder.ask("find", detail=True).items())
        if info["type"] == "file" and not place.endswith("/") and place != folder.place
    }


def sha256_of(path: AnyPath) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_tree(folder: AnyPath, first: str = "") -> None:
    """Removes a folder and all below it; nothing happens if it is not there.

    Args:
        first: a file of it that goes before all others.
    """
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    if first:
        (folder / first).unlink(missing_ok=True)
    if file_sizes(folder):
        folder.ask("rm", recursive=True)


def move_tree(folder: AnyPath, target: AnyPath, last: str = "") -> None:
    """Gives a folder another name; a store copies all files, then removes them.

    Args:
        target: is not there.
        last: a file that on a store is copied after all others, and removed before them.
    """
    if isinstance(folder, Path):
        assert isinstance(target, Path)
        folder.rename(target)
        return
    assert isinstance(target, StorePath)
    for name in sorted(file_sizes(folder), key=lambda name: name == last):
        (folder / name).ask("cp_file", (target / name).place)  # its bytes do not come here
    remove_tree(folder, last)


def json_object(file: AnyPath) -> dict[str, Any]:
    """The object in a file of JSON; an empty one if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


# tensorstore


def kvstore(folder: AnyPath) -> dict[str, Any]:
    """The spec for tensorstore of a folder, by its own driver."""
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder.absolute()}/"}
    _, bucket, *key = folder.parts
    spec: dict[str, Any] = {"bucket": bucket, "path": f"{'/'.join(key)}/"}
    if folder.scheme == "gs":
        return {"driver": "gcs", **spec}
    spec["driver"] = "s3"
    # fsspec's driver looks at these variables itself; tensorstore's does not.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def array_driver(state: AnyPath) -> str:
    """Tensorstore's driver of the arrays that orbax has written into a folder."""
    metadata = json.loads((state / "_METADATA").read_text(encoding="utf-8"))
    return "zarr3" if metadata.get("use_zarr3") else "zarr"


def array_spec(state: AnyPath, key: str, driver: str) -> dict[str, Any]:
    """The spec for tensorstore of an array in orbax's layout.

    Args:
        key: the array's name, such as `params.w`.
        driver: `zarr` or `zarr3`.
    """
    store = {"driver": "ocdbt", "base": kvstore(state), "path": f"{key}/"}
    return {"driver": driver, "kvstore": store}
