"""Whose time it is when a device does several things at once.

before: dot 0..4, all_gather 3..7, copy 6..8        (seconds)
after:  dot 4, all_gather 2 and 1 hidden, copy 2    (nothing waits for what runs beside it)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """Seconds of a device's time.

    Attributes:
      seconds: in which the device did this, and nothing that comes before it.
      hidden: in which it did this beside something that comes before it.
    """

    seconds: float
    hidden: float


def shares(spans: Sequence[tuple[int, float, float]]) -> list[Share]:
    """Divides the time of one device among what it did.

    Args:
      spans: (rank, start, end) of each thing. At any moment the time is that of the things with the
        lowest rank that run, in equal parts.

    Returns:
      The share of each. The `seconds` of all add up to the time in which anything ran.
    """
    seconds, hidden = [0.0] * len(spans), [0.0] * len(spans)
    edges = sorted(
        [(start, True, i) for i, (_, start, end) in enumerate(spans) if end > start]
        + [(end, False, i) for i, (_, start, end) in enumerate(spans) if end > start]
    )
    running: dict[int, set[int]] = {}
    before = 0.0
    for moment, begins, i in edges:
        levels = [running[rank] for rank in sorted(running) if running[rank]]
        for level, totals in zip(levels, (seconds, *[hidden] * len(levels)), strict=False):
            for j in level:
                totals[j] += (moment - before) / len(level)
        now = running.setdefault(spans[i][0], set())
        if begins:
            now.add(i)
        else:
            now.remove(i)
        before = moment
    return [Share(*share) for share in zip(seconds, hidden, strict=True)]
