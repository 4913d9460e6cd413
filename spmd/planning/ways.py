"""`Ways`: what it takes to bring values from one sharding to another, as tables of numbers.

Values of one type share a table of all shardings that anybody asked about; it grows. So what it
costs from any states of a value to any needs is a few rows and columns of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.ir.program import Value
from spmd.mesh.sharding import Sharding
from spmd.planning.problem import Problem
from spmd.planning.solver.network import FORBIDDEN, Table


class Ways:
    """Tables of a program's values.

    Example:
      >>> states, needs = ways.numbers(value, (rows, columns)), ways.numbers(value, (whole,))
      >>> ways.costs(value, states, needs, stores=True)  # seconds, a row for each state
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._alike: dict[object, _Alike] = {}
        self._of: dict[Value, _Alike] = {}

    def numbers(self, value: Value, shardings: Sequence[Sharding]) -> Table:
        """The rows, or columns, that stand for shardings in the table of a value."""
        index = self._table(value).index
        return np.array([index.setdefault(s, len(index)) for s in shardings], dtype=np.intp)

    def costs(self, value: Value, states: Table, needs: Table, stores: bool) -> Table:
        """Seconds from each state (rows) to each need (columns); `FORBIDDEN` where no way leads.

        Args:
          value: what is resharded.
          states, needs: numbers of shardings.
          stores: whether the reader wants it in memory.
        """
        alike, inside = self._table(value), not self.problem.in_memory[value]
        found: Table = alike.costs(value, inside, stores)[states[:, None], needs]
        if np.isnan(found).any():
            alike.ask(value, states, needs)
            found = alike.costs(value, inside, stores)[states[:, None], needs]
        return found

    def _table(self, value: Value) -> _Alike:
        found = self._of.get(value)
        if found is None:
            key = self.problem.program.types[value], self.problem.resharder.held(value)
            found = self._alike.setdefault(key, _Alike(self.problem))
            self._of[value] = found
        return found


class _Alike:
    """The table of the values of one type.

    Attributes:
      index: sharding -> its number.
      seconds: of reshards between the first of these; not a number where that has to be asked.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.index: dict[Sharding, int] = {}
        self.seconds: Table = np.zeros((0, 0))
        self._costs: dict[tuple[bool, bool], Table] = {}

    def costs(self, value: Value, inside: bool, stores: bool) -> Table:
        """Seconds of reshards, and of the memory that they move, between all shardings."""
        every = tuple(self.index)
        if len(every) > len(self.seconds):
            self._grow(value, every)
        found = self._costs.get((inside, stores))
        if found is None:
            more = self.problem.traffic(value, every, every, self.seconds > 0, stores)
            found = self._costs[inside, stores] = np.minimum(self.seconds + more, FORBIDDEN)
        return found

    def ask(self, value: Value, states: Table, needs: Table) -> None:
        """Works out what is not a number, one by one."""
        every = tuple(self.index)
        for i, j in zip(*np.nonzero(np.isnan(self.seconds[states[:, None], needs])), strict=True):
            ends = int(states[i]), int(needs[j])
            self.seconds[ends] = self.problem.resharder.seconds(value, *(every[e] for e in ends))
        self._costs.clear()

    def _grow(self, value: Value, every: tuple[Sharding, ...]) -> None:
        known, resharder = len(self.seconds), self.problem.resharder
        table = np.empty((len(every), len(every)))
        table[:known, :known] = self.seconds
        table[known:] = resharder.glance(value, every[known:], every)
        table[:known, known:] = resharder.glance(value, every[:known], every[known:])
        self.seconds = table
        self._costs.clear()
