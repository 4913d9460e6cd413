"""The exact planner: all decisions weighed together, in plans that are then tried out.

Every op's choice and every carry's sharding is a variable of one cost network, of which the
cheapest joint state is found. The network adds up the seconds of all ops and reshards. A run takes
less, since communication hides behind independent arithmetic. So several plans are proposed, in
which communication costs its full time or less, and the one with the fastest program is taken.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from spmd.errors import PlanError, bytes_text
from spmd.ir.program import Value
from spmd.ir.types import local_type
from spmd.mesh.sharding import Axes
from spmd.planning.choices import Choices
from spmd.planning.greedy import plan_greedily
from spmd.planning.network import Copies, CostNetwork, decoded
from spmd.planning.plan import Plan
from spmd.planning.problem import Problem
from spmd.planning.search import Judged, Search
from spmd.planning.solver import Reduced, Solution, likely_states, solve
from spmd.planning.units import ARGUMENT, OP, domains_of, taken_by, units_of
from spmd.predict.backends import memory_for
from spmd.predict.memory import MemoryUse, peak_memory

LEAST_EXPOSED = 0.1  # share of its time that a reshard costs, whatever the machine could hide
MOST_EXPOSED = 0.5  # where less can be hidden, no plans of hidden communication are proposed
TOGETHER = 2  # axes that are placed together
ROUNDS = 3  # how often each pair is placed, at most
CLOSE = 1e-3  # relative gain in time below which no further pair or nearby plan is taken
NEAR = 1.1  # a nearby plan's sum of costs is at most so many times the best one's
RUNS = 3_000  # of a program, where time to compile is weighed against time to run

HOPED, SECONDS_AN_OP, MOST_TRIES, MOST_OPS = 0.1, 2.5e-4, 24, 800
"""Limits of nearby plans. A try takes `SECONDS_AN_OP` for each op of the program. All tries
together take no longer than `RUNS` runs would save if each got shorter by the share `HOPED`; they
are at most `MOST_TRIES`, and have at most `MOST_OPS` ops together."""

MOST_HIDDEN, MOST_MERGED = 2.0, 1.25
"""Which plans are not tried. A plan's `seconds` sum up arithmetic and communication, which take
half of that or more if they hide one another: a plan is skipped whose sum is over `MOST_HIDDEN`
times what the best program takes (sums 3 and 5 ms, best program 2 ms: the second). As merged
collectives take less than their sum, sums up to `MOST_MERGED` times the least one are always
tried."""

Prices = Mapping[Value, float]  # seconds for each byte that one device holds of a value


class TriedPlan(Judged, Protocol):
    """A plan that was tried: it has the predicted time and memory of one device's program."""

    plan: Plan

    @property
    def memory(self) -> MemoryUse:
        """Predicted memory of one device."""


P = TypeVar("P", bound=TriedPlan)

TryOut = Callable[[Plan], P]  # brings a plan down to one device, as the later stages will


def plan_exactly(
    problem: Problem,
    try_out: TryOut[P],
    memory_limit: int | None = None,
    recompute: bool = True,
    like: Plan | None = None,
) -> P:
    """Plans a program; returns the trial of the plan that is predicted to be the fastest that fits.

    `try_out` brings a plan down to one device's program and predicts its seconds and bytes. Plans
    that may win are tried: the cheapest with axes placed in any way, the cheapest among what the
    marks lead to, the greedy one; if arguments are open (unmarked), the cheapest with these as
    marks suggest; and on machines that can hide most communication the cheapest if that counts for
    less.

    `memory_limit` is in bytes of one device. If it is None the limit is the topology's memory less
    headroom, and if nothing fits the smallest plan is returned with a note. `recompute` allows
    remat. `like` is a plan of another form of the program: ops choose among what it took and what
    the marks suggest, not among all placements.

    Raises:
      PlanError: no plan was found that keeps to the limit that was given.
    """
    check_possible(problem, memory_limit)
    if problem.mesh.size == 1:  # nothing can be split: there is one plan
        only = plan_greedily(problem)._replace(solver="one device")
        solutions, proposed = list[tuple[CostNetwork, Solution]](), [only]
    else:
        solutions, proposed = _proposed(problem, like)
    search = Search[P](memory_for(problem.topology, memory_limit))
    least = min(plan.seconds for plan in proposed)
    first, *rest = [p for i, p in enumerate(proposed) if not _is_among(p, proposed[:i])]
    for plan in (first, *sorted(rest, key=lambda plan: plan.seconds)):
        if plan.seconds <= max(MOST_HIDDEN * search.seconds, MOST_MERGED * least):
            search.add(try_out(plan))
    for solution in solutions:
        _try_nearby(*solution, search, try_out, proposed)
    if not search.fits(min(search.tried, key=lambda trial: trial.seconds)):

        def priced(prices: Prices) -> Plan:
            if not solutions:
                return proposed[0]
            costs, _ = solutions[0]
            return decoded(costs, solve(costs.priced(prices)))

        pay_for_memory(search, priced, try_out, recompute)
        best = noted(search, memory_limit, recompute)
    else:
        if recompute:
            skip_detours(search, try_out)
        best = search.best
    best.plan = best.plan._replace(like_loops=like is not None)
    return best


