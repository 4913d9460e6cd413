"""A step of any peer: events of a profile -> milliseconds by kind of kernel; and joules."""

import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from spmd.measure.labels import ATTENTION, COLLECTIVES, COPIES, MATRIX, OTHER, kernel_kind
from spmd.measure.profile import Step, shares

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


def of_first_device(step: Step) -> list[Kernel]:
    """What the first GPU did in a step of jax's profiler."""
    first = min((event.device for event in step.events), default=0)
    return [
        Kernel(event.name, event.start, event.end) for event in step.events if event.device == first
    ]


def of_torch(profile: Any) -> list[Kernel]:
    """What the GPU of a process did under `torch.profiler.profile`."""
    import torch

    return [
        Kernel(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]


def kinds_of(steps: Iterable[Sequence[Kernel]]) -> Kinds:
    """The mean of some steps of one device."""
    busy, *kinds, exposed, hidden = map(statistics.fmean, zip(*map(_step, steps), strict=True))
    return Kinds(busy, tuple(kinds), exposed, hidden)


def longest(steps: Sequence[Sequence[Kernel]], count: int) -> list[tuple[str, str, str]]:
    """(name, ms of a step, runs) of kernels that differ in numbers only, longest first."""
    found: dict[str, list[float]] = {}
    for kernel in itertools.chain.from_iterable(steps):
        name = re.sub(r"[._]\d+", "", kernel.name)
        found.setdefault(name, []).append(kernel.end - kernel.start)
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))[:count]
    of = len(steps)
    return [(n, f"{sum(t) * 1e3 / of:.2f}", f"{len(t) / of:.0f}") for n, t in ordered]


def _step(kernels: Sequence[Kernel]) -> list[float]:
    """Milliseconds as `HEADER` has them."""
    kinds = [kernel_kind(kernel.name) for kernel in kernels]
    ranks = [int(kind == COLLECTIVES) for kind in kinds]
    spans = [(rank, k.start, k.end) for rank, k in zip(ranks, kernels, strict=True)]
    spent = shares(spans)
    totals = dict.fromkeys(KINDS, 0.0)
    for kernel, kind in zip(kernels, kinds, strict=True):
        if kind in totals:
            totals[kind] += kernel.end - kernel.start
    waits = [share for share, rank in zip(spent, ranks, strict=True) if rank]
    busy, exposed = (sum(seconds for seconds, _ in of) for of in (spent, waits))
    hidden = sum(hidden for _, hidden in waits)
    return [seconds * 1e3 for seconds in (busy, *totals.values(), exposed, hidden)]


SECONDS = 3.0
"""Run at least so long between two readings: the counter moves every 0.1 s."""


def joules() -> float:
    """What the first GPU used since its driver was loaded; nan where nothing counts it.

    Source: NVML's nvmlDeviceGetTotalEnergyConsumption, through the package nvidia-ml-py.
    """
    with suppress(Exception):  # no such package, GPU or counter: each has an error of its own
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    return float("nan")
