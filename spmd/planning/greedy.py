"""The greedy planner: in program order, each op takes the choice that is cheapest at that point.

It is fast and simple: the baseline of the exact planner, which also proposes its plan. For each op
it adds up the op's own time, the reshards of its operands from the copies that exist by then, and
the reshard of its results to what propagation proposed for them.

The exact planner uses its pass over the program, `Walk`, too. This records what the partitioner
will do: in which shardings a value exists (its copies), and from which copy the next one is made.
"""

from collections.abc import Callable, Iterable
from typing import Any

from spmd.ir.control_flow import Tie, ties
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op, Region, Value
from spmd.mesh.sharding import Sharding, axes_text, replicated
from spmd.planning.choices import Choices
from spmd.planning.plan import Choice, Move, Plan
from spmd.planning.problem import Problem
from spmd.predict.fusion import wants_stored
from spmd.reshard.paths import States

CLOSE = 1e-9  # relative difference of times that are a tie


def plan_greedily(problem: Problem, choices: Choices | None = None) -> Plan:
    """Returns the greedy plan of a program, each argument in the first of its allowed shardings."""
    return _Greedy(problem, choices or Choices(problem)).run()


class Walk:
    """A pass over a program that makes a `Plan` of what a subclass decides (`choose`, `carry`)."""

    # What a planner decides: the choice for an op, with the op's own time, without reshards; and
    # the one state of everything that a result of a region op is tied to.
    choose: Callable[[Op], tuple[Choice, float]]
    carry: Callable[[Tie], Sharding]

    def __init__(self, problem: Problem, solver: str, arguments: States) -> None:
        self.problem, self.solver, self.arguments = problem, solver, arguments
        self.types = problem.program.types
        self.cheap = problem.propagated.cheap
        self.resharder = problem.resharder
        self.states: list[Sharding | None] = [None] * len(self.types)
        self.copies: dict[Value, tuple[Sharding, ...]] = {}
        # The copies that values had before the regions that are entered now: copies made inside of
        # a region are not seen behind it.
        self.undo: list[list[tuple[Value, tuple[Sharding, ...]]]] = [[]]
        self.shared: dict[Value, Sharding] = {}
        self.choices: dict[Value, Choice] = {}
        self.moves: list[Move] = []
        self.seconds = 0.0

    def run(self) -> Plan:
        """Walks over the whole program, and returns the plan."""
        problem, body, arguments = self.problem, self.problem.program.body, self.arguments
        self.define(body.args, arguments)
        self.region(body, 1)
        wanted = list(problem.results)
        for result, argument in problem.links.items():
            wanted[result] = wanted[result] or arguments[argument]
        results = tuple(
            # One without a wanted sharding lies as its producer leaves it.
            want or problem.left(v, self.states[v] or replicated(self.types[v].rank))
            for v, want in zip(body.results, wanted, strict=True)
        )
        for value, state in zip(body.results, results, strict=True):
            self.seconds += self.demand(value, state, 1)
        return Plan(
            problem,
            self.choices,
            tuple(self.states),
            self.shared,
            arguments,
            results,
            problem.index.trips,
            tuple(self.moves),
            self.seconds,
            self.solver,
            tuple(undivided_notes(problem)),
        )

    def define(self, values: Iterable[Value], states: Iterable[Sharding]) -> None:
        """Records the states of values, each of which is also the first copy of its value."""
        for value, state in zip(values, states, strict=False):
            self.states[value], self.copies[value] = state, (state,)

    def demand(self, value: Value, wanted: Sharding, times: int, user: Op | None = None) -> float:
        """Plans the reshard of a value for a use that wants a sharding; returns its seconds, once.

        One run does it `times` times: the `Move` that is recorded has their sum. What is returned
        is for one time, with memory traffic; 0 if a copy in that sharding exists, or if each use
        recomputes the value. `user` reads it; None for results and operands of control flow.
        """
        if value in self.cheap or wanted in self.copies[value]:
            return 0.0
        seconds, shared = 0.0, self.shared.get(value)
        if shared is not None and shared != wanted:
            seconds = self.demand(value, shared, times, user)
        copies = self.copies[value]
        have, path = self.resharder.cheapest(value, copies, wanted)
        if path.seconds:
            cost = path.seconds * times, path.bytes * times
            self.moves.append(Move(value, have, wanted, user, *cost))
        self.undo[-1].append((value, copies))
        self.copies[value] = (*copies, wanted)
        reads = enumerate(user.operands) if user is not None else ()
        stores = user is None or any(v == value and wants_stored(user, i) for i, v in reads)
        ways = (have,), (wanted,), path.seconds > 0, stores
        return seconds + path.seconds + float(self.problem.traffic(value, *ways)[0, 0])

    def region(self, region: Region, times: int) -> None:
        """Walks over the ops of a region, which is run `times` times in one run of the program."""
        cheap, copies = self.cheap, self.copies
        for op in region.ops:
            if op.regions:
                self.control_flow(op, times)
            elif not cheap.issuperset(op.results):
                choice, seconds = self.choose(op)
                for value, wanted in zip(op.operands, choice.operands, strict=True):
                    if value not in cheap and wanted not in copies[value]:
                        seconds += self.demand(value, wanted, times, op)
                self.define(op.results, choice.results)
                self.choices[op.results[0]] = choice
                self.seconds += seconds * times
            else:  # made where it is used, of scalars that are there by then
                for value in op.operands:
                    if value not in cheap and (whole := replicated(0)) not in copies[value]:
                        self.seconds += self.demand(value, whole, times, op) * times

    def control_flow(self, op: Op, times: int) -> None:
        """Walks over a loop or conditional: decides its carries' shardings, then its regions."""
        is_loop, bound = op.is_loop, ties(op)
        inner = times * self.problem.index.runs(op)
        carries = tuple(self.carry(tie) for tie in bound)
        operands = carries if is_loop else tuple(map(self.full_state, op.operands))
        for value, state in zip(op.operands, operands, strict=True):
            self.seconds += times * self.demand(value, state, times)
        for number, region in enumerate(op.regions):
            self.undo.append([])
            self.define(region.args, carries)
            self.region(region, inner)
            wanted = carries
            if is_loop and number == 0:  # every device decides alike whether the loop goes on
                wanted = tuple(replicated(self.types[v].rank) for v in region.results)
            for value, state in zip(region.results, wanted, strict=True):
                self.seconds += inner * self.demand(value, state, inner)
            for value, before in reversed(self.undo.pop()):
                self.copies[value] = before
        self.define(op.results, carries)
        self.choices[op.results[0]] = Choice((), operands, carries)

    def full_state(self, value: Value) -> Sharding:
        """Returns a value's state as if nothing were partial; replicated if it has no state."""
        state = self.states[value]
        return state.full() if state else replicated(self.types[value].rank)