def _proposed(
    problem: Problem, like: Plan | None
) -> tuple[list[tuple[CostNetwork, Solution]], list[Plan]]:
    """Returns networks of costs with their cheapest solutions, and the plans that may win."""
    greedy, costs = weighed(problem, like)
    solutions = [(costs, costs.solution)]
    proposed = [decoded(*solutions[0]), _suggested(costs), greedy]
    if any(len(states) > 1 for states in problem.arguments):  # all as the marks suggest
        proposed.append(decoded(costs, costs.among(ARGUMENT, [1] * len(costs.variables))))
    # Reshards may cost only what arithmetic cannot hide of them: all alike, or by their slack. A
    # machine that hides so little would gain nothing by such plans.
    exposed = max(LEAST_EXPOSED, 1 - problem.topology.chip.overlap)
    for by_slack in (False, True) if exposed < MOST_EXPOSED else ():
        hidden = costs.with_exposed(exposed, by_slack)
        solutions.append((hidden, hidden.solution))
        proposed.append(decoded(hidden, hidden.solution))
        if not by_slack:  # what marks suggest differs little between the two
            proposed.append(_suggested(hidden))
    return solutions, proposed


def weighed(problem: Problem, like: Plan | None = None) -> tuple[Plan, CostNetwork]:
    """Returns the greedy plan, and a cost network over placements of mesh axes.

    Of up to two axes (`TOGETHER`) all placements are in it. Of more, each pair in turn is placed
    anew while others stay as in the best plan so far, until no pair improves that; the last pair's
    network is returned. With `like`, a plan of another form of the program, ops choose among what
    that took instead.
    """
    choices = Choices(problem)
    greedy = plan_greedily(problem, choices)
    units = units_of(problem)
    taken = None if like is None else taken_by(like)
    axes = [atoms for atoms in problem.mesh.axis_atoms.values() if atoms]

    def network(placed: Sequence[Axes], base: Plan | None, known: Copies | None) -> CostNetwork:
        domains = domains_of(problem, units, choices, placed, base, taken)
        return CostNetwork(problem, units, choices, domains, known, base)

    if len(axes) <= TOGETHER or like is not None:
        return greedy, network(axes, None, None).settled()
    pairs = list(itertools.combinations(axes, TOGETHER))
    base, costs, since = greedy, None, 0
    for pair in itertools.islice(itertools.cycle(pairs), ROUNDS * len(pairs)):
        costs = network(pair, base, costs.agreed() if costs else None)
        found = decoded(costs, costs.solution)
        is_better = found.seconds < base.seconds * (1 - CLOSE)
        base, since = (found, 0) if is_better else (base, since + 1)
        if since == len(pairs):
            break
    assert costs is not None
    return greedy, costs.settled()


