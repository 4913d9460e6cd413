"""The exact planner: all decisions weighed together, in plans that are then tried out.

Every op's choice and every carry's sharding is a variable of one cost network, of which the
cheapest joint state is found. The network adds up the seconds of all ops and reshards. A run takes
less, since communication hides behind independent arithmetic. So several plans are proposed, in
which communication costs its full time or less, and the one with the fastest program is taken.
"""

import itertools
from collections.abc import Sequence

from spmd.mesh.sharding import Axes
from spmd.planning.choices import Choices
from spmd.planning.greedy import plan_greedily
from spmd.planning.limit import (
    P,
    Prices,
    TryOut,
    check_possible,
    noted,
    pay_for_memory,
    skip_detours,
)
from spmd.planning.network import Copies, CostNetwork, decoded
from spmd.planning.plan import Plan
from spmd.planning.problem import Problem
from spmd.planning.search import Search
from spmd.planning.solver import Reduced, Solution, likely_states, solve
from spmd.planning.units import ARGUMENT, OP, domains_of, taken_by, units_of
from spmd.predict.backends import memory_for

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
