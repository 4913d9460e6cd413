"""What a propagation finds: a proposal for every value, where it comes from, and disagreements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from spmd.ir.control_flow import Index
from spmd.ir.program import Loc, Op, Program, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Mark


class Origin(NamedTuple):
    """Why a dim has some of its atoms: from a neighbouring value's dim, or from a mark.

    Attributes:
      atoms: the atoms.
      value, dim: where they came from; no value: a mark.
      label: the op that they came through, or the mark's reason.
      loc: where that op is.
    """

    atoms: Axes
    value: Value | None
    dim: int
    label: str
    loc: Loc = Loc()

    @property
    def reason(self) -> str:
        """For people: `through stablehlo.add at train.py:12 (step)`, or the mark's reason."""
        if self.value is None:
            return self.label
        source = self.loc.trail
        label = self.label.removeprefix("stablehlo.")
        return f"through {label}" + (f" at {source}" if source else "")


class Conflict(NamedTuple):
    """Values around one op that want different axes for one factor of it."""

    op: Op
    factor: int
    claims: tuple[tuple[Axes, Value, int], ...]


@dataclass(frozen=True, eq=False)
class Propagated:
    """The program with a proposal for every value.

    Attributes:
      program: unchanged.
      mesh: the mesh that atoms refer to.
      proposals: for each value, the atoms of each dim.
      marks: value -> its mark.
      cheap: values without a sharding of their own.
      origins: (value, dim) -> where its atoms came from, oldest first.
      conflicts: disagreements left to the planner.
      undivided: (value, dim) -> axes that were wanted there and don't divide the dim.
    """

    program: Program
    mesh: Mesh
    proposals: tuple[tuple[Axes, ...], ...]
    marks: Mapping[Value, Mark]
    cheap: frozenset[Value]
    origins: Mapping[tuple[Value, int], tuple[Origin, ...]]
    conflicts: tuple[Conflict, ...]
    undivided: Mapping[tuple[Value, int], Axes]

    @cached_property
    def index(self) -> Index:
        """Lookups over the program, for everyone who reads it from here on."""
        return Index(self.program)

    def why(self, value: Value, dim: int, atom: int) -> tuple[str, ...]:
        """The chain from an inferred atom back to the mark that caused it, nearest first."""
        return tuple([origin.reason for _, origin in self._chain(value, dim, atom)])

    def root(self, value: Value, dim: int, atom: int) -> Value | None:
        """The marked value that an inferred atom comes from, if any."""
        chain = list(self._chain(value, dim, atom))
        return chain[-1][0] if chain and chain[-1][1].value is None else None

    def _chain(self, value: Value, dim: int, atom: int) -> Iterator[tuple[Value, Origin]]:
        """(value, why it has the atom), back to the mark."""
        at: Value | None = value
        while at is not None:
            origin = next((o for o in self.origins.get((at, dim), ()) if atom in o.atoms), None)
            if origin is None:
                return
            yield at, origin
            at, dim = origin.value, origin.dim
