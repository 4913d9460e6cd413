"""How busy devices were, by a trace of jax's profiler."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spmd.measure.profile import read_folder

GAP_SECONDS = 0.2e-3
"""Gaps between kernels that are shorter are nobody's fault but the kernels'."""


class Busy(NamedTuple):
    """What devices did in a span of time."""

    share: float  # of the time in which a device ran anything
    gaps: int  # how often it ran nothing for longer than `GAP_SECONDS`
    longest: float  # the longest of these, in seconds; 0 if there are none


def busy(spans: Sequence[tuple[float, float]], seconds: float) -> Busy:
    """How busy one device was.

    Args:
      spans: start and end of all that it did, in seconds; several things may run at once.
      seconds: how long was looked on, from 0 on.

    Example:
      >>> busy([(0.0, 1.0), (0.5, 2.0), (3.0, 4.0)], 4.0)
      Busy(share=0.75, gaps=1, longest=1.0)
    """
    idle, until = [], 0.0
    for start, end in sorted(spans):
        if start > until:
            idle.append(min(start, seconds) - until)
        until = min(max(until, end), seconds)
    idle.append(seconds - until)
    long = [gap for gap in idle if gap > GAP_SECONDS]
    return Busy(1 - sum(idle) / seconds, len(long), max(long, default=0.0))


def read_busy(folder: str, devices: int) -> Busy:
    """What so many devices did in the step of a trace: the mean share, all gaps.

    Those without any event count as idle.
    """
    (step,) = read_folder(Path(folder))
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in step.events:
        spans.setdefault(event.device, []).append((event.start, event.end))
    of_each = [busy(found, step.seconds) for found in spans.values()]
    of_each += [busy([], step.seconds)] * (devices - len(of_each))
    share = sum(one.share for one in of_each) / devices
    return Busy(share, sum(one.gaps for one in of_each), max(one.longest for one in of_each))
