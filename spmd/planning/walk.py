"""`Walk`: one pass over a program, in order, that settles every op and sums what it all costs.

It keeps the books that the partitioner will keep: which copies of a value exist where, and from
which of them the next one is made. What to choose is left to its subclasses, the planners.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.ir.control_flow import Tie, ties
from spmd.ir.program import Op, Region, Value
from spmd.mesh.sharding import Sharding, format_axes, replicated
from spmd.planning.plan import Choice, Move, Plan
from spmd.planning.problem import Problem
from spmd.predict.fusion import wants_stored
from spmd.reshard.paths import States


class Walk:
    """One pass over a program that records states and copies of values, choices and seconds."""

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
        """Settles every op, and returns the plan."""
        problem, body, arguments = self.problem, self.problem.program.body, self.arguments
        for value, state in zip(body.args, arguments, strict=True):
            self.define(value, state)
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

    def define(self, value: Value, state: Sharding) -> None:
        """Notes the state in which a value's producer leaves it."""
        self.states[value] = state
        self.copies[value] = (state,)

    def demand(self, value: Value, wanted: Sharding, times: int, user: Op | None = None) -> float:
        """Makes the copy that a use wants so many times in one run, and returns the seconds for it.

        It costs nothing if the copy exists, or if the value is recomputed for every use. The `user`
        is the op that asks; None for carries and results.
        """
        if value in self.cheap:
            return 0.0
        copies = self.copies[value]
        if wanted in copies:
            return 0.0
        seconds = 0.0
        shared = self.shared.get(value)
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
        """Settles the ops of a region that runs `times` in one run of the program."""
        cheap, copies = self.cheap, self.copies
        for op in region.ops:
            if op.regions:
                self.control_flow(op, times)
            elif not cheap.issuperset(op.results):
                choice, seconds = self.choose(op)
                for value, wanted in zip(op.operands, choice.operands, strict=True):
                    if value not in cheap and wanted not in copies[value]:
                        seconds += self.demand(value, wanted, times, op)
                for value, state in zip(op.results, choice.results, strict=True):
                    self.define(value, state)
                self.choices[op.results[0]] = choice
                self.seconds += seconds * times
            else:  # made where it is used, of scalars that are there by then
                for value in op.operands:
                    if value not in cheap and (whole := replicated(0)) not in copies[value]:
                        self.seconds += self.demand(value, whole, times, op) * times

    def control_flow(self, op: Op, times: int) -> None:
        """Settles a region op: its carries, then what is inside."""
        is_loop, bound = op.is_loop, ties(op)
        inner = times * self.problem.index.runs(op)
        carries = tuple(self.carry(tie) for tie in bound)
        operands = carries if is_loop else tuple(map(self.full_state, op.operands))
        for value, state in zip(op.operands, operands, strict=True):
            self.seconds += times * self.demand(value, state, times)
        for number, region in enumerate(op.regions):
            self.undo.append([])
            for value, state in zip(region.args, carries, strict=False):
                self.define(value, state)
            self.region(region, inner)
            wanted = carries
            if is_loop and number == 0:  # every device decides alike whether the loop goes on
                wanted = tuple(replicated(self.types[v].rank) for v in region.results)
            for value, state in zip(region.results, wanted, strict=True):
                self.seconds += inner * self.demand(value, state, inner)
            for value, before in reversed(self.undo.pop()):
                self.copies[value] = before
        for value, state in zip(op.results, carries, strict=True):
            self.define(value, state)
        self.choices[op.results[0]] = Choice((), operands, carries)

    def full_state(self, value: Value) -> Sharding:
        """Returns a value's state with nothing partial."""
        state = self.states[value]
        return state.full() if state else replicated(self.types[value].rank)


def undivided_notes(problem: Problem) -> list[str]:
    """Returns a note for each dim of an argument or result that its wanted axes do not divide."""
    program, mesh, propagated = problem.program, problem.mesh, problem.propagated
    results = zip(program.body.results, program.result_names, strict=True)
    arguments = zip(program.body.args, program.arg_names, strict=True)
    labels = {v: f"result {name}" for v, name in results}
    labels |= {v: f"argument {name}" for v, name in arguments}
    notes = []
    for (value, dim), axes in propagated.undivided.items():
        if value in labels:
            kept = propagated.proposals[value][dim]
            notes.append(
                f"dim {dim} of {labels[value]} has size {program.types[value].shape[dim]}, which "
                f"{format_axes(axes, mesh)} does not divide: it is split over "
                f"{format_axes(kept, mesh) if kept else 'nothing'}"
            )
    return notes
