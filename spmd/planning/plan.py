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
from spmd.propagation.propagated import Propagated


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


class Halved(NamedTuple):
    """Arguments that are cut into halves, so that exchanges run beside the other half's arithmetic.

    Attributes:
      dims: (path of an argument, number of its dim).
      whole_seconds: predicted time of one run of the program that is not cut.
    """

    dims: tuple[tuple[str, int], ...]
    whole_seconds: float


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
      greedy_seconds: predicted time of the greedy plan's program; 0 if that was not tried.
      byte_price: seconds for each byte that its program holds at the fullest moment: what is worth
        less than its price is made again instead (`spmd.lowering.recompute`); 0: nothing is.
      recomputed: what its program makes again; empty if that was not tried.
      exposed: the share of a reshard's time that counted in the network that it was taken from.
      halved: what its program cuts into halves; None if nothing.
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
    greedy_seconds: float = 0.0
    byte_price: float = 0.0
    recomputed: tuple[Recomputed, ...] = ()
    exposed: float = 1.0
    halved: Halved | None = None

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
