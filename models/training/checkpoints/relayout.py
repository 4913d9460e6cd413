"""Copies a training checkpoint in the pieces of another mesh: same arrays, other chunks on disk.

Any mesh can restore any checkpoint. If the chunks are the pieces of its devices, each process reads
no more than it needs. Arrays are copied piece by piece.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from spmd.models.progress import Advance, bytes_bar
from spmd.models.training.checkpoints import tables
from spmd.models.training.checkpoints.found import (
    AUTO,
    CheckpointError,
    find_saved,
    first_line,
    saved_steps,
)
from spmd.models.training.checkpoints.pieces import Index, Pieces
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.paths import array_driver, array_spec
from spmd.models.training.run.loop import TrainState

CACHE_BYTES = 1 << 28
"""Chunks that were read are kept up to this size: each may be needed for several written ones."""


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
    source, whole = folder / str(found.step) / "state", target / str(found.step)
    if whole.exists():
        raise CheckpointError(f"{whole} exists already; name another folder")
    later = [other for other in saved_steps(target) if other > found.step]
    if later:  # --resume would go on from there
        raise CheckpointError(
            f"{target} holds a run that has come to step {later[0]}; name another"
        )
    about = {**found.meta, "mesh": dict(mesh)}
    try:
        stored = _opened(source, found.meta["arrays"])
        total = sum(array.size * array.dtype.numpy_dtype.itemsize for array in stored.values())
        with (
            bytes_bar("copying", total, console) as advance,
            Checkpoints(target, keep_every=1, about=about, pieces=True) as checkpoints,
        ):
            leaves = {
                path: _pieces(array, found.meta["arrays"][path], mesh, advance)
                for path, array in stored.items()
            }
            tree = tables.nested(leaves)
            checkpoints.save(TrainState(tree["params"], tree.get("opt_state"), found.step))
            checkpoints.finish()
    except (CheckpointError, ValueError) as error:  # tensorstore's are of the second kind
        raise CheckpointError(f"{whole} cannot be written: {first_line(error)}") from error
    return found.step


def piece_shape(entry: Mapping[str, Any], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the piece that a device holds on a mesh.

    Args:
        entry: an array's entry in `meta.json`, with `shape` and `spec`.

    Example:
        >>> piece_shape({"shape": [8, 6], "spec": [["data", "model"], None]}, {"data": 2})
        (4, 6)
    """
    shape, spec = entry["shape"], entry["spec"]
    counts = [
        math.prod(mesh.get(axis, 1) for axis in ([axes] if isinstance(axes, str) else axes or ()))
        for axes in (*spec, *[None] * (len(shape) - len(spec)))
    ]
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


def _opened(state: Path, paths: Iterable[str]) -> dict[str, Any]:
    """Saved arrays by path; none is read yet."""
    import tensorstore

    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
    driver = array_driver(state)
    found = {}
    for path in paths:
        spec = array_spec(state, path.replace("/", "."), driver)
        found[path] = tensorstore.open(spec, open=True, read=True, context=context)
    return {path: opened.result() for path, opened in found.items()}


def _pieces(
    stored: Any, entry: Mapping[str, Any], mesh: Mapping[str, int], advance: Advance
) -> Pieces:
    """A saved array, which is read while it is written."""

    def read(index: Index) -> Any:
        block = stored[index].read().result()
        advance(block.nbytes)
        return block

    piece = piece_shape({**entry, "shape": stored.shape}, mesh)  # of a key's data, not of the key
    return Pieces(stored.shape, stored.dtype.name, None, piece, read)
