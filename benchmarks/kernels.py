"""A step of any peer, by kind of kernel: events of a profile -> milliseconds."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmd.measure.labels import ATTENTION, COLLECTIVES, COPIES, MATRIX, OTHER, kernel_kind
from spmd.measure.profile import shares

KINDS = (MATRIX, ATTENTION, OTHER, COPIES)
HEADER = ("GPU busy", *KINDS, "exposed communication", "hidden communication")


class Kernel(NamedTuple):
    """What one device did: the kernel's name, and seconds from when until when."""

    name: str
    start: float
    end: float


class Kinds(NamedTuple):
    """Milliseconds of one step on one device."""

    busy: float  # in which anything ran
    # of each of `KINDS`, kernel by kernel; those that ran at once count twice
    kinds: tuple[float, ...]
    exposed: float  # of communication beside which nothing else ran
    hidden: float  # of the rest of it

    def cells(self) -> list[str]:
        """As `HEADER` has them."""
        return [f"{value:.1f}" for value in (self.busy, *self.kinds, self.exposed, self.hidden)]


def kinds_of(steps: Iterable[Sequence[Kernel]]) -> Kinds:
    """The mean of some steps of one device."""
    return _mean([_step(kernels) for kernels in steps])


def _step(kernels: Sequence[Kernel]) -> Kinds:
    kinds = [kernel_kind(kernel.name) for kernel in kernels]
    ranks = [int(kind == COLLECTIVES) for kind in kinds]
    spans = [(rank, k.start, k.end) for rank, k in zip(ranks, kernels, strict=True)]
    spent = shares(spans)
    totals = dict.fromkeys(KINDS, 0.0)
    for kernel, kind in zip(kernels, kinds, strict=True):
        if kind in totals:
            totals[kind] += kernel.end - kernel.start
    waits = [share for share, rank in zip(spent, ranks, strict=True) if rank]
    busy, exposed = sum(share.seconds for share in spent), sum(share.seconds for share in waits)
    hidden = sum(share.hidden for share in waits)
    milliseconds = tuple(seconds * 1e3 for seconds in totals.values())
    return Kinds(busy * 1e3, milliseconds, exposed * 1e3, hidden * 1e3)


def _mean(steps: Sequence[Kinds]) -> Kinds:
    kinds = tuple(map(statistics.fmean, zip(*(step.kinds for step in steps), strict=True)))
    busy, exposed, hidden = (
        statistics.fmean(getattr(step, name) for step in steps)
        for name in ("busy", "exposed", "hidden")
    )
    return Kinds(busy, kinds, exposed, hidden)
