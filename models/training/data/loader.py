"""Brings batches to the devices: each host reads the rows that its devices hold, ahead of time."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import grain
import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from spmd.models.training.data.samples import Batch, PackedTokens

LAST_STEP = 2**48
"""Larger than any step: grain wants sequences to have an end."""

AHEAD = 4
"""So many batches are made ahead; those of packed tokens by as many threads."""


class Loader(Iterator[Any]):
    """Iterates over batches that are read ahead of time, as global arrays.

    Args:
        read: step -> what this host has to hold of its batch.
        put: that -> the batch as global arrays.
        threads: how many call `read` at once; one does so step after step.
    """

    def __init__(
        self, read: Callable[[int], Any], put: Callable[[Any], Any], start_step: int, threads: int
    ) -> None:
        steps: Any = grain.MapDataset.range(start_step, LAST_STEP).map(lambda step: read(int(step)))
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(AHEAD, threads))
        self._batches: Any = iter(steps.to_iter_dataset(options))
        self._put = put

    def __next__(self) -> Any:
        return self._put(next(self._batches))

    def close(self) -> None:
        """Ends the threads that read; may be called more than once."""
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def load_any(
    dataset: Callable[[int], Any],
    *,
    shardings: Callable[[Any], Any],
    start_step: int,
    threads: int = 1,
) -> Loader:
    """The batches that any function makes, from a step on.

    Args:
        dataset: step -> the whole batch, a tree of numpy arrays, the same on every process.
        shardings: a batch -> how each leaf of it is split over the devices.
        threads: how many call `dataset` at once.
    """
    return Loader(dataset, lambda batch: place(batch, shardings(batch)), start_step, threads)


def load_rows(
    dataset: PackedTokens, *, shardings: Mapping[str, Sharding], start_step: int = 0
) -> Loader:
    """The batches of packed tokens from a step on.

    A host reads only the rows that its own devices hold. Hosts that hold copies of the same rows
    read the same ones. Which rows belong to a step depends on the dataset alone, so a run that is
    resumed with `start_step` sees the batches that it would have seen without the break.

    Args:
        shardings: how each leaf of a batch is split over the devices.

    Raises:
        ValueError: `shardings` has other leaves than a batch.

    Example:
        with load_rows(dataset, shardings=compiled.in_shardings[2], start_step=100) as loader:
            batch = next(loader)
    """
    structs = dataset.struct()
    if set(structs) != set(shardings):
        raise ValueError(f"shardings of {sorted(shardings)}, batches of {sorted(structs)}")
    rows = rows_of_host((dataset.batch_size, dataset.seq_len), shardings)

    def put(batch: Batch) -> dict[str, jax.Array]:
        return {
            name: _place_rows(batch[name], rows, dataset.batch_size, sharding)
            for name, sharding in shardings.items()
        }

    return Loader(lambda step: dataset.rows(dataset.first(step) + rows), put, start_step, AHEAD)


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
