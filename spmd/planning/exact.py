"""The exact plan: every op's choice and every carry's state at once, for the least total cost."""

from __future__ import annotations

from spmd.planning.choices import Choices
from spmd.planning.decode import decoded
from spmd.planning.domains import domains_of
from spmd.planning.greedy import plan_greedily
from spmd.planning.limit import Prices, plan_within
from spmd.planning.network import CostNetwork
from spmd.planning.plan import Plan
from spmd.planning.problem import Problem
from spmd.planning.solver.solve import solve
from spmd.planning.units import units_of


def plan_exactly(problem: Problem, memory_limit: int | None = None) -> Plan:
    """Plans a whole program: the greedy plan, what is weighed, the best of that, the limit.

    The greedy plan's choices are among those that are weighed, and where the two plans come out
    alike in spite of all, the cheaper one is returned.

    Args:
      problem: what is to be planned.
      memory_limit: bytes that one device may use; the topology's memory if left out, which is then
        a wish: a plan that misses it is returned with a note.

    Raises:
      PlanError: no plan was found that keeps to the limit that was given.
    """
    greedy, costs = weighed(problem)
    solution = solve(costs.network)
    best = decoded(costs, solution)
    if best.seconds > greedy.seconds:
        best = greedy._replace(lower_seconds=solution.lower)

    def priced(prices: Prices) -> Plan:
        return decoded(costs, solve(costs.priced(prices)))

    plan = plan_within(memory_limit, (best, greedy), priced)
    return plan._replace(greedy_seconds=greedy.seconds)


def weighed(problem: Problem) -> tuple[Plan, CostNetwork]:
    """The greedy plan, and the network of all that is weighed against it."""
    choices = Choices(problem)
    greedy = plan_greedily(problem, choices)
    units = units_of(problem)
    domains = domains_of(problem, units, choices, greedy)
    return greedy, CostNetwork(problem, units, choices, domains)
