"""Plans that keep to a memory limit: what is alive at the peak gets a price, until they do.

A Lagrangian relaxation: seconds for each byte of what is alive at the fullest moment are added to
the costs, and raised until the cheapest plan fits. A price can be paid in two ways: by splitting
values further (they pay wherever they have been alive at the peak of a plan that was too large), or
by making them again rather than holding them (`spmd.lowering.recompute`). Both are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from spmd.errors import PlanError, bytes_text
from spmd.ir.program import Value
from spmd.planning.liveness import least_held, peak_of
from spmd.planning.plan import Plan
from spmd.planning.problem import Problem
from spmd.planning.search import Judged, Search

Prices = Mapping[Value, float]
"""Seconds for each byte that one device holds of a value."""

FIRST, STEP, ROUNDS, PATIENCE = 1 / 64, 8.0, 8, 3
"""First price in seconds of the whole plan for the whole limit, its growth until a plan fits, plans
to try until then, and how many of them in a row may bring no progress."""

CLOSE, CLOSER = 1.5, 1.02
"""The ratio of two prices between which no third is tried: of splitting values, and of making them
again."""


class TriedPlan(Judged, Protocol):
    """A plan, and what one device's program of it is predicted to take."""

    plan: Plan

    @property
    def collects(self) -> bool:
        """Whether a loop of it collects what a later loop could make again."""

    @property
    def largest(self) -> Sequence[tuple[str, int]]:
        """Names and bytes of what is held at the fullest moment, the largest values of it."""


P = TypeVar("P", bound=TriedPlan)

TryOut = Callable[[Plan], P]
"""Brings a plan down to one device, as the stages behind the planner will."""


def skip_detours(search: Search[P], try_out: TryOut[P]) -> None:
    """Tries the best plan with loops that collect less, though it fits.

    To write a value to memory in a forward loop and to read it in the backward loop may take longer
    than to compute it again. So the same plan is tried at a low price of memory, at which values
    are made again where that is nearly free.
    """
    best = search.best
    if best.collects:
        again = try_out(best.plan._replace(byte_price=best.seconds / search.limit * FIRST))
        if again.plan.recomputed:
            search.add(again)


def pay_for_memory(
    search: Search[P], priced: Callable[[Prices], Plan], try_out: TryOut[P], recompute: bool
) -> None:
    """Adds plans at prices of memory to a search, of which all so far are too large.

    Args:
      search: plans made without prices.
      priced: makes a plan at given prices.
      try_out: predicts what it takes.
      recompute: whether programs may make values again rather than hold them.
    """
    fastest, plain = min(search.tried, key=lambda trial: trial.seconds), search.tried
    if recompute:
        _make_again(search, plain, try_out)
    unsplit = len(search.tried)
    _split_further(search, fastest, priced, try_out)
    if recompute:
        _make_again(search, search.tried[unsplit:], try_out)


def noted(search: Search[P], memory_limit: int | None, recompute: bool) -> P:
    """The best of a search in which memory was short, with a note that says so.

    Args:
      search: all that was tried.
      memory_limit: bytes that one device may use; if left out, what there is room for was a wish.
      recompute: whether programs may make values again.

    Raises:
      PlanError: none keeps to the limit that was given.
    """
    best, limit = search.best, bytes_text(int(search.limit))
    need = bytes_text(best.bytes)
    if search.fits(best):
        fastest = min(search.tried, key=lambda trial: trial.seconds)
        note = (
            f"the fastest plan needs {bytes_text(fastest.bytes)} on a device, and there is room "
            f"for {limit}: this one takes {best.seconds / fastest.seconds:.2f} times as "
            f"long{_again(best.plan)}"
        )
    elif memory_limit is None:
        note = f"it is predicted to need {need} on a device; there is room for {limit}"
    else:
        largest = ", ".join(f"{bytes_text(size)} {name}" for name, size in best.largest)
        actual = f"at least {need}, of which {largest}"
        raise _refusal("no plan was found that keeps", memory_limit, best.bytes, actual, recompute)
    best.plan = best.plan._replace(notes=(*best.plan.notes, note))
    return best


