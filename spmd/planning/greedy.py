"""The greedy plan: ops in program order, each takes the candidate that is cheapest right there.

It is fast and simple, the baseline that the exact planner is measured against and falls back to.
For each op it weighs the op's own time, the reshards of its operands from the copies that exist,
and the reshard of its results to what propagation proposed for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from spmd.ir.control_flow import UNKNOWN_TRIPS, producers_of, ties, trip_count, users_of
from spmd.ir.program import Op, Region, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, format_axes, is_even, replicated
from spmd.mesh.topology import Topology
from spmd.planning.candidates import candidates
from spmd.planning.cost import op_seconds
from spmd.planning.plan import Choice, Plan
from spmd.planning.reshard import reshard
from spmd.propagation.propagate import Propagated
from spmd.propagation.registry import rule_of


def plan_greedily(
    propagated: Propagated,
    topology: Topology,
    result_marks: Sequence[Sharding | None] = (),
    links: Sequence[tuple[int, int]] = (),
) -> Plan:
    """Plans a whole program.

    Args:
      propagated: the program with its proposals.
      topology: the machine to cost on.
      result_marks: for each result, the sharding that the user asked for, or None.
      links: (result, argument) of donated arguments and their updates, which look alike.
    """
    return _Greedy(propagated, topology).run(result_marks, dict(links))


def whole_axes(dims: Sequence[Axes], shape: Sequence[int], mesh: Mesh) -> tuple[Axes, ...]:
    """The longest part of each dim's atoms that is whole axes and divides it, as boundaries ask."""
    kept = []
    for axes, size in zip(dims, shape, strict=True):
        done: Axes = ()
        rest = axes
        while rest:
            axis = mesh.axis_atoms[mesh.axis_names[mesh.atoms[rest[0]].axis]]
            if rest[: len(axis)] != axis or not is_even(size, done + axis, mesh):
                break
            done += axis
            rest = rest[len(axis) :]
        kept.append(done)
    return tuple(kept)


def _wishes(propagated: Propagated) -> list[Sharding | None]:
    """What propagation proposed for each value, if anything; equal ones are one object."""
    made: dict[tuple[Axes, ...], Sharding | None] = {}
    wishes = []
    for dims in propagated.proposals:
        if dims not in made:
            made[dims] = Sharding(dims) if any(dims) else None
        wishes.append(made[dims])
    return wishes


