"""The exact planner: all decisions weighed together, in plans that are then tried out.

Every op's choice and every carry's state are variables of one network, of which the cheapest joint
state is found. A network adds up costs. What a run takes is less: communication hides behind
arithmetic that does not wait for it. So several plans are proposed, at different prices of
communication, and of these the one is taken whose program is predicted to be the fastest.
"""

from __future__ import annotations

from spmd.planning.choices import Choices
from spmd.planning.decode import decoded
from spmd.planning.domains import domains_of
from spmd.planning.greedy import plan_greedily
from spmd.planning.limit import Prices, TryOut, fastest_within
from spmd.planning.network import CostNetwork
from spmd.planning.plan import Plan
from spmd.planning.problem import Problem
from spmd.planning.solver.solve import solve
from spmd.planning.units import units_of

LEAST_EXPOSED = 0.1
"""Share of its time that a reshard costs at least, where the machine could hide all of it."""

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
    proposed = [decoded(costs, solve(costs.network)), greedy]
    if costs.has_open_arguments and not problem.is_open:
        proposed.append(decoded(costs, solve(costs.closed())))
    if (hidden := with_hidden(costs)) is not None:
        proposed.append(decoded(hidden, solve(hidden.network)))
    tried = [try_out(plan) for plan in _different(proposed)]

    def priced(prices: Prices) -> Plan:
        return decoded(costs, solve(costs.priced(prices)))

    plan = fastest_within(memory_limit, tried, priced, try_out, recompute)
    seconds = next(trial.seconds for trial in tried if trial.plan.choices == greedy.choices)
    return plan._replace(greedy_seconds=seconds)


def weighed(problem: Problem) -> tuple[Plan, CostNetwork]:
    """The greedy plan, and the network of all that is weighed against it."""
    choices = Choices(problem)
    greedy = plan_greedily(problem, choices)
    units = units_of(problem)
    domains = domains_of(problem, units, choices, greedy)
    return greedy, CostNetwork(problem, units, choices, domains)


def with_hidden(costs: CostNetwork) -> CostNetwork | None:
    """The same network with cheaper reshards: each costs only what arithmetic cannot hide of it.

    Returns:
      The network; None for a machine that hides so little that its plans would gain nothing.
    """
    problem = costs.problem
    exposed = max(LEAST_EXPOSED, 1 - problem.topology.chip.overlap)
    if exposed >= MOST_EXPOSED:
        return None
    return CostNetwork(problem, costs.units, costs.choices, costs.domains, exposed)


def _different(plans: list[Plan]) -> list[Plan]:
    """The plans that decide differently, in their order."""
    kept: list[Plan] = []
    for plan in plans:
        if all((plan.choices, plan.copies) != (k.choices, k.copies) for k in kept):
            kept.append(plan)
    return kept
