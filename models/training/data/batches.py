"""The batches of a run: packed tokens, of which a host reads its rows, or what a function makes."""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from spmd.models.training.data.loader import Loader, load_any, load_rows
from spmd.models.training.data.samples import PackedTokens
from spmd.models.training.errors import DataError


class Dataset(Protocol):
    """Batches by step: a step has the same batch whenever it is asked for."""

    def __call__(self, step: int) -> Any:
        """The whole batch of a step, a tree of numpy arrays; steps count from 0."""


def structs_of(data: Dataset) -> Any:
    """Shapes and dtypes of a batch."""
    if isinstance(data, PackedTokens):
        return data.struct()
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), checked(data)(0))


def fingerprint(data: Dataset) -> str:
    """A hash of the data, or where it has none of its own, of its first batch."""
    if isinstance(data, PackedTokens):
        return data.fingerprint
    leaves = jax.tree_util.tree_leaves_with_path(checked(data)(0))
    hashed = hashlib.sha256()
    for path, leaf in leaves:
        array = np.ascontiguousarray(leaf)
        hashed.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()


def checked(data: Dataset, called: str = "data") -> Dataset:
    """A function of one's own, whose mistakes are `DataError`s that say the step."""

    def batch_of(step: int) -> Any:
        try:
            batch = data(step)
        except (StopIteration, IndexError) as error:
            raise DataError(
                f"{called}({step}) raised {error!r}: a run needs a batch of every step, and steps "
                "count from 0; begin anew where the data ends, as by step % count"
            ) from error
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch) or [((), batch)]:
            kind = getattr(leaf, "dtype", None)
            is_number = kind is not None and (jnp.issubdtype(kind, np.number) or kind == np.bool_)
            if is_number and leaf.ndim:
                continue
            what = f"{'a scalar' if is_number else 'an array'} of {kind}" if kind else f"{leaf}"
            raise DataError(
                f"{called}({step}){''.join(map(str, path))} is {what[:60]}: a batch is a tree of "
                "arrays of numbers with a row for each sample (np.array(a list), "
                "jax.random.key_data(a key))"
            )
        return batch

    return batch_of


def open_batches(
    data: Dataset, shardings: Callable[[Any], Any], start_step: int, threads: int = 1
) -> Loader:
    """The batches from a step on, read ahead and placed on the devices.

    Args:
        shardings: of a batch of such a number of rows.
    """
    if isinstance(data, PackedTokens):
        return load_rows(data, shardings=shardings(data.struct()), start_step=start_step)
    return load_any(checked(data), shardings=shardings, start_step=start_step, threads=threads)