class _Greedy:
    def __init__(self, propagated: Propagated, topology: Topology) -> None:
        self.propagated = propagated
        self.program = propagated.program
        self.mesh = propagated.mesh
        self.topology = topology
        self.types = self.program.types
        self.cheap = propagated.cheap
        self.wishes = _wishes(propagated)
        self.producers = producers_of(self.program)
        self.states: list[Sharding | None] = [None] * len(self.types)
        self.copies: dict[Value, tuple[Sharding, ...]] = {}
        self.undo: list[list[tuple[Value, tuple[Sharding, ...]]]] = [[]]
        self.choices: dict[Value, Choice] = {}
        self.trips: dict[Value, int | None] = {}
        self.decided: dict[Any, tuple[Choice, float]] = {}
        self.notes: list[str] = []
        self.seconds = 0.0

    def run(self, result_marks: Sequence[Sharding | None], links: Mapping[int, int]) -> Plan:
        body = self.program.body
        self.note_undivided()
        arguments = tuple(self.boundary(v, replicated(self.types[v].rank)) for v in body.args)
        for value, state in zip(body.args, arguments, strict=True):
            self.define(value, state)
        self.region(body, 1)
        marks = list(result_marks or [None] * len(body.results))
        for result, argument in links.items():
            if marks[result] is None:
                marks[result] = arguments[argument]
        results = tuple(
            mark if mark is not None else self.result(value)
            for value, mark in zip(body.results, marks, strict=True)
        )
        for value, wanted in zip(body.results, results, strict=True):
            self.seconds += self.demand(value, wanted)
        return Plan(
            self.propagated,
            self.topology,
            self.choices,
            tuple(self.states),
            arguments,
            results,
            self.trips,
            self.seconds,
            "greedy",
            tuple(self.notes),
        )

    def note_undivided(self) -> None:
        """Arguments and results keep the part of the wanted axes that divides them: say so."""
        program, mesh = self.program, self.mesh
        names = dict(zip(program.body.results, program.result_names, strict=True))
        labels = {v: f"result {name}" for v, name in names.items()}
        for v, name in zip(program.body.args, program.arg_names, strict=True):
            labels[v] = f"argument {name}"
        for (value, dim), axes in self.propagated.undivided.items():
            if value in labels:
                kept = self.propagated.proposals[value][dim]
                self.notes.append(
                    f"dim {dim} of {labels[value]} has size {self.types[value].shape[dim]}, which "
                    f"{format_axes(axes, mesh)} does not divide: it is split over "
                    f"{format_axes(kept, mesh) if kept else 'nothing'}"
                )

    def boundary(self, value: Value, fallback: Sharding) -> Sharding:
        """A boundary value's sharding: its proposal in whole axes, else the fallback."""
        dims = self.whole(value, self.propagated.proposals[value])
        return Sharding(dims) if any(dims) or value in self.propagated.marks else fallback

    def whole(self, value: Value, dims: Sequence[Axes]) -> tuple[Axes, ...]:
        """As much of each dim's atoms as a boundary may have: whole axes that divide it."""
        return whole_axes(dims, self.types[value].shape, self.mesh)

    def result(self, value: Value) -> Sharding:
        state = self.states[value]
        rank = self.types[value].rank
        dims = self.whole(value, state.dims) if state else ()
        return self.boundary(value, Sharding(dims) if state else replicated(rank))

    # Values.

    @cached_property
    def users(self) -> dict[Value, list[tuple[Op | None, int]]]:
        """Uses of every value; few programs ask."""
        return users_of(self.program)

    def define(self, value: Value, state: Sharding) -> None:
        self.states[value] = state
        self.copies[value] = (state,)

    def enter(self) -> None:
        """Copies made from here on are seen only until `leave`."""
        self.undo.append([])

    def leave(self) -> None:
        """Forgets the copies made since `enter`."""
        for value, before in reversed(self.undo.pop()):
            self.copies[value] = before

    def reshard_seconds(self, value: Value, wanted: Sharding) -> float:
        """Time of the cheapest reshard from a copy that exists; 0 for values made to order."""
        if value in self.cheap:
            return 0.0
        copies = self.copies[value]
        if wanted in copies:
            return 0.0
        return min(self.path_seconds(value, have, wanted) for have in copies)

    def path_seconds(self, value: Value, have: Sharding, wanted: Sharding) -> float:
        if have == wanted:
            return 0.0
        if not set(wanted.partial) <= set(have.partial):
            return float("inf")
        return reshard(have, wanted, self.types[value], self.mesh, self.topology).seconds

    def demand(self, value: Value, wanted: Sharding) -> float:
        """Makes the copy that a use wants; returns its cost."""
        if value in self.cheap:
            return 0.0
        copies = self.copies[value]
        if wanted in copies:
            return 0.0
        seconds = self.reshard_seconds(value, wanted)
        self.undo[-1].append((value, copies))
        self.copies[value] = (*copies, wanted)
        return seconds

    # Ops.

    def region(self, region: Region, trips: int) -> None:
        cheap = self.cheap
        for op in region.ops:
            if op.regions:
                self.control_flow(op, trips)
            elif all([v in cheap for v in op.results]):
                continue
            else:
                choice, seconds = self.decide(op)
                self.commit(op, choice)
                self.seconds += seconds * trips

    def commit(self, op: Op, choice: Choice) -> None:
        for value, wanted in zip(op.operands, choice.operands, strict=True):
            self.demand(value, wanted)
        for value, state in zip(op.results, choice.results, strict=True):
            self.define(value, state)
        self.choices[op.results[0]] = choice

    def decide(self, op: Op) -> tuple[Choice, float]:
        if op.kind.name == "spmd.mark":
            choice = self.mark_choice(op)
            return choice, self.reshard_seconds(op.operands[0], choice.operands[0])
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

    def mark_choice(self, op: Op) -> Choice:
        value = op.results[0]
        wanted = Sharding(self.propagated.proposals[value])
        return Choice(wanted.dims, (wanted,), (wanted,))

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
            here = op_seconds(op.kind, rule, choice.assignment, self.mesh, self.topology)
            for value, wanted in zip(op.operands, choice.operands, strict=True):
                here += self.reshard_seconds(value, wanted)
            later = sum(
                self.later_seconds(value, state, wish)
                for value, state, wish in zip(op.results, choice.results, wishes, strict=True)
            )
            # On a tie the one that keeps partials waits: it may still be summed with others.
            rank = (here + later, number - (len(options) if partial else 0))
            if (
                best is None
                or (rank[0] < best[0] * (1 - 1e-9))
                or (rank[0] <= best[0] * (1 + 1e-9) and rank[1] < best[1])
            ):
                best = (*rank, choice, here)
        assert best is not None
        return best[2], best[3]

    def later_seconds(self, value: Value, state: Sharding, wish: Sharding | None) -> float:
        """What it will cost to bring a result to where it is wanted."""
        target = wish or state.full()
        return self.path_seconds(value, state, target)

    def can_stay_partial(self, value: Value) -> bool:
        """Whether every use of a value is an op that is linear in it."""
        for op, index in self.users.get(value, ()):
            if op is None or op.regions or op.name == "spmd.mark":
                return False
            if not any(index in group for group in rule_of(op.kind).linear):
                return False
        return True

    # Control flow.

    def control_flow(self, op: Op, trips: int) -> None:
        bound = ties(op)
        inner_trips = 1
        if op.kind.name == "stablehlo.while":
            count = trip_count(self.program, op, self.producers)
            self.trips[op.results[0]] = count
            inner_trips = UNKNOWN_TRIPS if count is None else count
        carries = tuple(self.carry(tie.result, tie.source) for tie in bound)
        for tie, state in zip(bound, carries, strict=True):
            if tie.source is not None:
                self.seconds += trips * self.demand(tie.source, state)
        operands = tuple(
            carries[i] if op.kind.name == "stablehlo.while" else self.full_state(v)
            for i, v in enumerate(op.operands)
        )
        for value, state in zip(op.operands, operands, strict=True):
            self.seconds += trips * self.demand(value, state)
        for region in op.regions:
            self.enter()
            for value, state in zip(region.args, carries, strict=False):
                self.define(value, state)
            self.region(region, trips * inner_trips)
            wanted = carries if len(region.results) == len(carries) else None
            if wanted is None or (region is op.regions[0] and op.kind.name == "stablehlo.while"):
                wanted = tuple(replicated(self.types[v].rank) for v in region.results)
            for value, state in zip(region.results, wanted, strict=True):
                self.seconds += trips * inner_trips * self.demand(value, state)
            self.leave()
        for value, state in zip(op.results, carries, strict=True):
            self.define(value, state)
        self.choices[op.results[0]] = Choice((), operands, carries)

    def full_state(self, value: Value) -> Sharding:
        state = self.states[value]
        return state.full() if state else replicated(self.types[value].rank)

    def carry(self, result: Value, source: Value | None) -> Sharding:
        """One state for everything that a carry is tied to."""
        wish = self.wishes[result]
        if wish is not None:
            return wish
        state = self.states[source] if source is not None else None
        return state.full() if state else replicated(self.types[result].rank)
