"""Elimination: variables of a network are replaced by their best responses, one after another.

The one whose neighbours have the fewest joint states goes first (bucket elimination, Dechter 1999;
with one or two neighbours these are the reductions of partitioned boolean quadratic programming,
Scholz and Eckstein 2002). What is found is exact as far as it goes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmd.planning.solver.network import FORBIDDEN, Network, Table


class _Factor(NamedTuple):
    """Costs of the joint states of some variables, in ascending order of variables."""

    variables: tuple[int, ...]
    table: Table


class _Gone(NamedTuple):
    """A variable that was eliminated: its costs, and the factors that it had with others."""

    variable: int
    unary: Table
    factors: list[_Factor]

    def response(self, states: Sequence[int]) -> int:
        """Its best state, given those of all others."""
        total = self.unary
        for variables, table in self.factors:
            row = [slice(None) if u == self.variable else states[u] for u in variables]
            total = total + table[tuple(row)]
        return int(total.argmin())


class Elimination:
    """A network of which some variables are gone.

    Attributes:
      constant: what those cost that are gone with all of their neighbours.
    """

    def __init__(self, network: Network) -> None:
        self.constant = 0.0
        self.unary = list(network.unary)
        self.sizes = [len(costs) for costs in self.unary]
        self.factors: dict[int, _Factor] = {}
        self.touching: list[set[int]] = [set() for _ in self.unary]
        self.near: list[dict[int, int]] = [{} for _ in self.unary]
        self.done: list[_Gone] = []
        self.next = 0
        self._left = set(range(len(self.unary)))
        for (u, v), table in network.pairs.items():
            if table.any():
                self._add(_Factor((u, v), table))

    @property
    def left(self) -> list[int]:
        """The variables that are left, ascending."""
        return sorted(self._left)

    def run(self, limit: int, neighbours: int = 1 << 30, keep: Collection[int] = ()) -> bool:
        """Eliminates as long as no table gets too large.

        Args:
          limit: entries of the largest table.
          neighbours: how many a variable may have to be eliminated.
          keep: variables that stay.

        Returns:
          Whether nothing is left.
        """
        heap = [(self._width(v), v) for v in self._left]
        heapq.heapify(heap)
        while heap:
            width, v = heapq.heappop(heap)
            if v not in self._left or width != self._width(v):
                continue
            if width > limit:
                break
            if len(self.near[v]) > neighbours or v in keep:
                continue
            for u in self._eliminate(v):
                heapq.heappush(heap, (self._width(u), u))
        return not self._left

    def fits(self, limit: int) -> bool:
        """Whether no table would get too large if everything was eliminated: found without any."""
        near = [set(around) for around in self.near]

        def width(v: int) -> int:
            return math.prod([self.sizes[u] for u in near[v]], start=self.sizes[v])

        left = set(self._left)
        heap = [(width(v), v) for v in left]
        heapq.heapify(heap)
        while heap:
            entries, v = heapq.heappop(heap)
            if v not in left or entries != width(v):
                continue
            if entries > limit:
                return False
            left.discard(v)
            for u in near[v]:
                near[u] |= near[v]
                near[u] -= {u, v}
                heapq.heappush(heap, (width(u), u))
        return True

    def core(self) -> Network:
        """What is left, as a network, if no variable with more than two neighbours is gone."""
        core = Network()
        number = {v: core.variable(self.unary[v]) for v in self.left}
        for factor in self.factors.values():
            u, v = factor.variables
            core.pair(number[u], number[v], factor.table)
        return core

    def unwound(self, known: Mapping[int, int]) -> list[int]:
        """Every variable's state, given those of the variables that are left."""
        states = [0] * len(self.sizes)
        for v, state in known.items():
            states[v] = state
        for step in reversed(self.done):
            states[step.variable] = step.response(states)
        return states

    def _add(self, factor: _Factor) -> None:
        number, self.next = self.next, self.next + 1
        self.factors[number] = factor
        for v in factor.variables:
            self.touching[v].add(number)
            for u in factor.variables:
                if u != v:
                    self.near[v][u] = self.near[v].get(u, 0) + 1

    def _remove(self, number: int) -> _Factor:
        factor = self.factors.pop(number)
        for v in factor.variables:
            self.touching[v].discard(number)
            for u in factor.variables:
                if u != v:
                    self.near[v][u] -= 1
                    if not self.near[v][u]:
                        del self.near[v][u]
        return factor

    def _width(self, v: int) -> int:
        """Entries of the table that eliminating a variable builds."""
        size = self.sizes[v]
        for u in self.near[v]:
            size *= self.sizes[u]
        return size

    def _eliminate(self, v: int) -> tuple[int, ...]:
        """Replaces all that touches a variable by its best response; returns its neighbours."""
        near = tuple(sorted(self.near[v]))
        factors = [self._remove(number) for number in sorted(self.touching[v])]
        self.done.append(_Gone(v, self.unary[v], factors))
        self._left.discard(v)
        # One dim for each neighbour, in ascending order, behind that of the variable.
        total = self.unary[v].reshape(-1, *[1] * len(near))
        for variables, table in factors:
            at = variables.index(v)
            front = table.transpose(at, *[i for i in range(table.ndim) if i != at])
            index = [slice(None), *[slice(None) if u in variables else None for u in near]]
            total = total + front[tuple(index)]
        costs = np.minimum.reduce(total)
        if not near:
            self.constant += float(costs)
        elif len(near) == 1:
            self.unary[near[0]] = self.unary[near[0]] + np.minimum(costs, FORBIDDEN)
        elif costs.any():
            self._merge(near, np.minimum(costs, FORBIDDEN))
        return near

    def _merge(self, variables: tuple[int, ...], table: Table) -> None:
        """Adds a factor, to the one over the same variables if there is one."""
        for number in sorted(self.touching[variables[0]]):
            if self.factors[number].variables == variables:
                table = table + self._remove(number).table
                break
        self._add(_Factor(variables, table))
