"""`Resharder`: the one place that the planner, the partitioner and reports ask about reshards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from spmd.ir.control_flow import Index
from spmd.ir.program import Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.mesh.topology import Topology
from spmd.reshard.paths import Path, Table, can_reshard, reshard, reshard_seconds

States = tuple[Sharding, ...]
"""Shardings that one value may be in."""

NO_WAY = Path((), math.inf, 0)
"""The path between shardings that no collectives connect."""


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

    def held(self, value: Value) -> Axes:
        """The atoms that no way may use."""
        return self.index.held.get(value, ())

    def path(self, value: Value, have: Sharding, wanted: Sharding) -> Path:
        """The cheapest path; `NO_WAY` where there is none."""
        if not can_reshard(have, wanted):
            return NO_WAY
        type_ = self.index.program.types[value]
        return reshard(have, wanted, type_, self.mesh, self.topology, self.held(value))

    def seconds(self, value: Value, have: Sharding, wanted: Sharding) -> float:
        """Time of the cheapest path: 0 between equals, infinite where there is none."""
        return 0.0 if have == wanted else self.path(value, have, wanted).seconds

    def cheapest(
        self, value: Value, copies: Iterable[Sharding], wanted: Sharding
    ) -> tuple[Sharding, Path]:
        """The copy of a value from which the wanted one is made, and how; of equals the first."""
        paths = ((have, self.path(value, have, wanted)) for have in copies)
        return min(paths, key=lambda way: way[1].seconds)

    def table(self, value: Value, states: States, needs: States) -> Table:
        """Seconds of the way from each state (rows) to each need (columns)."""
        found = self.glance(value, states, needs)
        for i, j in np.argwhere(np.isnan(found)).tolist():
            found[i, j] = self.seconds(value, states[i], needs[j])
        return found

    def glance(self, value: Value, states: States, needs: States) -> Table:
        """The same, but not a number for ways that have to be searched one by one."""
        type_, held = self.index.program.types[value], self.held(value)
        return reshard_seconds(states, needs, type_, self.mesh, self.topology, held)
