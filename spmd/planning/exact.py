"""The exact planner: all decisions weighed together, in plans that are then tried out.

Every op's choice and every carry's state are variables of one network, of which the cheapest joint
state is found. A network adds up costs. What a run takes is less: communication hides behind
arithmetic that does not wait for it. So several plans are proposed, at different prices of
communication, and of these the one is taken whose program is predicted to be the fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from spmd.mesh.sharding import Axes
from spmd.planning.choices import Choices
from spmd.planning.decode import decoded
from spmd.planning.domains import domains_of
from spmd.planning.greedy import plan_greedily
from spmd.planning.limit import Prices, Trial, TryOut, fastest_within
from spmd.planning.network import Copies, CostNetwork
from spmd.planning.plan import Plan
from spmd.planning.problem import Problem
from spmd.planning.solver.bounds import excesses
from spmd.planning.solver.solve import Reduced, Solution, solve
from spmd.planning.units import units_of

LEAST_EXPOSED = 0.1
"""Share of its time that a reshard costs at least, where the machine could hide all of it."""

TOGETHER = 2
"""Axes that are placed together."""

ROUNDS = 3
"""How often each pair is placed, at most."""

CLOSE = 1e-3
"""Relative difference of times for which no pair is placed again."""

RUNS = 3_000
"""How often a program is taken to run, where time to compile is weighed against time to run."""

HOPED, SECONDS_AN_OP, MOST_TRIES, MOST_OPS = 0.1, 5e-4, 24, 800
"""Nearby plans are tried out for as long as a run that becomes so much shorter would save, each op
of each taking so many seconds; and so many plans, of so many ops altogether, at most."""

NEAR = 1.1
"""Plans whose sum of costs is larger than the best one's by more than that are not nearby."""

MOST_EXPOSED = 0.5
"""Where a machine hides less than the rest, plans of hidden communication are not proposed."""


def plan_exactly(
    problem: Problem,
    try_out: TryOut,
    memory_limit: int | None = None,
    recompute: bool = True,
) -> Plan:
    """Plans a whole program.

    Proposed are the cheapest plan where reshards take their time; where the machine can hide most
    of it, the cheapest where it does; where there are open arguments, the cheapest in which they
    lie as the marks suggest; and the greedy plan, whose choices all of them weigh. Their programs
    are timed, and the fastest is taken.

    Args:
      problem: what is to be planned.
      try_out: brings a plan down to one device, and predicts what its program takes.
      memory_limit: bytes that one device may use; the topology's memory if left out, which is then
        a wish: a plan that misses it is returned with a note.
      recompute: whether programs may make values again to keep to it.

    Raises:
      PlanError: no plan was found that keeps to the limit that was given.
    """
    greedy, costs = weighed(problem)
    solutions = [(costs, costs.solution)]
    proposed = [decoded(*solutions[0]), greedy]
    if costs.has_open_arguments:
        proposed.append(decoded(costs, solve(costs.closed())))
    if (hidden := with_hidden(costs)) is not None:
        solutions.append((hidden, hidden.solution))
        proposed.append(decoded(*solutions[1]))
    tried = [try_out(plan) for plan in _different(proposed)]
    for solution in solutions:
        tried += _nearby(*solution, tried, try_out)

    def priced(prices: Prices) -> Plan:
        return decoded(costs, solve(costs.priced(prices)))

    plan = fastest_within(memory_limit, tried, priced, try_out, recompute)
    seconds = next(trial.seconds for trial in tried if trial.plan.choices == greedy.choices)
    return plan._replace(greedy_seconds=seconds)


def weighed(problem: Problem) -> tuple[Plan, CostNetwork]:
    """The greedy plan, and the network of every placement.

    Two axes are placed together, on every op. Of more axes every pair in turn, all others where the
    best plan so far has them, until no pair finds anything better.
    """
    choices = Choices(problem)
    greedy = plan_greedily(problem, choices)
    units = units_of(problem)
    axes = [atoms for atoms in problem.mesh.axis_atoms.values() if atoms]

    def network(placed: Sequence[Axes], base: Plan | None, known: Copies | None) -> CostNetwork:
        domains = domains_of(problem, units, choices, placed, base)
        return CostNetwork(problem, units, choices, domains, known)

    if len(axes) <= TOGETHER:
        return greedy, network(axes, None, None).settled()
    pairs = list(itertools.combinations(axes, TOGETHER))
    base, costs, since = greedy, None, 0
    for pair in itertools.islice(itertools.cycle(pairs), ROUNDS * len(pairs)):
        costs = network(pair, base, costs.agreed() if costs else None)
        found = decoded(costs, costs.solution)
        is_better = found.seconds < base.seconds * (1 - CLOSE)
        base, since = (found, 1) if is_better else (base, since + 1)
        if since == len(pairs):
            break
    assert costs is not None
    return greedy, costs.settled()


def _nearby(
    costs: CostNetwork, cheapest: Solution, tried: Sequence[Trial], try_out: TryOut
) -> list[Trial]:
    """Plans that are about as cheap as the cheapest, each with one decision pinned otherwise.

    A sum of costs and the time of a program differ where rewrites merge and hide what was summed
    up. So the decisions that cost the least in the sum are tried out, as many as the program's size
    allows; those that turn out to be faster stay pinned.
    """
    ops = sum(1 for _ in costs.problem.program.walk())
    found: list[Trial] = []
    best = min(tried, key=lambda trial: trial.seconds)
    worth = int(best.seconds * HOPED * RUNS / (SECONDS_AN_OP * max(1, ops)))
    tries = min(MOST_TRIES, MOST_OPS // max(1, ops), worth)
    if not tries:
        return []
    network, seen = costs.network, [trial.plan for trial in tried]
    likely = excesses(network)[: 4 * tries]
    reduced = Reduced(network, {variable for _, variable, _ in likely})
    pins: dict[int, int] = {}
    for _, variable, state in likely:
        if len(found) == tries:
            break
        if variable in pins:
            continue
        solution = reduced.solve({**pins, variable: state})
        if solution.cost > cheapest.cost * NEAR:
            continue
        plan = decoded(costs, solution)
        if not _different([*seen, plan])[len(seen) :]:
            continue
        seen.append(plan)
        found.append(try_out(plan))
        if found[-1].seconds < best.seconds:
            best, pins = found[-1], {**pins, variable: state}
    return found


def with_hidden(costs: CostNetwork) -> CostNetwork | None:
    """The same network with cheaper reshards: each costs only what arithmetic cannot hide of it.

    Returns:
      The network; None for a machine that hides so little that its plans would gain nothing.
    """
    exposed = max(LEAST_EXPOSED, 1 - costs.problem.topology.chip.overlap)
    if exposed >= MOST_EXPOSED:
        return None
    return costs.with_exposed(exposed)


def _different(plans: list[Plan]) -> list[Plan]:
    """The plans that decide differently, in their order."""
    kept: list[Plan] = []
    for plan in plans:
        if all((plan.choices, plan.copies) != (k.choices, k.copies) for k in kept):
            kept.append(plan)
    return kept
