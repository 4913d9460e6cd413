"""The cheapest joint state of a network: reduce, bound from both sides, drop what cannot win.

Variables with one or two neighbours are eliminated; of what is left, message passing bounds the
cost from below and finds states from above; states that the gap leaves no room for are dropped,
and the network of the rest, which is smaller, is treated likewise. Where a network is small enough
elimination settles it. Where none gets so small, the best state seen is returned with the lower
bound: people can see how far from the best it is at most.

Nothing depends on the clock or on hash order: every process finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spmd.planning.solver.bounds import Passing
from spmd.planning.solver.eliminate import Elimination
from spmd.planning.solver.network import Network, Table

TABLE_LIMIT = 1 << 18
"""Entries of the largest table that elimination may build."""

ROUNDS = 12
SWEEPS = 6
"""Rounds of message passing, and sweeps in each; after each round states are dropped."""

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


def solve(
    network: Network,
    allowed: Sequence[Table] | None = None,
    known: Sequence[int] | None = None,
    close: float = CLOSE,
    limit: int = TABLE_LIMIT,
    rounds: int = ROUNDS,
) -> Solution:
    """The cheapest joint state, or the best that was found.

    Args:
      network: the network.
      allowed: for each variable the states that it may be in; all of them if left out.
      known: a joint state: the cheaper it is, the sooner others are seen to be no better.
      close: what is so little cheaper, as a share, is not looked for.
      limit: entries of the largest table that may be built.
      rounds: rounds of message passing at most.
    """
    upper = math.inf if known is None else network.cost(known)
    found = Reduced(network, (), allowed, limit).solve(None, upper, close, rounds)
    return found if found.states or known is None else found._replace(states=tuple(known))


class Reduced:
    """A network made small, once for all questions about a few of its variables.

    Args:
      network: the network.
      kept: variables that may be pinned.
      allowed: for each variable the states that it may be in; all of them if left out.
      limit: entries of the largest table that may be built.
    """

    # Every step keeps a cheapest joint state of what it is given, so the one found at the end is
    # one of the whole network. Trace, of a chain a - b - c in which a costs (0, 3), b and c (0, 0),
    # and neighbours that differ 5:
    #   eliminated  a answers b = 0 with 0, for 0, and b = 1 with 1, for 3, so b now costs (0, 3);
    #               b answers c likewise, so c now costs (0, 3); c = 0 is best;
    #   unwound     c = 0, to which b answered 0, to which a answered 0.
    # Variables with three neighbours or more are left by then: what answers them would be a table
    # of all joint states of their neighbours. Of these, `_cheaper` first drops states.

    def __init__(
        self,
        network: Network,
        kept: Collection[int] = (),
        allowed: Sequence[Table] | None = None,
        limit: int = TABLE_LIMIT,
    ) -> None:
        self._network, self._limit = network, limit
        self._alive = allowed or [np.arange(len(costs)) for costs in network.unary]
        self._gone = Elimination(network.restricted(allowed) if allowed else network)
        self._gone.run(limit, neighbours=2, keep=kept)
        if not kept and self._gone.fits(limit):
            self._gone.run(limit)

    @cached_property
    def _passing(self) -> Passing:
        return Passing(self._gone.core())  # what was passed for one question helps others

    def solve(
        self,
        pins: Mapping[int, Sequence[int]] | None = None,
        upper: float = math.inf,
        close: float = CLOSE,
        rounds: int = ROUNDS,
        scale: float = 0.0,
    ) -> Solution:
        """The cheapest joint state in which some variables that were kept are in given states.

        Args:
          pins: variable -> states of which it is in one.
          upper: what costs no less is not looked for.
          close: what is so little cheaper, as a share, is not looked for either.
          rounds: rounds of message passing at most.
          scale: what that is a share of; the cost if left out.

        Returns:
          The solution; without states if all cost as much as `upper`.
        """
        pins, left = pins or {}, self._gone.left
        known, above = {}, 0.0
        if left:
            allowed = [
                np.flatnonzero(np.isin(self._alive[v], pins[v]))
                if v in pins
                else np.arange(len(costs))
                for v, costs in zip(left, self._passing.unary, strict=True)
            ]
            passing = self._passing.restricted(allowed) if pins else self._passing
            constant = self._gone.constant
            core = _cheaper(passing, self._limit, rounds, upper - constant, close, scale)
            if not core.states:
                return Solution((), upper, core.lower + constant)
            known = {v: int(a[s]) for v, a, s in zip(left, allowed, core.states, strict=True)}
            above = core.cost - core.lower
        found = self._gone.unwound(known)
        states = tuple(int(kept[s]) for kept, s in zip(self._alive, found, strict=True))
        cost = self._network.cost(states)
        return Solution(states, cost, cost - above)


def _cheaper(
    passing: Passing, limit: int, rounds: int, upper: float, close: float, scale: float
) -> Solution:
    """The cheapest joint state of the network of some messages, which go on from where they are.

    Returns:
      The best that was found; without states if that costs no less than `upper`.
    """
    # `cost` is what some joint state costs, `lower` what none undercuts. A state whose own excess
    # over the lower bound is more than the gap between the two is in no better joint state: with
    # bounds 10 and 12, one with an excess of 3 makes everything cost 13 at least. Without such
    # states some variables have a single one, others fewer neighbours.
    bounds = passing.run(SWEEPS)
    best = Solution((), upper, bounds.lower)
    if bounds.upper < upper:
        best = Solution(bounds.states, bounds.upper, min(bounds.lower, bounds.upper))
    scale = scale or abs(best.cost)
    if best.cost - best.lower <= close * scale or rounds == 1:
        return best
    slack = best.cost - bounds.lower + CLOSE * scale
    kept = [np.flatnonzero(more <= slack) for more in bounds.excess]
    if not all(map(len, kept)):  # nothing is cheaper
        return best._replace(lower=best.cost)
    smaller = Reduced(passing.shifted().restricted(kept), limit=limit)
    found = smaller.solve(None, best.cost, close, rounds - 1, scale)
    best = best._replace(lower=max(best.lower, min(best.cost, found.lower)))
    if found.cost >= best.cost:
        return best
    states = [int(k[s]) for k, s in zip(kept, found.states, strict=True)]
    return Solution(tuple(states), found.cost, found.lower)
