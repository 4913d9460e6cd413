"""Weights as safetensors: streamed out tensor by tensor, read in shard by shard."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from rich.console import Console
from safetensors import SafetensorError, safe_open

from spmd.models.llama.weights.files import (
    DTYPE_NAMES,
    NUMPY_NAMES,
    Array,
    Folder,
    Index,
    TensorEntry,
    WeightsError,
    open_folder,
    plan_files,
    write_files,
)
from spmd.models.progress import Advance, bytes_bar
from spmd.models.shards import local_bytes, put_shards
from spmd.models.training.errors import shortened
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import STORED_AS, LeafEntry

MAX_FILE_BYTES = 5 * 10**8  # one thread hashes a file, at 1 GB a second
READING_THREADS = 4
"""As many shards are copied to devices at a time."""


def write_weights(
    folder: Path,
    leaves: Sequence[LeafEntry],
    arrays: Sequence[Any],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    console: Console | None = None,
) -> None:
    """Write weights, one array in memory at a time.

    Args:
      folder: new.
      arrays: for each, what `numpy.asarray` reads it from. Those with an attribute `together` of
        one value are read one after the other.
      max_file_bytes: bytes of tensors in one file; a larger tensor gets one of its own.

    Raises:
      BundleError: an array that is not what its leaf says, or cannot be read.
    """
    folder.mkdir()
    pairs = sorted(
        zip(leaves, arrays, strict=True), key=lambda pair: getattr(pair[1], "together", "")
    )
    leaves, arrays = [leaf for leaf, _ in pairs], [array for _, array in pairs]
    entries = [TensorEntry(leaf.path, leaf.shape, STORED_AS[leaf.dtype]) for leaf in leaves]
    plan = plan_files(entries, max_file_bytes)
    with bytes_bar("writing weights", sum(entry.nbytes for entry in entries), console) as advance:
        write_files(folder, plan, _stored(leaves, arrays, advance))


def _stored(
    leaves: Sequence[LeafEntry], arrays: Sequence[Any], advance: Advance
) -> Iterator[Array]:
    for leaf, lazy in zip(leaves, arrays, strict=True):
        array = np.asarray(lazy)
        if (array.shape, array.dtype.name) != (leaf.shape, leaf.dtype):
            raise BundleError(
                f"{leaf.path} is read as {array.dtype.name}{list(array.shape)} and was said to be "
                f"{leaf.dtype}{list(leaf.shape)}"
            )
        yield array.view(STORED_AS[leaf.dtype])
        advance(array.nbytes)


def check_stored(folder: Path, leaves: Sequence[LeafEntry]) -> None:
    """Raise a `BundleError` unless a folder holds these arrays and no others: headers are read."""
    with _opened(folder) as stored:
        wanted = {leaf.path: leaf for leaf in leaves}
        differing = sorted(stored.tensors.keys() ^ wanted.keys())
        if differing:
            raise BundleError(
                f"{folder} and the manifest disagree about {shortened(differing)}: it is in one of "
                "them alone"
            )
        for path, leaf in wanted.items():
            tensor = stored.tensors[path]
            if (tensor.shape, tensor.dtype) != (leaf.shape, DTYPE_NAMES[STORED_AS[leaf.dtype]]):
                raise BundleError(
                    f"{tensor.file}: {path} is {tensor.dtype}{list(tensor.shape)} and the manifest "
                    f"says {leaf.dtype}{list(leaf.shape)}"
                )


def read_weights(
    folder: Path,
    leaves: Sequence[LeafEntry],
    shardings: Mapping[str, Sharding],
    console: Console | None = None,
) -> dict[str, jax.Array]:
    """Weights on the mesh, each shard read straight from the file and once in a process.

    Args:
      shardings: path -> where it goes.
    """
    if not leaves:
        return {}
    total = sum(local_bytes(leaf.shape, leaf.dtype, shardings[leaf.path]) for leaf in leaves)
    with _opened(folder) as stored, bytes_bar("loading weights", total, console) as advance:

        def read(leaf: LeafEntry) -> jax.Array:
            def shard(index: Index) -> Array:
                return stored.view(leaf.path, index).view(leaf.dtype)

            return put_shards(leaf.shape, leaf.dtype, shardings[leaf.path], shard, advance)

        with concurrent.futures.ThreadPoolExecutor(READING_THREADS) as pool:
            arrays = list(pool.map(read, leaves))
    return {leaf.path: array for leaf, array in zip(leaves, arrays, strict=True)}


def lazy_tensors(file: str | Path) -> "dict[str, LazyTensor]":
    """The tensors of a file of safetensors, each read when it is asked for.

    Raises:
      BundleError: no such file, or one that is truncated or no safetensors file.
    """
    path = Path(file)
    try:
        with safe_open(path, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: LazyTensor(path, name, tuple(s.get_shape()), NUMPY_NAMES[s.get_dtype()])
                for name, s in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path} cannot be read as safetensors: {error}") from error
    except KeyError as error:
        raise BundleError(
            f"{path} has tensors of the dtype {error}, which cannot be read"
        ) from None


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file; `numpy.asarray` reads it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del copy
        with safe_open(self.file, framework="np") as opened:
            array: Array = opened.get_tensor(self.name)
        return np.asarray(array, dtype)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Folder]:
    """`open_folder`, whose errors are ours."""
    try:
        with open_folder(folder) as stored:
            yield stored
    except WeightsError as error:
        raise BundleError(str(error)) from error
