"""Decoding: the plan that a solution of the cost network stands for."""

from __future__ import annotations

from spmd.ir.control_flow import Tie
from spmd.ir.program import Op, Value
from spmd.mesh.sharding import Sharding
from spmd.planning.network import CostNetwork
from spmd.planning.plan import Choice, Plan
from spmd.planning.solver.solve import Solution
from spmd.planning.walk import Walk


def decoded(costs: CostNetwork, solution: Solution) -> Plan:
    """The plan in which every unit is in the state that its class got.

    The network takes units that look alike for one, so what the plan costs is summed anew.
    """
    plan = _Decoded(costs, solution).run()
    return plan._replace(exposed=costs.exposed, by_slack=costs.by_slack, gap=solution.gap)


class _Decoded(Walk):
    def __init__(self, costs: CostNetwork, solution: Solution) -> None:
        super().__init__(costs.problem)
        self.solver = "exact" if solution.exact else "local search"
        self.costs, self.domains = costs, costs.domains
        self.of = costs.units.of
        states = [solution.states[v.number] for v in costs.variables]
        self.chosen = [int(v.choices[s]) for v, s in zip(costs.variables, states, strict=True)]
        again = [int(v.again[s]) for v, s in zip(costs.variables, states, strict=True)]
        for value, (number, index) in enumerate(self.of):
            variable = costs.variables[number]
            if number >= 0 and index == variable.copied and again[number] >= 0:
                self.shared[value] = variable.copies[again[number]]

    def choose(self, op: Op) -> tuple[Choice, float]:
        number, _ = self.of[op.results[0]]
        choice = self.domains.choices[number][self.chosen[number]]
        return choice, self.costs.own_cost(op, choice)

    def carry(self, tie: Tie) -> Sharding:
        return self.state(tie.result)

    def argument(self, number: int) -> Sharding:
        return self.state(self.program.body.args[number])

    def state(self, value: Value) -> Sharding:
        """The state of an argument or a carry."""
        number, _ = self.of[value]
        return self.domains.left[number][0][self.chosen[number]]