class _Greedy(Walk):
    def __init__(self, problem: Problem, options: Choices) -> None:
        super().__init__(problem, "greedy", tuple(states[0] for states in problem.arguments))
        self.options, self.wishes = options, problem.wishes
        self.decided: dict[Any, tuple[Choice, float]] = {}

    def carry(self, tie: Tie) -> Sharding:
        if (wish := self.wishes[tie.result]) is not None:
            return wish
        if tie.source is not None:
            return self.full_state(tie.source)
        return replicated(self.types[tie.result].rank)

    def choose(self, op: Op) -> tuple[Choice, float]:
        """Returns the choice for an op that is cheapest at this point, and the op's own seconds."""
        copies_of, wishes = self.copies.get, self.wishes
        copies = tuple([copies_of(v, ()) for v in op.operands])  # nothing for cheap values
        wanted = tuple([(wish,) if (wish := wishes[v]) else () for v in op.results])
        ends = enumerate(zip(op.operands, copies, strict=True))
        partial = tuple(
            [i for i, (v, have) in ends if have and have[0].partial and self.can_stay_partial(v)]
        )
        held, stored = self.resharder.held(op.results[0]), self.problem.stored(op)
        key = (op.kind, held, stored, copies, wanted, partial)
        if (known := self.decided.get(key)) is not None:
            return known
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
        self.decided[key] = best[2:]
        return best[2:]

    def can_stay_partial(self, value: Value) -> bool:
        """Whether every use of a value is as an operand in which the reading op is linear."""
        return all(
            op is not None
            and not (op.regions or op.is_mark)
            and any(index in group for group in rule_of(op.kind).linear)
            for op, index in self.problem.index.users.get(value, ())
        )


def undivided_notes(problem: Problem) -> list[str]:
    """Returns a note on each dim of an argument or result that axes wanted for it do not divide."""
    program, mesh, propagated = problem.program, problem.mesh, problem.propagated
    results = zip(program.body.results, program.result_names, strict=True)
    arguments = zip(program.body.args, program.arg_names, strict=True)
    labels = {v: f"result {name}" for v, name in results}
    labels |= {v: f"argument {name}" for v, name in arguments}
    return [
        f"dim {dim} of {labels[value]} has size {program.types[value].shape[dim]}, which "
        f"{axes_text(axes, mesh)} does not divide: it is split over "
        f"{axes_text(propagated.proposals[value][dim], mesh) or 'nothing'}"
        for (value, dim), axes in propagated.undivided.items()
        if value in labels
    ]
