"""`Index`: who makes a value, who reads it, how often a loop runs: found once for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from spmd.ir.control_flow import UNKNOWN_TRIPS, held_atoms, producers_of, trip_count, users_of
from spmd.ir.program import Op, Program, Value


@dataclass(frozen=True, eq=False)
class Index:
    """Lookups over one program. Each is made when it is first asked for, and kept.

    Attributes:
      program: the program.

    Example:
      >>> index = Index(program)
      >>> index.producers[value].name
      'stablehlo.add'
    """

    program: Program

    @cached_property
    def producers(self) -> Mapping[Value, Op]:
        """The op that defines each value; arguments have none."""
        return producers_of(self.program)

    @cached_property
    def users(self) -> Mapping[Value, Sequence[tuple[Op | None, int]]]:
        """For each value, its uses as (op, operand index); a region's return is (None, index)."""
        return users_of(self.program)

    @cached_property
    def held(self) -> Mapping[Value, tuple[int, ...]]:
        """For each value inside a manual region, the atoms along which it may differ unseen."""
        return held_atoms(self.program)

    @cached_property
    def trips(self) -> Mapping[Value, int | None]:
        """A loop's first result -> how often the loop runs, None where that cannot be told."""
        loops = (op for op in self.program.walk() if op.is_loop)
        return {op.results[0]: trip_count(op, self.producers) for op in loops if op.results}

    def runs(self, op: Op) -> int:
        """How often the regions of an op run each time that the op does; a guess if unknown."""
        if not op.is_loop:
            return 1
        trips = self.trips.get(op.results[0])
        return UNKNOWN_TRIPS if trips is None else trips
