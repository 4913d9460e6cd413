"""The files of a bundle: each is there, is what was written, and nothing else is."""

import concurrent.futures
import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from spmd.models.llama.weights.files import WeightsError
from spmd.models.llama.weights.save import appearing
from spmd.models.progress import Advance, bytes_bar
from spmd.serving.bundle.checked import LARGEST, read_json
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import MANIFEST, Manifest, StoredFile
from spmd.serving.bundle.manifest_json import from_json

HASHING_THREADS = 8
DEEPEST = 8
_CHUNK = 1 << 22


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to write a bundle to, which takes its name once it is whole.

    Raises:
      BundleError: there is something of that name, or it cannot be written.
    """
    try:
        with appearing(Path(folder)) as unfinished:
            yield unfinished
    except WeightsError as error:
        raise BundleError(str(error)) from error
    except OSError as error:
        # A full disk says nothing of where it is.
        raise BundleError(f"{folder} cannot be written: {error.strerror or error}") from error


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a bundle; of the files only names and sizes are compared with it.

    Raises:
      BundleError: no bundle, or one whose manifest is broken, or files that are missing, of
        another size, links, or not listed.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        raise BundleError(f"{folder} is no folder; name one that export made")
    if not path.exists():
        raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}")
    found = dict(_walk(folder))
    if path.stat().st_size > LARGEST:
        raise BundleError(f"{path} is longer than {LARGEST:,} bytes")
    try:
        manifest = from_json(read_json(path.read_bytes(), str(path)), str(path))
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    found.pop(MANIFEST)
    for name, stored in manifest.files.items():
        if name not in found:
            raise BundleError(f"{folder / name} is missing; copy the whole bundle again")
        if found[name] != stored.size:
            raise BundleError(
                f"{folder / name} has {found[name]:,} bytes instead of {stored.size:,}; copy the "
                "bundle again"
            )
    extra = sorted(found.keys() - manifest.files.keys())
    if extra:
        raise BundleError(f"{folder / extra[0]} does not belong to the bundle; move it elsewhere")
    return manifest


def _walk(folder: Path, below: str = "") -> Iterator[tuple[str, int]]:
    """(path, bytes) of every file; nothing but files and folders may be there."""
    if below.count("/") > DEEPEST:
        raise BundleError(f"{folder}: a bundle has no folders that deep")
    with os.scandir(folder) as listing:
        entries = list(listing)
    for entry in entries:
        name = below + entry.name
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(Path(entry.path), f"{name}/")
        elif stat.S_ISREG(status.st_mode):
            yield name, status.st_size
        else:
            raise BundleError(f"{entry.path} is a link or no file; a bundle holds plain files")


def check_hashes(
    folder: str | Path,
    manifest: Manifest,
    console: Console | None = None,
    names: Iterable[str] | None = None,
) -> None:
    """Read files and compare their SHA-256; processes of one job share the files.

    Args:
      names: of the files; None is all.

    Raises:
      BundleError: on every process, where a file does not hold what was written.
    """
    names = sorted(manifest.files if names is None else names)
    names = names[jax.process_index() :: jax.process_count()]
    total = sum(manifest.files[name].size for name in names)
    damage: str | None = None
    with bytes_bar("checking", total, console) as advance:
        for name, digest in _hashes(Path(folder), names, advance):
            expected = manifest.files[name].sha256
            if digest != expected:
                damage = (
                    f"{Path(folder) / name} does not hold what was written (SHA-256 "
                    f"{digest[:12]}... instead of {expected[:12]}...); copy the bundle again"
                )
                break
    if jax.process_count() > 1:
        damaged = np.flatnonzero(multihost_utils.process_allgather(np.int32(damage is not None)))
        if damaged.size and damage is None:
            damage = f"{folder}: process {damaged[0]} found a damaged file and says which"
    if damage is not None:
        raise BundleError(damage)


def hash_files(folder: Path, console: Console | None = None) -> dict[str, StoredFile]:
    """Size and SHA-256 of every file of a folder, as read back from the disk."""
    found = dict(_walk(folder))
    with bytes_bar("hashing", sum(found.values()), console) as advance:
        hashes = _hashes(folder, sorted(found), advance)
        return {name: StoredFile(found[name], digest) for name, digest in hashes}


def _hashes(folder: Path, names: Sequence[str], advance: Advance) -> Iterator[tuple[str, str]]:
    with concurrent.futures.ThreadPoolExecutor(HASHING_THREADS) as pool:
        digests = pool.map(lambda name: _sha256(folder / name, advance), names)
        yield from zip(names, digests, strict=True)


def _sha256(path: Path, advance: Advance) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                advance(len(chunk))
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return digest.hexdigest()
