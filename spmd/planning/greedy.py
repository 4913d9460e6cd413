"""The greedy planner: ops in program order, each takes the choice that is cheapest right there.

It is fast and simple, the baseline that the exact planner is measured against and falls back to.
For each op it weighs the op's own time, the reshards of its operands from the copies that exist,
and the reshard of its results to what propagation proposed for them.
"""

from __future__ import annotations

from typing import Any

from spmd.ir.control_flow import Tie
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op, Value
from spmd.mesh.sharding import Sharding, replicated
from spmd.planning.choices import Choices
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem
from spmd.planning.walk import Walk
from spmd.reshard.paths import States

CLOSE = 1e-9  # relative difference of times that are a tie


def plan_greedily(problem: Problem, choices: Choices | None = None) -> Plan:
    """Plans a whole program greedily, with each argument in the first sharding that it may have."""
    return _Greedy(problem, choices or Choices(problem)).run()


class _Greedy(Walk):
    def __init__(self, problem: Problem, options: Choices) -> None:
        super().__init__(problem, "greedy", tuple(states[0] for states in problem.arguments))
        self.options, self.wishes = options, problem.wishes
        self.decided: dict[Any, tuple[Choice, float]] = {}

    def carry(self, tie: Tie) -> Sharding:
        wish = self.wishes[tie.result]
        if wish is not None:
            return wish
        if tie.source is not None:
            return self.full_state(tie.source)
        return replicated(self.types[tie.result].rank)

    def choose(self, op: Op) -> tuple[Choice, float]:
        """Returns the cheapest choice and its own seconds; equal ops in equal states share it."""
        copies_of, wishes = self.copies.get, self.wishes
        copies = tuple([copies_of(v, ()) for v in op.operands])  # nothing for cheap values
        wanted = tuple([(wish,) if (wish := wishes[v]) else () for v in op.results])
        ends = enumerate(zip(op.operands, copies, strict=True))
        partial = tuple(
            [i for i, (v, have) in ends if have and have[0].partial and self.can_stay_partial(v)]
        )
        key = (op.kind, self.resharder.held(op.results[0]), copies, wanted, partial)
        if key not in self.decided:
            self.decided[key] = self.cheapest(op, copies, wanted, partial)
        return self.decided[key]

    def cheapest(
        self,
        op: Op,
        copies: tuple[States, ...],
        wanted: tuple[States, ...],
        partial: tuple[int, ...],
    ) -> tuple[Choice, float]:
        options = self.options.around(op, tuple([found[:1] for found in copies]), wanted)
        best: tuple[float, int, Choice, float] | None = None
        for number, choice in enumerate(options):
            carried = [i for i, s in enumerate(choice.operands) if s.partial]
            if any(i not in partial for i in carried):
                continue
            own = self.options.own_seconds(op, choice.assignment)
            # Time to bring the operands here, and later the results to where they are wanted.
            before = sum(
                self.resharder.cheapest(value, self.copies[value], state)[1].seconds
                for value, state in zip(op.operands, choice.operands, strict=True)
                if value not in self.cheap and state not in self.copies[value]
            )
            after = sum(
                self.resharder.seconds(value, state, wish[0] if wish else state.full())
                for value, state, wish in zip(op.results, choice.results, wanted, strict=True)
            )
            total = own + (before + after)
            # On a tie the one that keeps partials waits: it may still be summed with others.
            rank = number - (len(options) if carried else 0)
            if (
                best is None
                or total < best[0] * (1 - CLOSE)
                or (total <= best[0] * (1 + CLOSE) and rank < best[1])
            ):
                best = (total, rank, choice, own)
        assert best is not None
        return best[2], best[3]

    def can_stay_partial(self, value: Value) -> bool:
        """Whether every use of a value is an op that is linear in it."""
        return all(
            op is not None
            and not (op.regions or op.is_mark)
            and any(index in group for group in rule_of(op.kind).linear)
            for op, index in self.problem.index.users.get(value, ())
        )
