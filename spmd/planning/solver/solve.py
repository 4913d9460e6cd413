"""The cheapest joint state of a network: reduce, bound from both sides, drop what cannot win.

Variables with one or two neighbours are eliminated; of what is left, message passing bounds the
cost from below and finds states from above; states that the gap leaves no room for are dropped,
and elimination settles the rest. Where even that leaves tables too large, the best state seen is
returned with the lower bound: people can see how far from the best it is at most.

Nothing depends on the clock or on hash order: every process finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spmd.planning.solver.bounds import Passing
from spmd.planning.solver.dominate import undominated
from spmd.planning.solver.eliminate import Elimination
from spmd.planning.solver.network import Network

TABLE_LIMIT = 1 << 18
"""Entries of the largest table that elimination may build."""

ROUNDS = 12
SWEEPS = 4
"""Rounds of message passing, and sweeps in each; after each round elimination is tried."""

CLOSE = 1e-9
"""Relative gap at which the two bounds are the same number."""


class Solution(NamedTuple):
    """A joint state: one state for each variable, what it costs, and what none can undercut."""

    states: tuple[int, ...]
    cost: float
    lower: float

    @property
    def exact(self) -> bool:
        """Whether no joint state is cheaper."""
        return self.gap == 0.0

    @property
    def gap(self) -> float:
        """How far the cost is above what none can undercut, as a share of it."""
        above = self.cost - self.lower
        return above / abs(self.cost) if above > CLOSE * abs(self.cost) else 0.0


def solve(network: Network, limit: int = TABLE_LIMIT, rounds: int = ROUNDS) -> Solution:
    """The cheapest joint state, or the best that was found.

    Args:
      network: the network.
      limit: entries of the largest table that may be built.
      rounds: rounds of message passing at most.
    """
    return Reduced(network, limit=limit).solve(rounds=rounds)


class Reduced:
    """A network made small, once for all questions about a few of its variables.

    Args:
      network: the network.
      kept: variables that may be pinned.
      limit: entries of the largest table that may be built.
    """

    # Every step keeps a cheapest joint state of what it is given, so the one found at the end is
    # one of the whole network. Trace, of a chain a - b - c in which a costs (0, 3), b and c (0, 0),
    # and neighbours that differ 5:
    #   dominated   nothing: a = 1 costs 3 more, but saves 5 where b = 1;
    #   eliminated  a answers b = 0 with 0, for 0, and b = 1 with 1, for 3, so b now costs (0, 3);
    #               b answers c likewise, so c now costs (0, 3); c = 0 is best;
    #   unwound     c = 0, to which b answered 0, to which a answered 0.
    # Variables with three neighbours or more are left by then: what answers them would be a table
    # of all joint states of their neighbours. Of these, `_solved` first drops states.

    def __init__(
        self, network: Network, kept: Collection[int] = (), limit: int = TABLE_LIMIT
    ) -> None:
        self._network, self._limit = network, limit
        self._alive = undominated(network, kept)
        self._gone = Elimination(network.restricted(self._alive))
        self._gone.run(limit, neighbours=2, keep=kept)
        self._passing = Passing(self._gone.core())  # what was passed for one question helps others

    def solve(self, pins: Mapping[int, int] | None = None, rounds: int = ROUNDS) -> Solution:
        """The cheapest joint state in which some variables that were kept are in given states.

        Args:
          pins: variable -> its state.
          rounds: rounds of message passing at most.
        """
        pins, left = pins or {}, self._gone.left
        sizes = map(len, self._passing.unary)
        allowed = [
            np.array([pins[v]]) if v in pins else np.arange(n)
            for v, n in zip(left, sizes, strict=True)
        ]
        passing = self._passing.restricted(allowed) if pins else self._passing
        core = _solved(passing, self._limit, rounds) if left else Solution((), 0.0, 0.0)
        known = {v: int(a[s]) for v, a, s in zip(left, allowed, core.states, strict=True)}
        found = self._gone.unwound(known)
        states = tuple(int(kept[s]) for kept, s in zip(self._alive, found, strict=True))
        cost = self._network.cost(states)
        return Solution(states, cost, cost - (core.cost - core.lower))


def _solved(passing: Passing, limit: int, rounds: int) -> Solution:
    """The cheapest joint state of the network of some messages, which go on from where they are."""
    # `upper` is what some joint state costs, `lower` what none undercuts. A state whose own excess
    # over the lower bound is more than the gap between the two is in no better joint state: with
    # bounds 10 and 12, one with an excess of 3 makes everything cost 13 at least. Messages go on
    # without such states, so that each round is shorter than the one before. Once tables are small
    # enough elimination gets through.
    alive = [np.arange(len(costs)) for costs in passing.unary]
    best = Solution((), math.inf, -math.inf)

    def better(cost: float, states: Sequence[int]) -> Solution:
        if cost >= best.cost:
            return best
        at = tuple([int(kept[s]) for kept, s in zip(alive, states, strict=True)])
        return best._replace(states=at, cost=cost)

    for _ in range(rounds):
        bounds = passing.run(SWEEPS)
        best = better(bounds.upper, bounds.states)
        best = best._replace(lower=max(best.lower, min(best.cost, bounds.lower)))
        if best.exact:
            break
        slack = best.cost - bounds.lower + CLOSE * abs(best.cost)
        kept = [np.flatnonzero(more <= slack) for more in bounds.excess]
        if not all(map(len, kept)):  # nothing is cheaper
            return best._replace(lower=best.cost)
        alive = [a[k] for a, k in zip(alive, kept, strict=True)]
        passing = passing.restricted(kept)
        elimination = Elimination(passing.network)
        if elimination.fits(limit) and elimination.run(limit):
            states = elimination.unwound({})
            best = better(passing.network.cost(states), states)
            return best._replace(lower=best.cost)
    return best
