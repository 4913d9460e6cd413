"""`Network`: variables with a few states each, and costs of states and of pairs of states.

minimise   sum_v unary_v[x_v]  +  sum_(u,v) pair_uv[x_u, x_v]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Table = np.ndarray

FORBIDDEN = 1e9
"""A cost that no solution has; finite, so that differences of costs stay numbers."""


class Network:
    """Variables, their states' costs, and costs of pairs of states.

    Attributes:
      unary: for each variable the cost of each state.
      pairs: (u, v) with u < v -> costs, one row for each state of u.
    """

    def __init__(self) -> None:
        self.unary: list[Table] = []
        self.pairs: dict[tuple[int, int], Table] = {}

    def variable(self, costs: Sequence[float] | Table) -> int:
        """A new variable, given the cost of each of its states."""
        self.unary.append(np.array(costs, dtype=float))
        return len(self.unary) - 1

    def pair(self, u: int, v: int, costs: Table) -> None:
        """Adds costs for each (state of u, state of v); `u` may be `v`."""
        if u == v:
            self.unary[u] += np.diagonal(costs)
        elif len(self.unary[u]) == 1:
            self.unary[v] += costs[0]
        elif len(self.unary[v]) == 1:
            self.unary[u] += costs[:, 0]
        else:
            key, costs = ((u, v), costs) if u < v else ((v, u), costs.T)
            found = self.pairs.get(key)
            self.pairs[key] = costs if found is None else found + costs

    def cost(self, states: Sequence[int]) -> float:
        """What a joint state costs."""
        total = sum(float(costs[s]) for costs, s in zip(self.unary, states, strict=True))
        return total + sum(float(t[states[u], states[v]]) for (u, v), t in self.pairs.items())

    def restricted(self, alive: Sequence[Table]) -> Network:
        """The network over some of each variable's states."""
        smaller = Network()
        for costs, kept in zip(self.unary, alive, strict=True):
            smaller.variable(costs[kept])
        for (u, v), table in self.pairs.items():
            smaller.pair(u, v, table[alive[u][:, None], alive[v]])
        return smaller
