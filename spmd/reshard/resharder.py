"""`Resharder`: the one place that the planner, the partitioner and reports ask about reshards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from spmd.ir.control_flow import Index
from spmd.ir.program import Value
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.mesh.topology import Topology
from spmd.reshard.paths import Path, Table, can_reshard, reshard, reshard_seconds

States = tuple[Sharding, ...]
"""Shardings that one value may be in."""

Ways = dict[tuple[Sharding, Sharding], Path]
"""From where to where -> the path that is known."""

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
        self._paths: dict[tuple[TensorType, Axes], Ways] = {}
        self._ways_of: dict[Value, Ways] = {}

    def held(self, value: Value) -> Axes:
        """The atoms that no way may use."""
        return self.index.held.get(value, ())

    def path(self, value: Value, have: Sharding, wanted: Sharding) -> Path:
        """The cheapest path; `NO_WAY` where there is none."""
        ways = self._ways(value)
        found = ways.get((have, wanted))
        if found is None:
            found = NO_WAY
            if can_reshard(have, wanted):
                type_ = self.index.program.types[value]
                found = reshard(have, wanted, type_, self.mesh, self.topology, self.held(value))
            ways[have, wanted] = found
        return found

    def _ways(self, value: Value) -> Ways:
        """The paths that are known of values like one."""
        ways = self._ways_of.get(value)
        if ways is None:
            key = self.index.program.types[value], self.held(value)
            ways = self._ways_of[value] = self._paths.setdefault(key, {})
        return ways

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
