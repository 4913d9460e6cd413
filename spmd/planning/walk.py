"""`Walk`: one pass over a program, in order, that settles every op and sums what it all costs.

It keeps the books that the partitioner will keep: which copies of a value exist where, and from
which of them the next one is made. What to choose is left to its subclasses, the planners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd.ir.control_flow import UNKNOWN_TRIPS, Tie, held_atoms, producers_of, ties, trip_count
from spmd.ir.program import Op, Region, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, format_axes, is_even, replicated
from spmd.mesh.topology import Topology
from spmd.planning.plan import Choice, Plan
from spmd.propagation.propagated import Propagated
from spmd.reshard.paths import can_reshard, reshard


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


def proposed(propagated: Propagated) -> list[Sharding | None]:
    """What propagation proposed for each value, if anything; equal ones are one object."""
    made: dict[tuple[Axes, ...], Sharding | None] = {}
    wishes = []
    for dims in propagated.proposals:
        if dims not in made:
            made[dims] = Sharding(dims) if any(dims) else None
        wishes.append(made[dims])
    return wishes


def boundary(propagated: Propagated, value: Value, fallback: Sharding) -> Sharding:
    """A boundary value's sharding: its proposal in whole axes, else the fallback."""
    shape = propagated.program.types[value].shape
    dims = whole_axes(propagated.proposals[value], shape, propagated.mesh)
    return Sharding(dims) if any(dims) or value in propagated.marks else fallback


class Walk:
    """Books of one pass: states and copies of values, choices of ops, seconds."""

    solver = ""

    def __init__(self, propagated: Propagated, topology: Topology) -> None:
        self.propagated = propagated
        self.program = propagated.program
        self.mesh = propagated.mesh
        self.topology = topology
        self.types = self.program.types
        self.cheap = propagated.cheap
        self.producers = producers_of(self.program)
        self.held = held_atoms(self.program)
        self.states: list[Sharding | None] = [None] * len(self.types)
        self.copies: dict[Value, tuple[Sharding, ...]] = {}
        self.undo: list[list[tuple[Value, tuple[Sharding, ...]]]] = [[]]
        self.shared: dict[Value, Sharding] = {}
        self.choices: dict[Value, Choice] = {}
        self.trips: dict[Value, int | None] = {}
        self.notes: list[str] = []
        self.seconds = 0.0

    def choose(self, op: Op) -> tuple[Choice, float]:
        """The choice for an op, and the op's own time, without reshards."""
        raise NotImplementedError

    def carry(self, tie: Tie) -> Sharding:
        """The one state of everything that a result of a region op is tied to."""
        raise NotImplementedError

    def run(
        self,
        arguments: tuple[Sharding, ...],
        result_marks: Sequence[Sharding | None],
        links: Mapping[int, int],
    ) -> Plan:
        """Settles everything.

        Args:
          arguments: the sharding of each argument.
          result_marks: for each result, the sharding that the user asked for, or None.
          links: result -> argument of donated arguments and their updates, which look alike.
        """
        body = self.program.body
        self.note_undivided()
        for value, state in zip(body.args, arguments, strict=True):
            self.define(value, state)
        self.region(body, 1)
        marks = list(result_marks)
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
            self.shared,
            arguments,
            results,
            self.trips,
            self.seconds,
            self.solver,
            tuple(self.notes),
            result_marks=tuple(result_marks),
            links=tuple(links.items()),
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

    def result(self, value: Value) -> Sharding:
        """The sharding of a result that nothing asks for: as proposed, else as it is."""
        state = self.states[value]
        type_ = self.types[value]
        dims = whole_axes(state.dims, type_.shape, self.mesh) if state else ()
        return boundary(self.propagated, value, Sharding(dims) if state else replicated(type_.rank))

    # Values.

    def define(self, value: Value, state: Sharding) -> None:
        """A value's producer leaves it in a state."""
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
        """Time of the cheapest reshard, infinite where there is none."""
        if have == wanted:
            return 0.0
        if not can_reshard(have, wanted):
            return float("inf")
        type_, held = self.types[value], self.held.get(value, ())
        return reshard(have, wanted, type_, self.mesh, self.topology, held).seconds

    def demand(self, value: Value, wanted: Sharding) -> float:
        """Makes the copy that a use wants; returns its cost."""
        if value in self.cheap:
            return 0.0
        copies = self.copies[value]
        if wanted in copies:
            return 0.0
        seconds = 0.0
        shared = self.shared.get(value)
        if shared is not None and shared != wanted:
            seconds = self.demand(value, shared)
            copies = self.copies[value]
        seconds += self.reshard_seconds(value, wanted)
        self.undo[-1].append((value, copies))
        self.copies[value] = (*copies, wanted)
        return seconds

    # Ops.

    def region(self, region: Region, trips: int) -> None:
        """Settles the ops of a region that runs so many times."""
        cheap = self.cheap
        for op in region.ops:
            if op.regions:
                self.control_flow(op, trips)
            elif all([v in cheap for v in op.results]):
                continue
            else:
                choice, seconds = self.choose(op)
                for value, wanted in zip(op.operands, choice.operands, strict=True):
                    seconds += self.demand(value, wanted)
                for value, state in zip(op.results, choice.results, strict=True):
                    self.define(value, state)
                self.choices[op.results[0]] = choice
                self.seconds += seconds * trips

    def mark_choice(self, op: Op) -> Choice:
        """The choice that a mark leaves: what it says."""
        wanted = Sharding(self.propagated.proposals[op.results[0]])
        return Choice(wanted.dims, (wanted,), (wanted,))

    # Control flow.

    def control_flow(self, op: Op, trips: int) -> None:
        """Settles a region op: its carries, then what is inside."""
        bound = ties(op)
        inner_trips = 1
        if op.is_loop:
            count = trip_count(self.program, op, self.producers)
            self.trips[op.results[0]] = count
            inner_trips = UNKNOWN_TRIPS if count is None else count
        carries = tuple(self.carry(tie) for tie in bound)
        for tie, state in zip(bound, carries, strict=True):
            if tie.source is not None:
                self.seconds += trips * self.demand(tie.source, state)
        operands = tuple(
            carries[i] if op.is_loop else self.full_state(v) for i, v in enumerate(op.operands)
        )
        for value, state in zip(op.operands, operands, strict=True):
            self.seconds += trips * self.demand(value, state)
        for region in op.regions:
            self.enter()
            for value, state in zip(region.args, carries, strict=False):
                self.define(value, state)
            self.region(region, trips * inner_trips)
            wanted = carries if len(region.results) == len(carries) else None
            if wanted is None or (region is op.regions[0] and op.is_loop):
                wanted = tuple(replicated(self.types[v].rank) for v in region.results)
            for value, state in zip(region.results, wanted, strict=True):
                self.seconds += trips * inner_trips * self.demand(value, state)
            self.leave()
        for value, state in zip(op.results, carries, strict=True):
            self.define(value, state)
        self.choices[op.results[0]] = Choice((), operands, carries)

    def full_state(self, value: Value) -> Sharding:
        """A value's state with nothing partial."""
        state = self.states[value]
        return state.full() if state else replicated(self.types[value].rank)
