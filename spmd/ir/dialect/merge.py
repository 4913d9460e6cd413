"""Merges: each device works on its own piece of a dim, then all put together what they found.

An argmax over a dim split in four finds four maxima, and the maximum of these four is the answer:
what travels is small, however long the dim is. A sort exchanges whole pieces instead, two devices
at a time, in the rounds of a sorting network.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from spmd.ir.types import TensorType

Rounds = tuple[tuple[tuple[int, int], ...], ...]
"""For each round the pairs of tiles that meet, the one that keeps what comes first in front."""


class Merge(NamedTuple):
    """What devices exchange so that a `merge` factor may be split.

    Attributes:
      factor: the number of the factor.
      tensors: what each device contributes: the type of each tensor if no other factor is split,
        and the factors of its dims.
      network: whether tiles meet pair by pair in `rounds`; otherwise all tensors are gathered.
    """

    factor: int
    tensors: tuple[tuple[TensorType, tuple[tuple[int, ...], ...]], ...]
    network: bool = False


@lru_cache(maxsize=256)
def rounds(count: int) -> Rounds:
    """A network that sorts `count` tiles, each sorted in itself: any number of them.

    Batcher's merge exchange (Knuth, The Art of Computer Programming, 5.2.2, algorithm M). For
    equal tiles it holds as it does for single elements: a pair's tiles are merged, and one keeps
    the lower half.
    """
    # A pair (i, j) leaves the lower elements in tile i. Four tiles that hold 4 3 2 1 take three
    # rounds; pairs of one round are independent, so they run at the same time:
    #   (0, 2) (1, 3)   4 3 2 1 -> 2 1 4 3
    #   (0, 1) (2, 3)   2 1 4 3 -> 1 2 3 4
    #   (1, 2)          nothing to change here, but 1 3 2 4 would need it
    # Which tiles meet never depends on what they hold: that is why static permutes can do it.
    found = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    step = top if count > 1 else 0
    while step:
        reach, phase, apart = top, 0, step
        while True:
            found.append(tuple((i, i + apart) for i in range(count - apart) if i & step == phase))
            if reach == step:
                break
            apart, reach, phase = reach - step, reach // 2, step
        step //= 2
    return tuple(pairs for pairs in found if pairs)
