"""Finds the files that a user names."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from models.training.errors import DataError


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Finds files by name, directory or glob pattern.

    Args:
        patterns: files, directories (all files below them), or glob patterns.

    Returns:
        The files, sorted, each one once.

    Raises:
        DataError: a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
        matches = matches or [path for path in [Path(pattern)] if path.exists()]
        below = (
            path for match in matches for path in (match.rglob("*") if match.is_dir() else [match])
        )
        files = {path for path in below if path.is_file()}
        if not files:
            raise DataError(f"no file matches {pattern!r}")
        found |= files
    return sorted(found)