def _try_nearby(
    costs: CostNetwork, cheapest: Solution, search: Search[P], try_out: TryOut[P], seen: list[Plan]
) -> None:
    """Tries plans almost as cheap as the cheapest one, each with one decision changed.

    The costs of a plan are a sum, but its program may take less where rewrites merge and hide some.
    So the decisions that raise the sum least are tried, as many as the program's size allows. One
    that makes the program the fastest yet is kept in later tries. Trials that are the fastest, or
    fastest of those that fit, are added to `search`. Plans in `seen` are skipped, new ones added.
    """
    ops = sum(1 for _ in costs.problem.program.walk())
    best = min(trial.seconds for trial in search.tried)
    worth = int(best * HOPED * RUNS / (SECONDS_AN_OP * max(1, ops)))
    tries = min(MOST_TRIES, MOST_OPS // max(1, ops), worth)
    if not tries:
        return
    network, most = costs.network, cheapest.cost * NEAR
    likely = likely_states(network, most)[: 4 * tries]
    reduced = Reduced(network, {variable for variable, _ in likely})
    pins: dict[int, tuple[int]] = {}
    for variable, state in likely:
        if not tries:
            break
        if variable in pins:
            continue
        solution = reduced.solve({**pins, variable: (state,)}, most)
        if not solution.states:
            continue
        plan = decoded(costs, solution)
        if _is_among(plan, seen):
            continue
        seen.append(plan)
        tries -= 1
        trial = try_out(plan)
        if trial.seconds < best * (1 - CLOSE):
            best, pins = search.add(trial).seconds, {**pins, variable: (state,)}
        elif trial.seconds < search.seconds > best and search.fits(trial):
            search.add(trial)  # the fastest does not fit


def _suggested(costs: CostNetwork) -> Plan:
    plan = decoded(costs, costs.among(OP, costs.domains.suggested))
    return plan._replace(solver="suggested by marks") if plan.gap else plan


def _is_among(plan: Plan, plans: Sequence[Plan]) -> bool:
    return any((plan.choices, plan.copies) == (p.choices, p.copies) for p in plans)


# Memory. Plans that keep to a limit are found by putting a price on what is held at the peak.
#
# A Lagrangian relaxation: seconds for each byte that is held at the fullest moment are added to the
# costs, and raised until the cheapest plan fits. A plan can save them in two ways: it splits values
# further (those have a price that were held at the peak of a plan that was too large), or
# recomputes them instead of holding them (remat, `spmd.lowering.recompute`). Both are tried.

FIRST, STEP, MOST_PRICES, PATIENCE = 1 / 64, 8.0, 8, 3
"""At the first price, memory of the whole limit costs the share `FIRST` of the plan's seconds. The
price grows by `STEP` until a plan fits, in at most `MOST_PRICES` plans; the search ends before if
`PATIENCE` of them in a row need no less memory."""

# The ratio of two prices between which no third is tried: of splitting values, and of making again.
CLOSE_PRICES, CLOSER_PRICES = 1.5, 1.02


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

    _rising(search, fastest, at, CLOSE_PRICES)
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
        use = best.memory
        held = [("arguments", use.arguments), ("results", use.results - use.aliased)]
        held += [(buffer.name, buffer.bytes) for buffer in use.at_peak()[:3]]
        held += [("constants", use.constants)] if use.constants else []
        largest = ", ".join(f"{bytes_text(size)} {name}" for name, size in held)
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
        _rising(search, trial, at, CLOSER_PRICES)


def _rising(search: Search[P], trial: P, at: Callable[[float, P], P], close: float) -> None:
    """Adds trials at rising prices of memory until one fits, then seeks the lowest such price.

    `trial` is the one without a price; `at` returns that at a price (seconds a byte), given the one
    before. It ends when a price that fits is at most `close` times one that does not. It gives up
    if `MOST_PRICES` trials do not fit, or before if these save no memory or are slower than what
    fits.
    """
    low, high = trial.seconds / search.limit * FIRST, 0.0
    price, first, slowest = low, trial.bytes, search.seconds
    found: list[P] = []
    while len(found) < MOST_PRICES or high:
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
        results += whole if wanted is None else problem.bytes(value, (wanted,))[0]
    parts = {"arguments": sum(held[:given]), "results": results, "constants": sum(held[given:])}
    return {name: size for name, size in parts.items() if size}
