"""Finds plans that keep to a memory limit, by putting a price on what is held at the peak.

A Lagrangian relaxation: seconds for each byte that is held at the fullest moment are added to the
costs, and raised until the cheapest plan fits. A plan can save them in two ways: it splits values
further (those have a price that were held at the peak of a plan that was too large), or recomputes
them instead of holding them (remat, `spmd.lowering.recompute`). Both are tried.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from spmd.errors import PlanError, bytes_text
from spmd.ir.program import Value
from spmd.ir.types import local_type
from spmd.planning.plan import Plan
from spmd.planning.problem import Problem
from spmd.planning.search import Judged, Search
from spmd.predict.memory import peak_memory

Prices = Mapping[Value, float]  # seconds for each byte that one device holds of a value

FIRST, STEP, ROUNDS, PATIENCE = 1 / 64, 8.0, 8, 3
"""At the first price, memory of the whole limit costs the share `FIRST` of the plan's seconds. The
price grows by `STEP` until a plan fits, in at most `ROUNDS` plans; the search ends before if
`PATIENCE` of them in a row need no less memory."""

# The ratio of two prices between which no third is tried: of splitting values, and of making again.
CLOSE, CLOSER = 1.5, 1.02


class TriedPlan(Judged, Protocol):
    """A plan that was tried: it has the predicted time and memory of one device's program."""

    plan: Plan

    @property
    def largest(self) -> Sequence[tuple[str, int]]:
        """Returns (name, bytes) of the largest values that are held at the peak of memory."""


P = TypeVar("P", bound=TriedPlan)

TryOut = Callable[[Plan], P]  # brings a plan down to one device, as the later stages will


def skip_detours(search: Search[P], try_out: TryOut[P]) -> None:
    """Adds the best plan with some values recomputed (remat) to a search, as it may be faster.

    Writing a value to memory in a forward loop and reading it in the backward loop may take longer
    than computing it again. So the plan, which fits as it is, is tried at a low price of memory, at
    which values are recomputed where that is nearly free, if the program has several loops.
    """
    best = search.best
    if sum(op.is_loop for op in best.plan.program.walk()) > 1:
        again = try_out(best.plan._replace(byte_price=best.seconds / search.limit * FIRST))
        if again.plan.recomputed:
            search.add(again)


def pay_for_memory(
    search: Search[P], priced: Callable[[Prices], Plan], try_out: TryOut[P], recompute: bool
) -> None:
    """Adds trials at rising prices of memory to a search whose fastest plan does not fit.

    `priced` makes the cheapest plan from value -> seconds a byte held; `recompute` allows remat.
    """
    fastest, plain = min(search.tried, key=lambda trial: trial.seconds), search.tried
    if recompute:
        _make_again(search, plain, try_out)
    unsplit, alive = len(search.tried), dict[Value, None]()

    def at(price: float, last: P) -> P:
        """Returns the trial at `price` seconds a byte held at too large peaks; `last` if equal."""
        if not search.fits(last):
            alive.update(dict.fromkeys(held_at_peak(last.plan)))
        plan = priced(dict.fromkeys(alive, price))
        return last if plan.choices == last.plan.choices else try_out(plan)

    _rising(search, fastest, at, CLOSE)
    if recompute:
        _make_again(search, search.tried[unsplit:], try_out)


def noted(search: Search[P], memory_limit: int | None, recompute: bool) -> P:
    """Returns the best of a search in which memory was short, a note for the user in its plan.

    If it fits, the note says how much longer than the fastest it takes. If nothing fits and the
    user gave a `memory_limit`, it raises a `PlanError` (which advises remat if `recompute` is off);
    without one, the note says what is needed and what there is.
    """
    best, limit = search.best, bytes_text(int(search.limit))
    need = bytes_text(best.bytes)
    if search.fits(best):
        fastest = min(search.tried, key=lambda trial: trial.seconds)
        made = bytes_text(sum(value.bytes for value in best.plan.recomputed))
        again = f", and makes values of {made} again rather than hold them"
        note = (
            f"the fastest plan needs {bytes_text(fastest.bytes)} on a device, and there is room "
            f"for {limit}: this one takes {best.seconds / fastest.seconds:.2f} times as "
            f"long{again if best.plan.recomputed else ''}"
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
    """Raises a `PlanError` if every plan holds more than `memory_limit` bytes (None: no limit)."""
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
        "microbatches" + ("" if recompute else ", or allow spmd.Options(recompute=True)"),
    )
    error.least_bytes = least
    return error


def _make_again(search: Search[P], trials: Sequence[P], try_out: TryOut[P]) -> None:
    """Adds trials to a search: plans of `trials` that do not fit, with remat at rising prices."""
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
    """Adds trials at rising prices of memory until one fits, then seeks the lowest such price.

    `trial` is the one without a price; `at` returns that at a price (seconds a byte), given the one
    before. It ends when a price that fits is at most `close` times one that does not. It gives up
    if `ROUNDS` trials do not fit, or before if these save no memory or are slower than what fits.
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


def held_at_peak(plan: Plan) -> list[Value]:
    """Returns arguments, results, and all else that one device holds at the fullest moment.

    It is the global program's memory, each value in the piece that the plan leaves on a device.
    """
    program, pieces = plan.program, zip(plan.program.types, plan.states, strict=True)
    types = [local_type(type_, state, plan.mesh) if state else type_ for type_, state in pieces]
    memory = peak_memory(program._replace(types=tuple(types)), tuple(plan.problem.links.values()))
    made = [value for buffer in memory.at_peak() for value in buffer.op.results]
    return [*program.body.args, *program.body.results, *made]


def least_held(problem: Problem) -> dict[str, int]:
    """Returns the least bytes that one device holds under any plan: purpose -> bytes, none 0.

    The purposes are `arguments`, `results` (less those that lie in arguments) and `constants`. Each
    argument and constant counts in the smallest of its allowed shardings; each result as the user
    asked for it, or else split over all devices.
    """
    program, body = problem.program, problem.program.body
    arguments = zip(body.args, problem.arguments, strict=True)
    held = [min(problem.bytes(value, states)) for value, states in arguments]
    given, results = len(held) - len(program.constants), 0
    own = {
        value: wanted
        for i, (value, wanted) in enumerate(zip(body.results, problem.results, strict=True))
        if i not in problem.links and value not in body.args
    }
    for value, wanted in own.items():
        whole = program.types[value].bytes // problem.mesh.size
        results += whole if wanted is None else problem.size(value, wanted)
    parts = {"arguments": sum(held[:given]), "results": results, "constants": sum(held[given:])}
    return {name: size for name, size in parts.items() if size}
