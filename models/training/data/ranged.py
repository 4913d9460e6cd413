"""Tokens that stay on an object store: each window is read by a request of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from models.training.paths import StorePath


class RangedTokens:
    """The tokens of a file on a store (N,), of which slices can be read, like those of an array.

    Windows are read in a random order and once in an epoch, so nothing is kept.

    Args:
        path: the file; it holds tokens and nothing else.
    """

    def __init__(self, path: StorePath, dtype: np.dtype[Any], count: int) -> None:
        self.path, self.dtype, self._count = path, dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, window: slice) -> npt.NDArray[Any]:
        start, stop, _ = window.indices(self._count)
        size = self.dtype.itemsize
        return np.frombuffer(self.path.read_bytes(start * size, stop * size), self.dtype)
