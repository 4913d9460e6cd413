"""The greedy plan: ops in program order, each takes the candidate that is cheapest right there.

It is fast and simple, the baseline that the exact planner is measured against and falls back to.
For each op it weighs the op's own time, the reshards of its operands from the copies that exist,
and the reshard of its results to what propagation proposed for them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from spmd.ir.control_flow import Tie, users_of
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op, Value
from spmd.mesh.sharding import Sharding, replicated
from spmd.mesh.topology import Topology
from spmd.planning.candidates import candidates
from spmd.planning.cost import op_seconds
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem
from spmd.planning.walk import Walk, proposed
from spmd.propagation.propagated import Propagated


def plan_greedily(problem: Problem) -> Plan:
    """Plans a whole program; of several shardings that an argument may have it takes the first."""
    arguments = tuple(states[0] for states in problem.arguments)
    walk = _Greedy(problem.propagated, problem.topology)
    plan = walk.run(arguments, problem.results, problem.links)
    return plan._replace(greedy_seconds=plan.seconds)


class _Greedy(Walk):
    solver = "greedy"

    def __init__(self, propagated: Propagated, topology: Topology) -> None:
        super().__init__(propagated, topology)
        self.wishes = proposed(propagated)
        self.decided: dict[Any, tuple[Choice, float]] = {}

    @cached_property
    def users(self) -> dict[Value, list[tuple[Op | None, int]]]:
        """Uses of every value; few programs ask."""
        return users_of(self.program)

    def choose(self, op: Op) -> tuple[Choice, float]:
        if op.is_mark:
            return self.mark_choice(op), 0.0
        copies_of = self.copies.get
        copies = tuple([copies_of(v, ()) for v in op.operands])  # nothing for cheap values
        wishes = tuple([self.wishes[v] for v in op.results])
        carries = tuple(
            [
                i
                for i, found in enumerate(copies)
                if found and found[0].partial and self.can_stay_partial(op.operands[i])
            ]
        )
        key = (op.kind, copies, wishes, carries)
        decision = self.decided.get(key)
        if decision is None:
            states = tuple(found[0] if found else None for found in copies)
            decision = self.decided[key] = self.cheapest(op, states, wishes, carries)
        return decision

    def cheapest(
        self,
        op: Op,
        states: tuple[Sharding | None, ...],
        wishes: tuple[Sharding | None, ...],
        carries: tuple[int, ...],
    ) -> tuple[Choice, float]:
        rule = rule_of(op.kind, op.loc)
        options = candidates(rule, states, wishes, self.mesh)
        best: tuple[float, int, Choice, float] | None = None
        for number, choice in enumerate(options):
            partial = [i for i, s in enumerate(choice.operands) if s.partial]
            if any(i not in carries for i in partial):
                continue
            own = op_seconds(op.kind, rule, choice.assignment, self.mesh, self.topology)
            around = sum(
                self.reshard_seconds(value, wanted)
                for value, wanted in zip(op.operands, choice.operands, strict=True)
            )
            around += sum(
                self.later_seconds(value, state, wish)
                for value, state, wish in zip(op.results, choice.results, wishes, strict=True)
            )
            # On a tie the one that keeps partials waits: it may still be summed with others.
            rank = (own + around, number - (len(options) if partial else 0))
            if (
                best is None
                or (rank[0] < best[0] * (1 - 1e-9))
                or (rank[0] <= best[0] * (1 + 1e-9) and rank[1] < best[1])
            ):
                best = (*rank, choice, own)
        assert best is not None
        return best[2], best[3]

    def later_seconds(self, value: Value, state: Sharding, wish: Sharding | None) -> float:
        """What it will cost to bring a result to where it is wanted."""
        target = wish or state.full()
        return self.path_seconds(value, state, target)

    def can_stay_partial(self, value: Value) -> bool:
        """Whether every use of a value is an op that is linear in it."""
        for op, index in self.users.get(value, ()):
            if op is None or op.regions or op.is_mark:
                return False
            if not any(index in group for group in rule_of(op.kind).linear):
                return False
        return True

    def carry(self, tie: Tie) -> Sharding:
        wish = self.wishes[tie.result]
        if wish is not None:
            return wish
        state = self.states[tie.source] if tie.source is not None else None
        return state.full() if state else replicated(self.types[tie.result].rank)
