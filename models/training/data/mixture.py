"""Mixes several sources: which one a sample comes from, in constant time and evenly spread.

With shares 3 and 1, a cycle of the mixture is a a b a (and so on), so every beginning of the
stream has nearly the wanted shares.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import grain
import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

CYCLE = 1024
"""After so many samples the pattern repeats. Shares are rounded to whole samples of a cycle."""


class MixtureShares(grain.transforms.DatasetSelectionMap):  # type: ignore[misc]
    """Number of a sample in the mixture -> (part, number of the sample in that part).

    grain's own mixing searches for the number, and takes milliseconds for one sample.

    Args:
        shares: of each part, positive, in any unit.
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
    """The order of parts in one cycle.

    A part's samples are spread evenly over the cycle, and every part has at least one.

    Returns:
        For each place of the cycle the part (C,), and how many samples of that part come before it
        in the cycle (C,); for each part, its samples in a cycle (P,).
    """
    wanted = np.array(shares) / sum(shares) * CYCLE
    counts = np.maximum(1, np.rint(wanted)).astype(np.int64)
    parts = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    # The i-th of n samples wants to be at (i + 0.5) / n of the cycle; ties go to the first part.
    order = np.argsort((ranks + 0.5) / counts[parts], kind="stable")
    return parts[order], ranks[order], counts
