"""Finds the files that a user names."""

import glob
from collections.abc import Sequence
from pathlib import Path

from spmd.models.training.errors import DataError
from spmd.models.training.paths import AnyPath, StorePath, as_path


def find_files(patterns: Sequence[str]) -> list[AnyPath]:
    """Finds files by name, directory or glob pattern.

    Args:
        patterns: files, directories (all files below them), or glob patterns; also URLs of an
            object store.

    Returns:
        The files, sorted, each one once.

    Raises:
        DataError: a pattern matches no file.
        StoreError: a store cannot be read.
    """
    found: set[AnyPath] = set()
    for pattern in patterns:
        path = as_path(pattern)
        if isinstance(path, StorePath):
            files = _on_store(path)
        else:
            matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
            matches = matches or ([path] if path.exists() else [])
            below = (x for m in matches for x in (m.rglob("*") if m.is_dir() else [m]))
            files = {one for one in below if one.is_file()}
        if not files:
            raise DataError(f"no file matches {pattern!r}")
        found |= files
    return sorted(found, key=lambda path: (isinstance(path, StorePath), path))


def _on_store(path: StorePath) -> set[AnyPath]:
    if path.is_file():
        return {path}
    if not any(sign in path.place for sign in "*?["):
        return set(path.rglob("*"))
    return {one for one in path.parent.glob(path.name) if one.is_file()}
