"""`Plan`: what the planner decided. The partitioner reads nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from spmd.ir.program import Loc, Op, Program, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.topology import Topology
from spmd.planning.problem import Problem
from spmd.propagation.projection import Assignment
from spmd.propagation.propagate import Propagated


class Choice(NamedTuple):
    """For one op: the assignment, and what follows from it.

    Attributes:
      assignment: atoms of each factor.
      operands: the sharding that each operand must have (partial where the op is linear).
      results: the sharding that each result will have.
    """

    assignment: Assignment
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]


class Move(NamedTuple):
    """One reshard that a plan makes.

    Attributes:
      value: what is resharded.
      have, wanted: from where to where.
      user: the op that asked for it; None for carries and results.
      seconds, bytes: predicted time, and what each device sends, in one run (loops multiply).
    """

    value: Value
    have: Sharding
    wanted: Sharding
    user: Op | None
    seconds: float
    bytes: int


class Recomputed(NamedTuple):
    """A value that is not held, but made again where it is read.

    Attributes:
      loc: where it comes from.
      name: the op that makes it.
      bytes: what one device would hold.
    """

    loc: Loc
    name: str
    bytes: int


class Weighed(NamedTuple):
    """Another form of a program, and whether it was taken (`spmd.planning.search`).

    Attributes:
      name: what is done to the program, for people.
      seconds: predicted time of one run of it; None if it was not made.
      before: that of the program that it was weighed with.
      refusal: why it was not taken; empty if it was.
    """

    name: str
    seconds: float | None
    before: float
    refusal: str

    @property
    def text(self) -> str:
        """`loops of at most 64 trips written out: 172 ms predicted instead of 184 ms`."""
        before = f"{self.before * 1e3:.3g} ms"
        if self.seconds is None:
            return f"not {self.name}: {before} predicted as it is, {self.refusal}"
        text = f"{self.name}: {self.seconds * 1e3:.3g} ms predicted instead of {before}"
        return f"not {text}, {self.refusal}" if self.refusal else text


class Plan(NamedTuple):
    """One choice for each op, one state for each value.

    Attributes:
      problem: what was asked.
      choices: an op's first result -> its choice. Region ops have one too: their carries' states.
      states: for each value, the sharding that its producer leaves it in; None for cheap values,
        which are made anew for every use.
      copies: values of which a second copy is made before the first use that needs another state
        than the value's: uses share it.
      arguments, results: boundary shardings: nothing partial; parts of axes only where marked.
      trips: a loop's first result -> how often it runs, None where that is not known.
      moves: every reshard that takes time, in program order.
      seconds: compute and reshard times of one run added up, as if nothing ran side by side.
      solver: which solver made it.
      notes: what people should know (fallbacks taken), in program order.
      run_seconds: predicted time of one run of its program; 0 if that was not tried.
      byte_price: seconds for each byte that its program holds at the fullest moment: what is worth
        less than its price is made again instead (`spmd.lowering.recompute`); 0: nothing is.
      recomputed: what its program makes again; empty if that was not tried.
      exposed: the share of a reshard's time that counted in the network that it was taken from.
      by_slack: whether all of it counted that took longer than what is computed in the meantime.
      like_loops: whether ops chose among what the marks suggest and what the plan of the loops that
        were written out took for them; else among all placements.
      gap: how far its sum of seconds is above the least of all that was weighed at most, as a share
        of it; 0: there is none that is smaller.
      forms: other forms of its program that were weighed, those that were taken among them.
    """

    problem: Problem
    choices: Mapping[Value, Choice]
    states: tuple[Sharding | None, ...]
    copies: Mapping[Value, Sharding]
    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    trips: Mapping[Value, int | None]
    moves: tuple[Move, ...]
    seconds: float
    solver: str
    notes: tuple[str, ...]
    run_seconds: float = 0.0
    byte_price: float = 0.0
    recomputed: tuple[Recomputed, ...] = ()
    exposed: float = 1.0
    by_slack: bool = False
    like_loops: bool = False
    gap: float = 0.0
    forms: tuple[Weighed, ...] = ()

    @property
    def propagated(self) -> Propagated:
        """The program with its proposals."""
        return self.problem.propagated

    @property
    def program(self) -> Program:
        """The global program."""
        return self.problem.program

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.problem.mesh

    @property
    def topology(self) -> Topology:
        """The machine that it was costed on."""
        return self.problem.topology

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """Axes of the mesh over which nothing is split: their devices all do the same."""
        used = {a for sharding in self.arguments for a in sharding.used}
        for choice in self.choices.values():
            used.update(a for axes in choice.assignment for a in axes)
        atoms = self.mesh.axis_atoms
        return tuple(name for name, own in atoms.items() if own and used.isdisjoint(own))

    def choice(self, op: Op) -> Choice:
        """The choice for an op."""
        return self.choices[op.results[0]]
