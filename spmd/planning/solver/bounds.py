"""Lower bounds by message passing: which states of a network's variables no best solution has.

Tree-reweighted message passing (Kolmogorov 2006) moves costs between variables and pairs, changing
no sum, until the sum of everyone's own least cost is as large as it gets: a lower bound. A state
whose own excess over it is more than some known solution has left to lose can be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd.planning.solver.network import Network, Table

_least = np.minimum.reduce
"""The least of each column."""


class Bounds(NamedTuple):
    """What message passing found.

    Attributes:
      upper: what `states` costs.
      states: a joint state.
      lower: no joint state costs less.
      excess: for each variable and state, how much more than `lower` it takes at least to be in it.
    """

    upper: float
    states: tuple[int, ...]
    lower: float
    excess: list[Table]


class _Pair(NamedTuple):
    """A pair (first, second), `first` the lower number; messages are arrays changed in place.

    `costs` has a row for each state of the first, `turned` for each of the second: numpy is fastest
    at taking the minimum over rows.
    """

    first: int
    second: int
    costs: Table
    turned: Table
    to_second: Table
    to_first: Table


def excesses(network: Network, sweeps: int = 6) -> list[tuple[float, int, int]]:
    """How much more than the least cost it takes at least to be in a state, the least first.

    Returns:
      (excess, variable, state) of every state of a variable that has several.
    """
    passing = Passing(network)
    passing.run(sweeps)
    _, excess = passing.bound()
    return sorted(
        (float(more), v, state)
        for v, costs in enumerate(excess)
        if len(costs) > 1
        for state, more in enumerate(costs)
    )


class Passing:
    """Messages between the variables of a network; they are kept from one run to the next."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.unary = network.unary
        self.pairs = [
            _Pair(
                u,
                v,
                np.ascontiguousarray(table),
                np.ascontiguousarray(table.T),
                np.zeros(table.shape[1]),
                np.zeros(table.shape[0]),
            )
            for (u, v), table in sorted(network.pairs.items())
        ]
        count = len(network.unary)
        self.later: list[list[_Pair]] = [[] for _ in range(count)]
        self.earlier: list[list[_Pair]] = [[] for _ in range(count)]
        for pair in self.pairs:
            self.later[pair.first].append(pair)
            self.earlier[pair.second].append(pair)
        ends = list(zip(self.earlier, self.later, strict=True))
        self.share = [1.0 / max(len(a), len(b), 1) for a, b in ends]
        self.sent = [[*(p.to_second for p in a), *(p.to_first for p in b)] for a, b in ends]

    def run(self, sweeps: int) -> Bounds:
        """Passes messages, and bounds the least cost from both sides.

        Args:
          sweeps: how often, there and back.
        """
        for _ in range(sweeps):
            self.sweep()
        states = self.rounded()
        return Bounds(self.network.cost(states), states, *self.bound())

    def restricted(self, alive: Sequence[Table]) -> Passing:
        """The same over some of each variable's states, with what was passed so far."""
        smaller = Passing(self.network.restricted(alive))
        known = {(pair.first, pair.second): pair for pair in self.pairs}
        for pair in smaller.pairs:
            before = known[pair.first, pair.second]
            pair.to_first[:] = before.to_first[alive[pair.first]]
            pair.to_second[:] = before.to_second[alive[pair.second]]
        return smaller

    def shifted(self) -> Network:
        """The same network with costs moved to where messages took them: all sums stay."""
        network = Network()
        network.unary = [self.belief(v) for v in range(len(self.unary))]
        network.pairs = {
            (pair.first, pair.second): pair.costs - pair.to_second - pair.to_first[:, None]
            for pair in self.pairs
        }
        return network

    def belief(self, v: int) -> Table:
        """A variable's costs with everything that was sent to it."""
        total = self.unary[v].copy()
        for sent in self.sent[v]:
            total += sent
        return total

    def sweep(self) -> None:
        """From the last variable to the first, then back."""
        # What is the same for all states of a message is left in it: it moves between variable and
        # pair, and no bound and no choice depends on where it is.
        for v in reversed(range(len(self.unary))):
            if self.earlier[v]:
                mine = self.belief(v) * self.share[v]
                for pair in self.earlier[v]:
                    costs = pair.turned + (mine - pair.to_second)[:, None]
                    _least(costs, out=pair.to_first)
        for v in range(len(self.unary)):
            if self.later[v]:
                mine = self.belief(v) * self.share[v]
                for pair in self.later[v]:
                    costs = pair.costs + (mine - pair.to_first)[:, None]
                    _least(costs, out=pair.to_second)

    def rounded(self) -> tuple[int, ...]:
        """A joint state: each variable's best, given those before it and what the others sent.

        Then each that would rather be elsewhere, beside what all others chose, goes there.
        """
        states: list[int] = []
        for v, costs in enumerate(self.unary):
            total = costs.copy()
            for pair in self.earlier[v]:
                total += pair.costs[states[pair.first]]
            for pair in self.later[v]:
                total += pair.to_first
            states.append(int(np.argmin(total)))
        doubtful = dict.fromkeys(range(len(states)))
        while doubtful:
            v, _ = doubtful.popitem()
            total = self.unary[v].copy()
            for pair in self.earlier[v]:
                total += pair.costs[states[pair.first]]
            for pair in self.later[v]:
                total += pair.turned[states[pair.second]]
            best = int(np.argmin(total))
            if total[best] < total[states[v]]:
                states[v] = best
                doubtful |= {pair.first: None for pair in self.earlier[v]}
                doubtful |= {pair.second: None for pair in self.later[v]}
        return tuple(states)

    def bound(self) -> tuple[float, list[Table]]:
        """The lower bound after a forward sweep, and every state's own excess over it."""
        lower, excess = 0.0, []
        kept = []
        for v in range(len(self.unary)):
            belief = self.belief(v)
            kept.append(belief * self.share[v])
            own = belief * (1.0 - self.share[v] * len(self.later[v]))
            least = float(own.min())
            lower += least
            excess.append(own - least)
        for pair in self.pairs:
            table = pair.costs - pair.to_second + (kept[pair.first] - pair.to_first)[:, None]
            least = float(table.min())
            lower += least
            excess[pair.first] += table.min(axis=1) - least
            excess[pair.second] += table.min(axis=0) - least
        return lower, excess
