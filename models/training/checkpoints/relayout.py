"""Copies a training checkpoint in the pieces of another mesh: same arrays, other chunks on disk.

Any mesh can restore any checkpoint. If the chunks are the pieces of its devices, each process reads
no more than it needs. Arrays are copied piece by piece.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from spmd.models.progress import bytes_bar
from spmd.models.training.checkpoints.found import (
    AUTO,
    META,
    CheckpointError,
    find_saved,
    first_line,
    saved_steps,
)
from spmd.models.training.checkpoints.manifest import MANIFEST, write_manifest
from spmd.models.training.checkpoints.pieces import chunks
from spmd.models.training.paths import array_spec

STATE = "state"
TREE = "_METADATA"
CACHE_BYTES = 1 << 28
"""Chunks that were read are kept up to this size: each may be needed for several written ones."""

_COPIED = ("_CHECKPOINT_METADATA", "commit_success.txt")


def relayout(
    folder: Path,
    target: Path,
    mesh: Mapping[str, int],
    *,
    step: int | str = AUTO,
    console: Console | None = None,
) -> int:
    """Copies a checkpoint in the pieces that the devices of a mesh hold.

    Each array is split over the same axes as before, with the new mesh's sizes. An axis that the
    new mesh lacks counts as one of size 1. The copy gets its name when it is complete.

    Args:
        folder: holds checkpoints; it is not changed.
        target: another folder for checkpoints; made if it is not there.
        mesh: axis -> size.
        step: the checkpoint's, or `auto` for the latest that is whole.

    Returns:
        The checkpoint's step.

    Raises:
        CheckpointError: there is no such checkpoint, or the target cannot be written, or has a
            checkpoint of that step or a later one already.
    """
    found = find_saved(folder, step)
    source, whole = folder / str(found.step), target / str(found.step)
    if whole.exists():
        raise CheckpointError(f"{whole} exists already; name another folder")
    later = [other for other in saved_steps(target) if other > found.step]
    if later:  # --resume would go on from there
        raise CheckpointError(
            f"{target} holds a run that has come to step {later[0]}; name another"
        )
    unfinished = target / f".{found.step}.unfinished-{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
        _copy(source, unfinished, found.meta, mesh, console)
        unfinished.rename(whole)
    except (OSError, ValueError) as error:  # tensorstore's are of the second kind
        raise CheckpointError(f"{whole} cannot be written: {first_line(error)}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return found.step


def _copy(
    source: Path,
    target: Path,
    meta: Mapping[str, Any],
    mesh: Mapping[str, int],
    console: Console | None,
) -> None:
    tree = json.loads((source / STATE / TREE).read_text(encoding="utf-8"))
    driver = "zarr3" if tree.get("use_zarr3") else "zarr"
    arrays = meta["arrays"]
    pieces = {path: piece_shape(entry, mesh) for path, entry in arrays.items()}
    (target / STATE).mkdir()
    total = sum(math.prod(e["shape"]) * jnp.dtype(e["dtype"]).itemsize for e in arrays.values())
    with bytes_bar("copying", total, console) as advance:
        for path, piece in pieces.items():
            for nbytes in _copy_array(source / STATE, target / STATE, driver, path, piece):
                advance(nbytes)
    # Orbax notes the size of chunks in its metadata as well.
    for entry in tree["tree_metadata"].values():
        path = "/".join(key["key"] for key in entry["key_metadata"])
        entry["value_metadata"]["write_shape"] = list(pieces[path])
    _write_json(target / STATE / TREE, tree)
    _write_json(target / META, {**meta, "mesh": dict(mesh)})
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
        if (source / STATE / name).is_file():
            shutil.copyfile(source / STATE / name, target / STATE / name)
    write_manifest(target)
    assert (target / MANIFEST).is_file()


def piece_shape(entry: Mapping[str, Any], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the piece that a device holds on a mesh.

    Args:
        entry: an array's entry in `meta.json`, with `shape` and `spec`.

    Example:
        >>> piece_shape({"shape": [8, 6], "spec": [["data", "model"], None]}, {"data": 2, "model":
        2}) (2, 6)
    """
    shape, spec = entry["shape"], entry["spec"]
    counts = [
        math.prod(mesh.get(axis, 1) for axis in ([axes] if isinstance(axes, str) else axes or ()))
        for axes in (*spec, *[None] * (len(shape) - len(spec)))
    ]
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


def _copy_array(
    source: Path, target: Path, driver: str, path: str, piece: Sequence[int]
) -> Iterator[int]:
    """Copies an array; yields the bytes of each piece once it is written."""
    import tensorstore

    key = path.replace("/", ".")
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
    stored = tensorstore.open(
        array_spec(source, key, driver), open=True, read=True, context=context
    ).result()
    made = tensorstore.open(
        array_spec(target, key, driver),
        create=True,
        dtype=stored.dtype,
        shape=stored.shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=[max(1, size) for size in piece]),
    ).result()
    for index in chunks(stored.shape, piece):
        block = stored[index].read().result()
        made[index].write(block).result()
        yield block.nbytes


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
