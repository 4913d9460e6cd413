"""Saves arrays that are read while they are written, piece by piece: none is whole in memory."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers

Index = tuple[slice, ...]

CHUNK_BYTES = 1 << 24
"""How much is read and written at a time; larger pieces are stored in several chunks."""

PENDING_BYTES = 1 << 25
"""So many bytes may wait to be written. What is written together is also listed together."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """An array that is not in memory; `Checkpoints(pieces=True)` saves it like a `jax.Array`."""

    shape: tuple[int, ...]  # of the whole array
    dtype: str  # numpy's name of it
    # how the array is split; for `meta.json` only, so the mesh needs no devices; None if that is
    # told what to say
    sharding: NamedSharding | None
    piece: tuple[int, ...]  # shape of the largest part that is stored in one chunk
    # returns the part at an index, which is a slice with start and stop for each dim
    read: Callable[[Index], npt.NDArray[Any]]


class PiecesHandler(type_handlers.NumpyHandler):  # type: ignore[misc]
    """Writes `Pieces` in orbax's format, in one process."""

    async def serialize(
        self,
        values: Sequence[Pieces],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """Writes all pieces before it returns: an interrupt leaves no thread that writes on."""
        del args
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            _write(value, info)
        return []


def _write(value: Pieces, info: type_handlers.ParamInfo) -> None:
    import tensorstore

    spec = type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=value.shape,
        local_shape=value.piece,
        dtype=jnp.dtype(value.dtype),
        process_index=jax.process_index(),
        arg=type_handlers.SaveArgs(chunk_byte_size=CHUNK_BYTES),
    )
    array = tensorstore.open(
        tensorstore.Spec(spec), create=True, open=True, context=info.ts_context
    ).result()
    pending: list[Any] = []
    waiting = 0
    try:
        for index in chunks(value.shape, chunk_shape(array)):
            block = np.asarray(value.read(index), order="C")
            pending.append(array[index].write(block, can_reference_source_data_indefinitely=True))
            waiting += block.nbytes
            if waiting >= PENDING_BYTES:
                _end(pending)
                pending, waiting = [], 0
    finally:
        _end(pending)


def _end(pending: Sequence[Any]) -> None:
    """Waits for all writes, then raises the first error: no write goes on in the background."""
    failures = [error for error in [write.exception() for write in pending] if error is not None]
    if failures:
        raise failures[0]


def chunks(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Index]:
    """Cuts an array into a grid of parts; the last dim varies fastest.

    Args:
        chunk: shape of a part; those at the ends may be smaller.

    Example:
        >>> list(chunks((3, 2), (2, 2)))
        [(slice(0, 2), slice(0, 2)), (slice(2, 3), slice(0, 2))]
    """
    starts = [range(0, size, max(1, part)) for size, part in zip(shape, chunk, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            slice(low, min(low + part, size))
            for low, part, size in zip(corner, chunk, shape, strict=True)
        )


def chunk_shape(array: Any) -> tuple[int, ...]:
    """The shape of the chunks in which tensorstore stores an open array."""
    return tuple(map(int, array.chunk_layout.read_chunk.shape or ()))  # None of a scalar
