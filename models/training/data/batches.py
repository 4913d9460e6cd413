"""The batches of a run: packed tokens, of which a host reads its rows, or what a function makes."""

import hashlib
from typing import Any, Protocol

import jax
import numpy as np

from spmd.models.training.data.loader import Loader, Placed
from spmd.models.training.data.samples import PackedTokens


class Dataset(Protocol):
    """Batches by step: a step has the same batch whenever it is asked for."""

    def __call__(self, step: int) -> Any:
        """The whole batch of a step, a tree of numpy arrays; steps count from 0."""


def structs_of(data: Dataset) -> Any:
    """Shapes and dtypes of a batch."""
    if isinstance(data, PackedTokens):
        return data.struct()
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data(0))


def fingerprint(data: Dataset) -> str:
    """A hash of the data, or where it has none of its own, of its first batch."""
    if isinstance(data, PackedTokens):
        return data.fingerprint
    leaves = jax.tree_util.tree_leaves_with_path(data(0))
    hashed = hashlib.sha256()
    for path, leaf in leaves:
        array = np.ascontiguousarray(leaf)
        hashed.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()


def open_batches(
    data: Dataset, shardings: Any, start_step: int, threads: int = 1
) -> Loader | Placed:
    """The batches from a step on, read ahead and placed on the devices."""
    if isinstance(data, PackedTokens):
        return Loader(data, shardings=shardings, start_step=start_step)
    return Placed(data, shardings=shardings, start_step=start_step, threads=threads)
