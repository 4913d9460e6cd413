"""Reads safetensors that are on an object store: the header, then of each tensor what is needed."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from spmd.models.training.paths import StorePath, at_once

REQUEST_BYTES = 2**23
"""How much a request asks for; several are under way at a time."""

KEPT_BLOCKS = 4
"""Blocks of rows that are kept: the shards of columns on a host's devices need the same rows."""

BLOCK_BYTES = 2**26

HEADER_BYTES = 2**20
"""More than most headers have: one request reads such a file's header."""

_NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

Array = npt.NDArray[Any]


class RangedFile:
    """An open file of safetensors, with the methods of `safetensors.safe_open` that are used here.

    Raises:
        SafetensorError: it is truncated, or no such file.
        OSError: the store cannot be read.
    """

    # The format: 8 bytes with the header's length, the header in JSON, the data.

    def __init__(self, path: StorePath) -> None:
        size = path.stat().st_size
        begin = path.read_bytes(0, min(size, HEADER_BYTES))
        length = int.from_bytes(begin[:8], "little")
        if len(begin) < 8 or 8 + length > size:
            raise SafetensorError("the header is cut off")
        header = begin[8 : 8 + length]
        if len(header) < length:
            header += path.read_bytes(len(begin), 8 + length)
        try:
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SafetensorError(f"the header cannot be read: {error}") from error
        if 8 + length + end != size:
            raise SafetensorError(f"it has {size:,} bytes and should have {8 + length + end:,}")
        self.path, self._entries, self._data = path, entries, 8 + length
        self._kept = functools.lru_cache(maxsize=KEPT_BLOCKS)(self._rows)

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._entries)

    def get_slice(self, name: str) -> RangedTensor:
        """A tensor, of which nothing is read yet."""
        if name not in self._entries:
            raise SafetensorError(f"it has no tensor {name}")
        return RangedTensor(self, name, self._entries[name])

    def get_tensor(self, name: str) -> Array:
        """A whole tensor."""
        return self.read(name, tuple(slice(0, size) for size in self._entries[name]["shape"]))

    def read(self, name: str, index: tuple[slice, ...]) -> Array:
        """A slice of a tensor; rows of which a part is needed are read whole."""
        shape = tuple(self._entries[name]["shape"])
        if not shape:
            return self._rows(name, 0, 1).reshape(())
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        (low, high), rest = bounds[0], tuple(slice(*bound) for bound in bounds[1:])
        if all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True)):
            return self._rows(name, low, high).reshape(high - low, *shape[1:])
        made = np.empty([stop - start for start, stop in bounds], self._dtype(name))
        step = max(1, BLOCK_BYTES // max(1, self._row_bytes(name)))
        for start in range(low - low % step, high, step):
            block = self._kept(name, start, min(start + step, shape[0]))
            block = block.reshape(-1, *shape[1:])
            first, last = max(start, low), min(start + step, high)
            made[first - low : last - low] = block[(slice(first - start, last - start), *rest)]
        return made

    def _dtype(self, name: str) -> np.dtype[Any]:
        return _NUMPY[str(self._entries[name]["dtype"])]

    def _row_bytes(self, name: str) -> int:
        inner: list[int] = self._entries[name]["shape"][1:]
        return math.prod(inner) * int(self._dtype(name).itemsize)

    def _rows(self, name: str, low: int, high: int) -> Array:
        """Rows `low` to before `high`, flat."""
        begin, row = self._data + self._entries[name]["data_offsets"][0], self._row_bytes(name)
        starts = range(begin + low * row, begin + high * row, REQUEST_BYTES)

        def read(start: int) -> bytes:
            return self.path.read_bytes(start, min(start + REQUEST_BYTES, begin + high * row))

        return np.frombuffer(b"".join(at_once(read, starts)), self._dtype(name))


class RangedTensor:
    """A tensor of a `RangedFile`, with the methods of safetensors' slices."""

    def __init__(self, file: RangedFile, name: str, entry: dict[str, Any]) -> None:
        self._file, self._name, self._entry = file, name, entry

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """Safetensors' name of its dtype."""
        return str(self._entry["dtype"])

    def __getitem__(self, index: tuple[slice, ...]) -> Array:
        return self._file.read(self._name, index)
