"""Lists the files of a folder with their hashes, so that damaged or missing files are noticed.

{"schema": 1, "files": {"meta.json": {"bytes": 2184, "sha256": "9f86d0..."}, ...}}
"""

import concurrent.futures
import json
from collections.abc import Iterable
from typing import Any

from spmd.models.training.paths import AnyPath, file_sizes, name_within, sha256_of

MANIFEST = "manifest.json"
SCHEMA = 1
NOT_LISTED = (MANIFEST, "commit_success.txt", "_CHECKPOINT_METADATA")
"""Itself, and what orbax writes or changes when it renames a folder; none of that is read."""

HASHING_THREADS = 8

PART = "hashes.process_"
"""How the files begin in which processes write down what they have hashed."""

Listed = dict[str, dict[str, Any]]
"""A file's path within the folder -> `bytes` and `sha256`."""


def hashed(folder: AnyPath, files: Iterable[AnyPath]) -> Listed:
    """Size and SHA-256 of files below a folder, as they are read back from the disk."""
    chosen = [path for path in files if path.is_file() and path.name not in NOT_LISTED]
    chosen.sort(key=str)
    with concurrent.futures.ThreadPoolExecutor(HASHING_THREADS) as pool:
        hashes = list(pool.map(_sha256, chosen))
    return {
        name_within(folder, path): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(chosen, hashes, strict=True)
    }


def write_part(folder: AnyPath, files: Iterable[AnyPath], process: int) -> None:
    """Writes down what one process has hashed, for `write_manifest`.

    Args:
        files: those that this process has written.
    """
    text = json.dumps(hashed(folder, files))
    (folder / f"{PART}{process}.json").write_text(text, encoding="utf-8")


def write_manifest(folder: AnyPath) -> None:
    """Writes size and SHA-256 of every file below a folder into its `manifest.json`.

    What processes have hashed by `write_part` is not read again.
    """
    listed: Listed = {}
    parts: list[AnyPath] = list(folder.rglob(f"{PART}*.json"))
    for part in parts:
        for name, expected in json.loads(part.read_text(encoding="utf-8")).items():
            listed[name_within(folder, part.parent / name)] = expected
        part.unlink()
    rest = (path for path in folder.rglob("*") if name_within(folder, path) not in listed)
    listed |= hashed(folder, rest)
    text = json.dumps({"schema": SCHEMA, "files": dict(sorted(listed.items()))}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def find_damage(folder: AnyPath, part: int = 0, parts: int = 1) -> str | None:
    """Compares a folder with its manifest.

    Args:
        part: which of `parts` shares of the files to hash; sizes are compared for all.
        parts: number of processes that share the work.

    Returns:
        What is wrong, in words; None if nothing is.
    """
    listed = _read(folder / MANIFEST)
    if isinstance(listed, str):
        return listed
    # Sizes first: that is quick, and finds what most crashes and full disks leave behind.
    sizes = file_sizes(folder)
    for name, expected in listed.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != expected["bytes"]:
            return f"{name} has {sizes[name]:,} bytes instead of {expected['bytes']:,}"
    chosen = list(listed)[part::parts]
    with concurrent.futures.ThreadPoolExecutor(HASHING_THREADS) as pool:
        hashes = pool.map(_sha256, [folder / name for name in chosen])
        for name, digest in zip(chosen, hashes, strict=True):
            if digest != listed[name]["sha256"]:
                return f"{name} does not hold what was written"
    return None


def _read(path: AnyPath) -> dict[str, Any] | str:
    """The files that a manifest lists; a string with the reason if it cannot be read."""
    try:
        files: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["files"]
        for expected in files.values():
            int(expected["bytes"]), str(expected["sha256"])
    except FileNotFoundError:
        return f"{path.name} is missing: the save was not finished"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{path.name} cannot be read ({error})"
    return files


def _sha256(path: AnyPath) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"unreadable: {error}"
