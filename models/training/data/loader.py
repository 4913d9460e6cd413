"""Brings batches to the devices: each host reads the rows that its devices hold, ahead of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import jax
import numpy as np
import numpy.typing as npt
from absl import flags
from jax.sharding import Sharding

from spmd.models.training.data.samples import Batch, PackedTokens

LAST_STEP = 2**48
"""Larger than any step: grain wants sequences to have an end."""


class Placed(Iterator[Any]):
    """Iterates over batches that any function makes, as global arrays; they are made ahead of time.

    Args:
        dataset: step -> the whole batch, a tree of numpy arrays, the same on every process.
        shardings: how each leaf of a batch is split over the devices.
        prefetch: how many batches are made ahead.
    """

    def __init__(
        self, dataset: Callable[[int], Any], *, shardings: Any, start_step: int, prefetch: int = 4
    ) -> None:
        self._shardings = shardings
        self._batches = _read_ahead(lambda step: dataset(int(step)), start_step, prefetch, 0)

    def __next__(self) -> Any:
        return place(next(self._batches), self._shardings)

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *exception: object) -> None:
        self._batches.close()


class Loader(Iterator[dict[str, jax.Array]]):
    """Iterates over the batches from a step on, as global arrays.

    A host reads only the rows that its own devices hold. Hosts that hold copies of the same rows
    read the same ones. Which rows belong to a step depends on the dataset alone, so a run that is
    resumed with `start_step` sees the batches that it would have seen without the break.

    Args:
        batch_size: rows of a global batch; None takes the dataset's.
        shardings: how each leaf of a batch is split over the devices.
        prefetch: how many batches are read ahead.
        workers: number of processes that read; 0 reads in threads of this process, which is enough
            unless the disk is slow.

    Raises:
        ValueError: `shardings` has other leaves than a batch.

    Example:
        with Loader(dataset, shardings=compiled.in_shardings[2], start_step=100) as loader:
            batch = next(loader)
    """

    def __init__(
        self,
        dataset: PackedTokens,
        *,
        batch_size: int | None = None,
        shardings: Mapping[str, Sharding],
        start_step: int = 0,
        prefetch: int = 4,
        workers: int = 0,
    ) -> None:
        self._dataset = dataclasses.replace(dataset, batch_size=batch_size or dataset.batch_size)
        self._shardings = dict(shardings)
        structs = self.struct()
        if set(structs) != set(shardings):
            raise ValueError(f"shardings of {sorted(shardings)}, batches of {sorted(structs)}")
        shape = (self._dataset.batch_size, self._dataset.seq_len)
        self._rows = rows_of_host(shape, self._shardings)
        self._batches = _read_ahead(
            _HostRows(self._dataset, self._rows), start_step, prefetch, workers
        )

    def struct(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a global batch."""
        return self._dataset.struct()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        batch = next(self._batches)
        return {
            name: _place_rows(batch[name], self._rows, self._dataset.batch_size, sharding)
            for name, sharding in self._shardings.items()
        }

    def close(self) -> None:
        """Ends the threads and processes that read; may be called more than once."""
        self._batches.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class _HostRows:
    """Step -> the rows of its batch that this host holds."""

    dataset: PackedTokens
    rows: npt.NDArray[np.int64]

    def __call__(self, step: Any) -> Batch:
        return self.dataset.rows(int(step) * self.dataset.batch_size + self.rows)


def _read_ahead(read: Callable[[int], Any], start_step: int, prefetch: int, workers: int) -> Any:
    steps: Any = grain.MapDataset.range(start_step, LAST_STEP).map(read)
    threads = max(1, min(prefetch, 4))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(1, prefetch))
    batches = steps.to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads flags of its own, parsed or not
            flags.FLAGS.mark_as_parsed()
        batches = batches.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        )
    return iter(batches)


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
