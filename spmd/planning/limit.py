"""Plans that keep to a memory limit: what is alive at the peak gets a price, until they do.

A Lagrangian relaxation: seconds for each byte of what is alive at the fullest moment are added to
the costs, and raised until the cheapest plan fits. A price can be paid in two ways: by splitting
values further (they pay wherever they have been alive at the peak of a plan that was too large), or
by making them again rather than holding them (`spmd.lowering.recompute`). Both are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from spmd.errors import PlanError, bytes_text
from spmd.ir.program import Value
from spmd.planning.liveness import bound_of, peak_of
from spmd.planning.plan import Plan
from spmd.predict.backends import memory_for

Prices = Mapping[Value, float]
"""Seconds for each byte that one device holds of a value."""

FIRST, STEP, ROUNDS, PATIENCE = 1 / 64, 8.0, 8, 3
"""First price in seconds of the whole plan for the whole limit, its growth until a plan fits, plans
to try until then, and how many of them in a row may bring no progress."""

CLOSE, CLOSER = 1.5, 1.02
"""The ratio of two prices between which no third is tried: of splitting values, and of making them
again."""


class Trial(Protocol):
    """A plan, and what one device's program of it is predicted to take."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def seconds(self) -> float:
        """Predicted time of one run."""

    @property
    def bytes(self) -> int:
        """Predicted memory of one device."""

    @property
    def collects(self) -> bool:
        """Whether a loop of it collects what a later loop could make again."""

    @property
    def largest(self) -> Sequence[tuple[str, int]]:
        """Names and bytes of what is held at the fullest moment, the largest values of it."""


TryOut = Callable[[Plan], Trial]
"""Brings a plan down to one device, as the stages behind the planner will."""


def fastest_within(
    memory_limit: int | None,
    tried: Sequence[Trial],
    priced: Callable[[Prices], Plan],
    try_out: TryOut,
    recompute: bool = True,
) -> Plan:
    """The fastest plan found that keeps to a limit.

    Args:
      memory_limit: bytes on one device; if left out, what the topology has room for: a wish.
      tried: plans made without prices.
      priced: makes a plan at given prices.
      try_out: predicts what it takes.
      recompute: whether programs may make values again rather than hold them.

    Raises:
      PlanError: no plan keeps to the limit that was given.
    """
    best = min(tried, key=lambda trial: trial.seconds)
    limit = memory_for(best.plan.topology, memory_limit)
    if bound_of(best.plan) <= limit or best.bytes <= limit:
        return _without_detours(best, limit, try_out) if recompute else best.plan
    everything = [*tried]
    if recompute:
        everything += _recomputed(limit, tried, try_out)
    split = list(_split_further(limit, best, priced, try_out, _fastest_fitting(everything, limit)))
    if recompute:
        everything += _recomputed(limit, split, try_out, everything)
    everything += split
    fitting = [trial for trial in everything if trial.bytes <= limit]
    if fitting:
        found = min(fitting, key=lambda trial: trial.seconds)
        return _noted(
            found.plan,
            f"the fastest plan needs {bytes_text(best.bytes)} on a device, and there is room for "
            f"{bytes_text(limit)}: this one takes {found.seconds / best.seconds:.2f} times as "
            f"long{_again(found.plan)}",
        )
    least = min(everything, key=lambda trial: trial.bytes)
    need = bytes_text(least.bytes)
    if memory_limit is None:
        text = f"it is predicted to need {need} on a device; there is room for {bytes_text(limit)}"
        return _noted(least.plan, text)
    error = PlanError(
        f"no plan was found that keeps to {bytes_text(limit)} on a device",
        actual=f"at least {need}, of which {_largest(least)}",
        required=bytes_text(limit),
        fix="split arguments over more axes, use more devices, or split the batch into "
        "microbatches" + ("" if recompute else ", or allow `Options(recompute=True)`"),
    )
    error.least_bytes = least.bytes
    raise error


