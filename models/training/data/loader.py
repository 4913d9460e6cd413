"""The batches of a run: packed tokens, of which a host reads its rows, or what a function makes.

They are read ahead of time, and brought to the devices.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import grain
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from spmd.models.training.data.samples import Batch, PackedTokens
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


LAST_STEP = 2**48
"""Larger than any step: grain wants sequences to have an end."""

AHEAD = 4
"""So many batches are made ahead; those of packed tokens by as many threads."""


@contextlib.contextmanager
def open_batches(
    data: Dataset, shardings: Callable[[Any], Any], start_step: int = 0, threads: int = 1
) -> Iterator[Iterator[Any]]:
    """The batches from a step on, read ahead and placed on the devices.

    Of packed tokens a host reads only the rows that its own devices hold. Hosts that hold copies of
    the same rows read the same ones. What a step has depends on the data alone, so a run that is
    resumed sees the batches that it would have seen without the break.

    Args:
        shardings: a batch, or structs of one -> how each leaf of it is split over the devices.
        threads: how many call a function at once.

    Example:
        with open_batches(data, lambda batch: compiled.in_shardings[2], start_step=100) as batches:
            batch = next(batches)
    """
    if isinstance(data, PackedTokens):
        threads = AHEAD
        read, put = _of_host(data, shardings(data.struct()))
    else:
        read, put = checked(data), lambda batch: place(batch, shardings(batch))
    steps: Any = grain.MapDataset.range(start_step, LAST_STEP).map(lambda step: read(int(step)))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(AHEAD, threads))
    batches: Any = iter(steps.to_iter_dataset(options))
    try:
        yield map(put, batches)
    finally:  # ends the threads that read
        batches.close()


def _of_host(
    data: PackedTokens, shardings: Mapping[str, Sharding]
) -> tuple[Callable[[int], Batch], Callable[[Batch], Any]]:
    """What reads this host's rows of a step's batch, and what places them."""
    rows = rows_of_host((data.batch_size, data.seq_len), shardings)

    def put(batch: Batch) -> dict[str, jax.Array]:
        return {
            name: _place_rows(batch[name], rows, data.batch_size, sharding)
            for name, sharding in shardings.items()
        }

    return lambda step: data.rows(data.first(step) + rows), put


def rows_of_host(
    shape: tuple[int, int], shardings: Mapping[str, Sharding]
) -> npt.NDArray[np.int64]:
    """The rows of a global batch (B, S) that this process's devices hold, in ascending order."""
    held: set[int] = set()
    for sharding in shardings.values():
        for index in sharding.addressable_devices_indices_map(shape).values():
            held.update(range(*(index or (slice(None),))[0].indices(shape[0])))
    return np.array(sorted(held), np.int64)


def _place_rows(
    leaf: npt.NDArray[Any], rows: npt.NDArray[np.int64], batch_size: int, sharding: Sharding
) -> jax.Array:
    """Makes a global array from the rows (R, S) of this host."""

    def shard(index: Any) -> npt.NDArray[Any]:
        start, stop, _ = index[0].indices(batch_size)
        low = int(np.searchsorted(rows, start))
        return leaf[(slice(low, low + stop - start), *index[1:])]

    return jax.make_array_from_callback((batch_size, *leaf.shape[1:]), sharding, shard)


def place(batch: Any, shardings: Any) -> Any:
    """A tree of numpy arrays -> global `jax.Array`s; each process copies only its own shards.

    Args:
        batch: the whole batch, the same on every process.
        shardings: a matching tree of `jax.sharding.Sharding`.
    """

    def one(leaf: npt.NDArray[Any], sharding: Sharding) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

    return jax.tree.map(one, batch, shardings)
