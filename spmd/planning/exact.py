"""The exact planner: all decisions weighed together, in plans that are then tried out.

Every op's choice and every carry's state are variables of one network, of which the cheapest joint
state is found. A network adds up costs. What a run takes is less: communication hides behind
arithmetic that does not wait for it. So several plans are proposed, at different prices of
communication, and of these the one is taken whose program is predicted to be the fastest.
"""

import itertools
from collections.abc import Sequence

from spmd.mesh.sharding import Axes
from spmd.planning.choices import Choices
from spmd.planning.greedy import plan_greedily
from spmd.planning.limit import P, TryOut, check_possible, noted, pay_for_memory, skip_detours
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
"""Nearby plans are tried out for as long as a run that becomes so much shorter would save, each op
of each taking so many seconds; and so many plans, of so many ops altogether, at most."""

MOST_HIDDEN, MOST_MERGED = 2.0, 1.25
"""Arithmetic and communication that hide one another take half of their sum at least. So a plan is
not brought down to a program if its sum is over twice what the best program takes: of sums 3 and 5
ms and a best program of 2 ms the second is left out. Merged collectives take less than the sum of
them, for all plans alike: so a plan whose sum is at most 1.25 times the least is always tried."""


def plan_exactly(
    problem: Problem,
    try_out: TryOut[P],
    memory_limit: int | None = None,
    recompute: bool = True,
    like: Plan | None = None,
) -> P:
    """Plans a whole program; returns the plan predicted to be the fastest that fits in memory.

    It proposes the cheapest plan of all placements, the cheapest of those that follow from marks,
    the greedy plan and, where arguments are open, the cheapest with these as the marks suggest;
    and, where the machine can hide most communication, the cheapest if that is hidden. `try_out`
    predicts one device's program for those that may win.

    Without a `memory_limit` the topology's memory is a wish: a plan that misses it is returned with
    a note. With a plan of another form of the program in `like`, ops choose among what it took and
    what the marks suggest instead of among all placements.

    Raises:
      PlanError: no plan was found that keeps to the limit that was given.
    """
    check_possible(problem, memory_limit)
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
    search = Search[P](memory_for(problem.topology, memory_limit))
    least = min(plan.seconds for plan in proposed)
    first, *rest = [p for i, p in enumerate(proposed) if not _is_among(p, proposed[:i])]
    for plan in (first, *sorted(rest, key=lambda plan: plan.seconds)):
        if plan.seconds <= max(MOST_HIDDEN * search.seconds, MOST_MERGED * least):
            search.add(try_out(plan))
    for solution in solutions:
        _try_nearby(*solution, search, try_out, proposed)
    fastest = min(search.tried, key=lambda trial: trial.seconds)
    if not search.fits(fastest):
        pay_for_memory(search, lambda p: decoded(costs, solve(costs.priced(p))), try_out, recompute)
        best = noted(search, memory_limit, recompute)
    else:
        if recompute:
            skip_detours(search, try_out)
        best = search.best
    best.plan = best.plan._replace(like_loops=like is not None)
    return best


def weighed(problem: Problem, like: Plan | None = None) -> tuple[Plan, CostNetwork]:
    """Returns the greedy plan, and the cost network of all placements of mesh axes.

    Two axes are placed together, on every op. Of more axes every pair in turn, all others where the
    best plan so far has them, until no pair finds anything better. With a plan of another form of
    the program in `like`, the network has the choices that this took instead of placements.
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
    """Tries plans that are about as cheap as the cheapest, each with one decision changed.

    A sum of costs and the time of a program differ where rewrites merge and hide what was summed
    up. So the decisions that cost the least in the sum are tried out, as many as the program's size
    allows; those that turn out to be faster stay pinned. Plans that were `seen` are not tried
    again; what is tried is added to `seen`.
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