def _without_detours(best: Trial, limit: int, try_out: TryOut) -> Plan:
    """A plan that fits, or a faster one whose loops collect less.

    To write a value to memory in a forward loop and to read it in the backward loop may take longer
    than to compute it again. So the same plan is tried at a low price of memory, at which values
    are made again where that is nearly free; it is taken if its program is faster.
    """
    if not best.collects:
        return best.plan
    price = best.seconds / limit * FIRST
    again = try_out(best.plan._replace(byte_price=price))
    return again.plan if again.plan.recomputed and again.seconds < best.seconds else best.plan


def _fastest_fitting(trials: Sequence[Trial], limit: int) -> float:
    return min((trial.seconds for trial in trials if trial.bytes <= limit), default=math.inf)


def _split_further(
    limit: int, trial: Trial, priced: Callable[[Prices], Plan], try_out: TryOut, slowest: float
) -> list[Trial]:
    """Plans at prices of what was alive at the peak of those before."""
    alive: dict[Value, None] = {}

    def at(price: float, last: Trial) -> Trial:
        if last.bytes > limit:
            alive.update(dict.fromkeys(value for value, _ in peak_of(last.plan).alive))
        plan = priced(dict.fromkeys(alive, price))
        return last if plan.choices == last.plan.choices else try_out(plan)

    return _rising(limit, trial, at, CLOSE, slowest)


def _recomputed(
    limit: int, trials: Sequence[Trial], try_out: TryOut, known: Sequence[Trial] = ()
) -> list[Trial]:
    """Plans whose programs make values again.

    Args:
      limit: bytes on one device.
      trials: the same plans without.
      try_out: brings a plan down to one device.
      known: trials that were made before.
    """
    found: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: trial.seconds):

        def at(price: float, _: Trial, plan: Plan = trial.plan) -> Trial:
            return try_out(plan._replace(byte_price=price))

        # The first plan is looked into at many prices, others where the best price so far promises
        # something: a faster program that fits, or a smaller one where none does.
        slowest = _fastest_fitting((*known, *found), limit)
        if trial.bytes <= limit or trial.seconds >= slowest:
            continue
        if best := _best((*known, *found), limit):
            first = at(best.plan.byte_price, trial)
            found.append(first)
            if _best((best, first), limit) is best:
                continue
        found += _rising(limit, trial, at, CLOSER, slowest)
    return found


def _best(trials: Sequence[Trial], limit: int) -> Trial | None:
    """Of programs that make values again the fastest that fits, or else the smallest."""
    again = [trial for trial in trials if trial.plan.byte_price]
    fitting = [trial for trial in again if trial.bytes <= limit]
    if fitting:
        return min(fitting, key=lambda trial: trial.seconds)
    return min(again, key=lambda trial: trial.bytes, default=None)


def _rising(
    limit: int,
    trial: Trial,
    at: Callable[[float, Trial], Trial],
    close: float,
    slowest: float = math.inf,
) -> list[Trial]:
    """Trials at prices that rise until one fits, then close in on the lowest price that does.

    Args:
      limit: bytes on one device.
      trial: one without a price.
      at: the trial at a price, after another.
      close: the ratio of two prices between which no third is tried.
      slowest: seconds from which on nobody wants a trial.
    """
    low, high = trial.seconds / limit * FIRST, 0.0
    price, first = low, trial.bytes
    found: list[Trial] = []
    while len(found) < ROUNDS or high:
        trial = at(price, trial)
        found.append(trial)
        fits = trial.bytes <= limit
        if not fits and trial.seconds >= slowest:
            break
        least = min(found, key=lambda t: t.bytes)
        if not (fits or high) and least.bytes < first and least not in found[-PATIENCE:]:
            break
        low, high = (low, price) if fits else (price, high)
        if high and high <= low * close:
            break
        price = math.sqrt(low * high) if high else price * STEP
    return found


def _noted(plan: Plan, note: str) -> Plan:
    return plan._replace(notes=(*plan.notes, note))


def _again(plan: Plan) -> str:
    """What a plan's program makes again, for people."""
    again = plan.recomputed
    held = bytes_text(sum(value.bytes for value in again))
    return f", and makes values of {held} again rather than hold them" if again else ""


def _largest(trial: Trial) -> str:
    """What takes the most memory, for people."""
    return ", ".join(f"{bytes_text(size)} {name}" for name, size in trial.largest)
