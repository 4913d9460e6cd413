"""Paths that users give: on a disk, or `s3://` and `gs://`. Whether one is local is decided here.

`as_path` turns what a user wrote into a `pathlib.Path`, or into a `StorePath`, which has the same
methods over an object store. Code that reads and writes by these methods works with both. What an
object store lacks (renaming, appending, mapping into memory) is asked for by `isinstance`.

Files go through fsspec, arrays through tensorstore's own drivers; both take the credentials from
where the store's own tools do.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmd.models.training.store_path import StoreError, StorePath, at_once

__all__ = ["AnyPath", "StoreError", "StorePath", "as_path", "at_once", "is_url"]

AnyPath = Path | StorePath

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://")


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


# Whole folders


def name_within(folder: AnyPath, path: AnyPath) -> str:
    """The path within a folder of what is below it, with slashes."""
    return str(path).removeprefix(f"{folder}/")


def file_sizes(folder: AnyPath) -> dict[str, int]:
    """Path within the folder -> bytes, of all files below it."""
    if isinstance(folder, Path):
        files = (path for path in folder.rglob("*") if path.is_file())
        return {name_within(folder, path): path.stat().st_size for path in files}
    return folder.sizes()


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
    folder.remove_all()


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
    names = sorted(file_sizes(folder), key=lambda name: name == last)
    for name in names:
        (folder / name).copy_to(target / name)
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
        key: the array's name, such as `params.w`.
        driver: `zarr` or `zarr3`.
    """
    store = {"driver": "ocdbt", "base": kvstore(state), "path": f"{key}/"}
    return {"driver": driver, "kvstore": store}
