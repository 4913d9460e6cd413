"""Requests to one function of tensors, joined: one call has the rows of several requests.

    requests of 2, 1 and 4 rows -> 7 rows, padded to 8 -> one call -> its rows, taken apart

A request waits for nothing but the thread: who waits when a call begins is joined to it.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spmd.serving.engine.infer import Array, Infer
from spmd.serving.engine.statistics import Statistics
from spmd.serving.engine.workers import JointCall

Tensors = Mapping[str, Array]


def sizes_of(infer: Infer) -> tuple[int, ...]:
    """How many rows a call may have, in order; none if requests cannot be joined."""
    return tuple(getattr(infer, "batch_sizes", ()))


def why_not_joined(infer: Infer) -> str:
    """Why requests cannot be joined; empty if nobody expects it."""
    return str(getattr(infer, "not_batched", ""))


class Batches:
    """Calls of a function for clients, several in one where it has a batch."""

    def __init__(self, infer: Infer, statistics: Statistics) -> None:
        self._infer, self._statistics = infer, statistics
        self._sizes = sizes_of(infer)

    def call(self, tensors: Tensors) -> Callable[[], Tensors]:
        """The function on a request's tensors, for `Workers.run`, which joins such calls.

        Args:
          tensors: all inputs by name, of their dtypes and shapes.

        Raises:
          ValueError: they have too many rows, or not all as many.
        """
        if not self._sizes:
            return lambda: self._infer_timed(tensors, 1)
        rows, most = _rows(tensors), self._sizes[-1]
        if not 1 <= rows <= most:
            raise ValueError(f"a request may have 1 to {most} rows, not {rows}: send several")
        return JointCall(self._joined, tensors, rows, most)

    def _joined(self, requests: Sequence[Tensors]) -> Sequence[Tensors]:
        """The results of each request, from one call."""
        counts = [_rows(tensors) for tensors in requests]
        total = sum(counts)
        size = next(size for size in self._sizes if size >= total)
        inputs = {
            name: _padded([tensors[name] for tensors in requests], size) for name in requests[0]
        }
        results = self._infer_timed(inputs, total)
        ends = np.cumsum(counts)
        return [
            {name: array[end - count : end] for name, array in results.items()}
            for count, end in zip(counts, ends, strict=True)
        ]

    def _infer_timed(self, tensors: Tensors, rows: int) -> Tensors:
        started = time.monotonic()
        results = self._infer.infer(tensors)
        self._statistics.called(rows, time.monotonic() - started)
        return results


def _rows(tensors: Tensors) -> int:
    counts = {name: len(array) for name, array in tensors.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ValueError(f"all inputs have to have as many rows: {told}")
    return next(iter(counts.values()))


def _padded(arrays: Sequence[Array], size: int) -> Array:
    """Rows of several arrays, and copies of the last one up to a size.

    Copies are as good as any other row, where zeros might make a loop run longer, or trap.
    """
    missing = size - sum(len(array) for array in arrays)
    last = arrays[-1][-1:]
    parts = [*arrays, *([np.repeat(last, missing, axis=0)] if missing else [])]
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
