"""`Resharder`: the one place that the planner, the partitioner and reports ask about reshards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from spmd.ir.index import Index
from spmd.ir.program import Value
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.mesh.topology import Topology
from spmd.reshard.paths import Path, can_reshard, reshard

States = tuple[Sharding, ...]
"""Shardings that one value may be in."""

Table = np.ndarray[Any, np.dtype[np.float64]]

NO_WAY = Path((), math.inf, 0)
"""The path between shardings that no collectives connect."""


def seconds_of(path: Path) -> float:
    """What a path is usually judged by."""
    return path.seconds


class Resharder:
    """Ways between the shardings of one program's values.

    A way may not use the atoms along which a value differs unseen, inside a manual region. That
    makes some ways longer, so everyone who prices one has to know of it: hence this object.

    Example:
      >>> resharder = Resharder(Index(program), mesh, topology)
      >>> resharder.seconds(value, have, wanted)  # 0.0 if they are equal, inf without a way
      3.2e-05
    """

    def __init__(self, index: Index, mesh: Mesh, topology: Topology) -> None:
        self.index, self.mesh, self.topology = index, mesh, topology
        self._paths: dict[tuple[Sharding, Sharding, TensorType, Axes], Path] = {}

    def held(self, value: Value) -> Axes:
        """The atoms that no way may use."""
        return self.index.held.get(value, ())

    def path(self, value: Value, have: Sharding, wanted: Sharding) -> Path:
        """The cheapest path; `NO_WAY` where there is none."""
        type_, held = self.index.program.types[value], self.held(value)
        found = self._paths.get((have, wanted, type_, held))
        if found is None:
            found = NO_WAY
            if can_reshard(have, wanted):
                found = reshard(have, wanted, type_, self.mesh, self.topology, held)
            self._paths[have, wanted, type_, held] = found
        return found

    def seconds(self, value: Value, have: Sharding, wanted: Sharding) -> float:
        """Time of the cheapest path: 0 between equals, infinite where there is none."""
        return 0.0 if have == wanted else self.path(value, have, wanted).seconds

    def cheapest(
        self, value: Value, copies: Iterable[Sharding], wanted: Sharding
    ) -> tuple[Sharding, Path]:
        """The copy of a value from which the wanted one is made, and how; of equals the first."""
        paths = ((have, self.path(value, have, wanted)) for have in copies)
        return min(paths, key=lambda way: way[1].seconds)

    def table(
        self,
        value: Value,
        states: States,
        needs: States,
        figure: Callable[[Path], float] = seconds_of,
    ) -> Table:
        """A figure of the way from each state (rows) to each need (columns)."""
        ends = {
            (have, wanted): figure(self.path(value, have, wanted)) if have != wanted else 0.0
            for have in dict.fromkeys(states)
            for wanted in dict.fromkeys(needs)
        }
        rows: Sequence[Sequence[float]] = [[ends[s, n] for n in needs] for s in states]
        return np.array(rows)