def check_possible(problem: Problem, memory_limit: int | None) -> None:
    """Refuses a limit that no plan can keep to, before any is made.

    Raises:
      PlanError: arguments and results alone take more.
    """
    if memory_limit is None:
        return
    held = least_held(problem)
    if (least := sum(held.values())) > memory_limit:
        parts = ", ".join(f"{bytes_text(size)} {name}" for name, size in held.items())
        actual = f"at least {bytes_text(least)}, however it is split: {parts}"
        raise _refusal("no plan keeps", memory_limit, least, actual)


def _refusal(what: str, limit: int, least: int, actual: str, recompute: bool = True) -> PlanError:
    error = PlanError(
        f"{what} to {bytes_text(limit)} on a device",
        actual=actual,
        required=bytes_text(limit),
        fix="split arguments over more axes, use more devices, or split the batch into "
        "microbatches" + ("" if recompute else ", or allow `Options(recompute=True)`"),
    )
    error.least_bytes = least
    return error


def _split_further(
    search: Search[P], fastest: P, priced: Callable[[Prices], Plan], try_out: TryOut[P]
) -> None:
    """Tries plans at prices of what was alive at the peak of those before."""
    alive: dict[Value, None] = {}

    def at(price: float, last: P) -> P:
        if not search.fits(last):
            alive.update(dict.fromkeys(value for value, _ in peak_of(last.plan).alive))
        plan = priced(dict.fromkeys(alive, price))
        return last if plan.choices == last.plan.choices else try_out(plan)

    _rising(search, fastest, at, CLOSE)


def _make_again(search: Search[P], trials: Sequence[P], try_out: TryOut[P]) -> None:
    """Tries plans whose programs make values again.

    Args:
      search: what was tried so far.
      trials: the same plans without.
      try_out: brings a plan down to one device.
    """
    for trial in sorted(trials, key=lambda trial: trial.seconds):

        def at(price: float, _: P, plan: Plan = trial.plan) -> P:
            return try_out(plan._replace(byte_price=price))

        if search.fits(trial) or trial.seconds >= search.seconds:
            continue
        # The first plan is looked into at many prices, others where the best price so far promises
        # something: a faster program that fits, or a smaller one where none does.
        again = Search(search.limit, [t for t in search.tried if t.plan.byte_price])
        if again.tried:
            first = search.add(again.add(at(again.best.plan.byte_price, trial)))
            if again.best is not first:
                continue
        _rising(search, trial, at, CLOSER)


def _rising(search: Search[P], trial: P, at: Callable[[float, P], P], close: float) -> None:
    """Tries prices that rise until a program fits, then closes in on the lowest price that does.

    Args:
      search: what was tried so far, and gets all that is tried now.
      trial: one without a price.
      at: the trial at a price, after another.
      close: the ratio of two prices between which no third is tried.
    """
    low, high = trial.seconds / search.limit * FIRST, 0.0
    price, first, slowest = low, trial.bytes, search.seconds
    found: list[P] = []
    while len(found) < ROUNDS or high:
        trial = search.add(at(price, trial))
        found.append(trial)
        fits = search.fits(trial)
        if not fits and trial.seconds >= slowest:
            break
        least = min(found, key=lambda t: t.bytes)
        if not (fits or high) and least.bytes < first and least not in found[-PATIENCE:]:
            break
        low, high = (low, price) if fits else (price, high)
        if high and high <= low * close:
            break
        price = math.sqrt(low * high) if high else price * STEP


def _again(plan: Plan) -> str:
    """What a plan's program makes again, for people."""
    again = plan.recomputed
    held = bytes_text(sum(value.bytes for value in again))
    return f", and makes values of {held} again rather than hold them" if again else ""
