"""Which part of a mixture a sample comes from: shares kept at every place, and found at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import grain
import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

CYCLE = 1024
"""Samples after which the choice of parts repeats; shares are kept to half of one of these."""


class Shares(grain.transforms.DatasetSelectionMap):  # type: ignore[misc]
    """Number of a sample in the mixture -> (part, number of the sample in the part).

    grain's own mixing looks a number up by search, and takes milliseconds for one sample.

    Args:
        shares: of each part, positive, in any unit.
        length: how many samples there are to be.
    """

    def __init__(self, shares: Sequence[float], length: int) -> None:
        self._shares, self._length = tuple(shares), length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[int, int]:
        parts, ranks, counts = cycle(self._shares)
        turn, place = divmod(int(number), len(parts))
        part = int(parts[place])
        return part, turn * int(counts[part]) + int(ranks[place])


@functools.lru_cache(maxsize=16)
def cycle(shares: tuple[float, ...]) -> tuple[Int64s, Int64s, Int64s]:
    """Of each place of a cycle, the part, and how many of that part came before; the parts' counts.

    A part's samples are spread evenly. Every part has at least one.
    """
    wanted = np.array(shares) / sum(shares) * CYCLE
    counts = np.maximum(1, np.rint(wanted)).astype(np.int64)
    parts = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((ranks + 0.5) / counts[parts], kind="stable")
    return parts[order], ranks[order], counts
