"""`Plan`: what the planner decided. The partitioner reads nothing else."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from spmd.ir.program import Loc, Op, Program, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.topology import Topology
from spmd.planning.problem import Problem
from spmd.propagation.projection import Assignment
from spmd.propagation.propagate import Propagated


class Choice(NamedTuple):
    """For one op: the assignment, and the shardings of operands and results that follow from it."""

    assignment: Assignment
    operands: tuple[Sharding, ...]  # partial where the op is linear
    results: tuple[Sharding, ...]


class Move(NamedTuple):
    """One reshard: a value, its shardings before and after, the reader, and the cost in one run."""

    value: Value
    have: Sharding
    wanted: Sharding
    user: Op | None  # the op that asked for it; None for carries and results
    seconds: float  # predicted, of one run of the program: loops multiply
    bytes: int  # that each device sends in one run


class Recomputed(NamedTuple):
    """A value that is recomputed where it is read (remat) instead of being held."""

    loc: Loc
    name: str  # of the op that makes it
    bytes: int  # that one device would hold


class Weighed(NamedTuple):
    """A form of a program (say, with loops written out): predicted time, why it is not taken."""

    name: str  # what is done to the program, for people
    seconds: float | None  # predicted for one run; None if the form was not made
    before: float  # seconds of the program that it was weighed with
    refusal: str  # why it was not taken; empty if it was

    @property
    def text(self) -> str:
        """The outcome: `stacked: 172 ms predicted instead of 184 ms`, or `not ...` and why."""
        before = f"{self.before * 1e3:.3g} ms"
        if self.seconds is None:
            return f"not {self.name}: {before} predicted as it is, {self.refusal}"
        text = f"{self.name}: {self.seconds * 1e3:.3g} ms predicted instead of {before}"
        return f"not {text}, {self.refusal}" if self.refusal else text


class Plan(NamedTuple):
    """What a planner decided: a choice for each op, a state for each value, cheap ones excepted."""

    problem: Problem
    # An op's first result -> its choice. Region ops have one too: their carries' states.
    choices: Mapping[Value, Choice]
    # Of each value, as its producer leaves it; None for cheap values, made anew for every use.
    states: tuple[Sharding | None, ...]
    # Values of which a second copy is made before the first use that needs another state than the
    # value's: uses share it.
    copies: Mapping[Value, Sharding]
    # Shardings at the boundary: nothing partial; parts of axes only where marked.
    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    trips: Mapping[Value, int | None]  # a loop's first result -> how often it runs, if known
    moves: tuple[Move, ...]  # every reshard that takes time, in program order
    seconds: float  # all computation and reshards of one run, as if nothing ran side by side
    solver: str
    notes: tuple[str, ...]  # what people should know (fallbacks taken), in program order
    run_seconds: float = 0.0  # predicted time of one run; 0 if that was not tried
    # Seconds for each byte that is held at the fullest moment: what is worth less than its price is
    # made again instead (`spmd.lowering.recompute`); 0: nothing is.
    byte_price: float = 0.0
    recomputed: tuple[Recomputed, ...] = ()  # empty if that was not tried
    # Share of a reshard's time that counted in the cost network, and whether all of it counted that
    # exceeded its slack.
    exposed: float = 1.0
    by_slack: bool = False
    # Whether ops chose among what the marks suggest and what the plan of the loops that were
    # written out took for them; else they chose among all placements.
    like_loops: bool = False
    # How far `seconds` is above the least of all that was weighed at most, as a share of it.
    gap: float = 0.0
    forms: tuple[Weighed, ...] = ()  # that were weighed, those that were taken among them

    @property
    def propagated(self) -> Propagated:
        """The program with what propagation proposed for each value."""
        return self.problem.propagated

    @property
    def program(self) -> Program:
        """The program that was planned: the global one, of which no value is split yet."""
        return self.problem.program

    @property
    def mesh(self) -> Mesh:
        """The mesh over whose axes values are split."""
        return self.problem.mesh

    @property
    def topology(self) -> Topology:
        """The machine for which the plan's seconds are predicted."""
        return self.problem.topology

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """Names of axes larger than 1 that split nothing: devices along them compute the same."""
        used = {a for sharding in self.arguments for a in sharding.used}
        used |= {a for c in self.choices.values() for axes in c.assignment for a in axes}
        atoms = self.mesh.axis_atoms
        return tuple(name for name, own in atoms.items() if own and used.isdisjoint(own))

    def choice(self, op: Op) -> Choice:
        """Returns the choice for an op; KeyError if the op is recomputed at each use."""
        return self.choices[op.results[0]]


# A plan as plain data, and back: what was decided, without the problem that it was decided for.

_AS_THEY_ARE = [n for n, kind in Plan.__annotations__.items() if kind in (bool, float, str)]


def recorded(plan: Plan) -> dict[str, Any]:
    """Returns a plan as data for JSON, without its problem, trip counts and recomputed values."""
    shardings: dict[Sharding, int] = {}
    choices: dict[Choice, int] = {}

    def of(*found: Sharding) -> list[int]:
        return [shardings.setdefault(sharding, len(shardings)) for sharding in found]

    record: dict[str, Any] = {name: getattr(plan, name) for name in _AS_THEY_ARE}
    record |= {
        "notes": plan.notes,
        "forms": plan.forms,
        "arguments": of(*plan.arguments),
        "results": of(*plan.results),
        "states": [None if state is None else of(state)[0] for state in plan.states],
        "copies": [(value, *of(state)) for value, state in plan.copies.items()],
        "moves": [
            (m.value, *of(m.have, m.wanted), m.user and m.user.results[0], m.seconds, m.bytes)
            for m in plan.moves
        ],
        "chosen": [(v, choices.setdefault(c, len(choices))) for v, c in plan.choices.items()],
        "choices": [(c.assignment, of(*c.operands), of(*c.results)) for c in choices],
    }
    return {**record, "shardings": [(s.dims, s.partial, s.kind) for s in shardings]}


def replayed(record: Mapping[str, Any], problem: Problem) -> Plan:
    """Returns the plan of a record that `recorded` made and JSON read back, for its problem."""
    shardings = [Sharding(*_frozen(fields)) for fields in record["shardings"]]
    producers = problem.index.producers

    def at(numbers: list[int]) -> tuple[Sharding, ...]:
        return tuple([shardings[number] for number in numbers])

    def move(value: int, have: int, wanted: int, user: int | None, *cost: Any) -> Move:
        reader = None if user is None else producers[user]
        return Move(value, shardings[have], shardings[wanted], reader, *cost)

    choices = [Choice(_frozen(a), at(given), at(made)) for a, given, made in record["choices"]]
    return Plan(
        problem,
        {value: choices[number] for value, number in record["chosen"]},
        tuple([None if number is None else shardings[number] for number in record["states"]]),
        {value: shardings[number] for value, number in record["copies"]},
        at(record["arguments"]),
        at(record["results"]),
        problem.index.trips,
        tuple([move(*fields) for fields in record["moves"]]),
        notes=tuple(record["notes"]),
        forms=tuple([Weighed(*form) for form in record["forms"]]),
        **{name: record[name] for name in _AS_THEY_ARE},
    )


def _frozen(plain: Any) -> Any:
    # Lists in lists as tuples in tuples.
    return tuple(map(_frozen, plain)) if isinstance(plain, list) else plain
