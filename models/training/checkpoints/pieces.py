"""Arrays that are read while a checkpoint is written, piece by piece: none is whole in memory."""

from __future__ import annotations

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
"""Of what is read and written at a time: larger pieces are stored in several chunks."""

PENDING_BYTES = 1 << 25
"""So much may wait for the disk; what is written together is also listed together."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """An array to be saved that is nowhere yet; for `Checkpoints(pieces=True)` like a `jax.Array`.

    Args:
        shape, dtype: of the whole; `dtype` is numpy's name.
        sharding: over a mesh that needs no devices; `meta.json` tells of it.
        piece: shape of what is stored together, at most.
        read: gives a slice; its index has a slice with start and stop for each dim.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: NamedSharding
    piece: tuple[int, ...]
    read: Callable[[Index], npt.NDArray[Any]]


class PiecesHandler(type_handlers.NumpyHandler):  # type: ignore[misc]
    """Writes `Pieces` in orbax's format, one process, as they are read."""

    async def serialize(
        self,
        values: Sequence[Pieces],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """Writes all of it before it returns, so that an interrupt ends it."""
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
            block = np.ascontiguousarray(value.read(index))
            pending.append(array[index].write(block, can_reference_source_data_indefinitely=True))
            waiting += block.nbytes
            if waiting >= PENDING_BYTES:
                _end(pending)
                pending, waiting = [], 0
    finally:
        _end(pending)


def _end(pending: Sequence[Any]) -> None:
    """Waits for all that is being written: of what fails, nothing writes on."""
    failures = [error for error in [write.exception() for write in pending] if error is not None]
    if failures:
        raise failures[0]


def chunks(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Index]:
    """The parts of an array that a grid cuts it into, the last dim's fastest.

    Args:
        shape: of the array.
        chunk: of a part; those at the end may be smaller.
    """
    starts = [range(0, size, max(1, part)) for size, part in zip(shape, chunk, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            slice(low, min(low + part, size))
            for low, part, size in zip(corner, chunk, shape, strict=True)
        )


def chunk_shape(array: Any) -> tuple[int, ...]:
    """Shape of what tensorstore stores of an open array together."""
    return tuple(int(size) for size in array.chunk_layout.read_chunk.shape)
