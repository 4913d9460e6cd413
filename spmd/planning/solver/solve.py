"""The cheapest joint state of a network: reduce, bound from both sides, drop what cannot win.

Variables with one or two neighbours are eliminated; of what is left, message passing bounds the
cost from below and finds states from above; states that the gap leaves no room for are dropped,
and elimination settles the rest. Where even that leaves tables too large, the best state seen is
returned with the lower bound: people can see how far from the best it is at most.

Nothing depends on the clock or on hash order: every process finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.planning.solver.bounds import Passing
from spmd.planning.solver.dominate import undominated
from spmd.planning.solver.eliminate import Elimination
from spmd.planning.solver.network import Network, Table

TABLE_LIMIT = 1 << 18
"""Entries of the largest table that elimination may build."""

ROUNDS = 8
SWEEPS = 6
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
    # Every step keeps a cheapest joint state of what it is given, so the one found at the end is
    # one of the whole network. Trace, of a chain a - b - c in which a costs (0, 3), b and c (0, 0),
    # and neighbours that differ 5:
    #   dominated   nothing: a = 1 costs 3 more, but saves 5 where b = 1;
    #   eliminated  a answers b = 0 with 0, for 0, and b = 1 with 1, for 3, so b now costs (0, 3);
    #               b answers c likewise, so c now costs (0, 3); c = 0 is best;
    #   unwound     c = 0, to which b answered 0, to which a answered 0.
    # Variables with three neighbours or more are left by then: what answers them would be a table
    # of all joint states of their neighbours. Of these, `_solve_core` first drops states.
    alive = undominated(network)
    first = Elimination(network.restricted(alive))
    first.run(limit, neighbours=2)
    left = first.left
    if left:
        core = _solve_core(first.core(), limit, rounds)
        found = first.unwound(dict(zip(left, core.states, strict=True)))
    else:
        core = Solution((), 0.0, 0.0)
        found = first.unwound({})
    states = tuple(int(kept[s]) for kept, s in zip(alive, found, strict=True))
    cost = network.cost(states)
    return Solution(states, cost, cost - (core.cost - core.lower))


def _solve_core(core: Network, limit: int, rounds: int) -> Solution:
    # `upper` is what some joint state costs, `lower` what none undercuts. A state whose own excess
    # over the lower bound is more than the gap between the two is in no better joint state: with
    # bounds 10 and 12, one with an excess of 3 makes everything cost 13 at least. Without such
    # states tables are smaller, and in the end elimination gets through.
    passing = Passing(core)
    best: Solution | None = None
    for _ in range(rounds):
        bounds = passing.run(SWEEPS, best.states if best else None)
        best = Solution(bounds.states, bounds.upper, bounds.lower)
        if best.exact:
            break
        found = _eliminated(core, bounds.alive, limit)
        if found is not None:
            cost = core.cost(found)
            return Solution(found, cost, cost)
    assert best is not None
    return best


def _eliminated(core: Network, alive: Sequence[Table], limit: int) -> tuple[int, ...] | None:
    """The cheapest joint state of those alive, if elimination gets through."""
    smaller = core.restricted(alive)
    kept = undominated(smaller)
    elimination = Elimination(smaller.restricted(kept))
    if not elimination.fits(limit) or not elimination.run(limit):
        return None
    found = elimination.unwound({})
    return tuple(int(a[k[s]]) for a, k, s in zip(alive, kept, found, strict=True))
