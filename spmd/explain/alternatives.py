"""`Alternatives`: what a plan would cost if one decision were another one, all else at its best.

A decision is a variable of the planner's network; its other choice is priced by solving the network
again with that choice alone left to it (a min-marginal). So a price counts everything that follows:
other ops adapt as far as that pays.

    price of a choice  =  the least cost of all plans that make it  -  the least cost of all plans
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from spmd.explain.price import Price
from spmd.ir.program import Op, Value
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.exact import weighed
from spmd.planning.network import CostNetwork
from spmd.planning.plan import Choice, Plan
from spmd.planning.solver.dominate import undominated
from spmd.planning.solver.eliminate import Elimination
from spmd.planning.solver.network import FORBIDDEN, Network
from spmd.planning.solver.solve import TABLE_LIMIT, Solution, solve
from spmd.planning.units import CARRY, OP
from spmd.propagation.propagated import Conflict
from spmd.reshard.paths import Path
from spmd.reshard.resharder import NO_WAY

T = TypeVar("T")

UNIT = 1e9
"""Bytes that cost 1 in a network of bytes: so all costs stay far below what is forbidden."""


class Alternatives:
    """Prices of choices that a plan did not make; made when asked, and remembered."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._prices: dict[tuple[int, tuple[int, ...]], Price | None] = {}
        self._reduced: dict[tuple[int, ...], _Reduced] = {}

    @cached_property
    def _built(self) -> CostNetwork:
        """The network that the exact planner solves."""
        return weighed(self.plan.problem)[1]

    @cached_property
    def _bytes(self) -> Network:
        """The same network with bytes instead of seconds."""
        built = self._built
        return _Bytes(built.problem, built.units, built.choices, built.domains).network

    @cached_property
    def best(self) -> Solution:
        """The cheapest plan of the network, to which prices compare."""
        return solve(self._built.network)

    @cached_property
    def best_bytes(self) -> int:
        """Bytes that each device sends for the reshards of the cheapest plan."""
        return self._sent_bytes(self.best)

    def _sent_bytes(self, solution: Solution) -> int:
        return round(self._bytes.cost(solution.states) * UNIT)

    # Questions.

    def of_value(self, value: Value) -> tuple[tuple[Sharding, Price], ...]:
        """Every other state that was weighed for a value, the cheapest first.

        Those of arguments, and of values made anew for every use, are not the network's to choose:
        they have none.
        """
        number, index = self._built.units.of[value]
        if number < 0 or self._built.units.units[number].role not in (OP, CARRY):
            return ()
        left = self._built.domains.left[number][index]
        return self._priced(number, left, self.plan.states[value], (number,))

    def of_conflicts(
        self, conflicts: Sequence[Conflict]
    ) -> tuple[tuple[tuple[Axes, Price], ...], ...]:
        """For each conflict, every claim that lost (and no axis at all), the cheapest first.

        A claim that no plan can honour (an axis that the factor cannot take) has no price.
        """
        places = [self._factor(conflict) for conflict in conflicts]
        together = tuple(sorted({place[0] for place in places if place is not None}))
        found: list[tuple[tuple[Axes, Price], ...]] = []
        for conflict, place in zip(conflicts, places, strict=True):
            if place is None:
                found.append(())
                continue
            number, given = place
            claims = {(), *(axes for axes, _, _ in conflict.claims)}
            wanted = [axes if axes in claims else None for axes in given]
            found.append(self._priced(number, wanted, self._taken(number, given), together))
        return tuple(found)

    # Answers.

    def _factor(self, conflict: Conflict) -> tuple[int, tuple[Axes, ...]] | None:
        """The class of units that a conflict is about, and the factor's axes for each choice.

        None where the network does not choose: around values made anew for every use.
        """
        op, units = conflict.op, self._built.units
        if op.results:
            number = units.of[op.results[0]][0]
            if number < 0:
                return None
            options = self._built.domains.choices[number]
            if options and conflict.factor < len(options[0].assignment):
                return number, tuple(c.assignment[conflict.factor] for c in options)
        for _, value, dim in conflict.claims:
            number, index = units.of[value]
            if number >= 0 and units.units[number].role == CARRY:
                return number, tuple(s.dims[dim] for s in self._built.domains.left[number][index])
        return None

    def _taken(self, number: int, given: Sequence[Axes]) -> Axes:
        """What the cheapest plan took of what each choice of a class gives."""
        state = self.best.states[self._built.variables[number].number]
        return given[self._built.variables[number].rows[state][0]]

    def _priced(
        self, number: int, labels: Sequence[T | None], taken: T | None, together: tuple[int, ...]
    ) -> tuple[tuple[T, Price], ...]:
        """The price of each label but the one taken, the cheapest first.

        Args:
          number: a class of units.
          labels: what each of its choices amounts to, None for choices that nobody asks about.
          taken: the label of the choice that was made.
          together: the classes that are asked about beside this one.
        """
        groups: dict[T, list[int]] = {}
        for state, (choice, _) in enumerate(self._built.variables[number].rows):
            label = labels[choice]
            if label is not None and label != taken:
                groups.setdefault(label, []).append(state)
        found = [
            (label, price)
            for label, states in groups.items()
            if (price := self._price(number, tuple(states), together)) is not None
        ]
        return tuple(sorted(found, key=lambda pair: pair[1].seconds))

    def _price(
        self, number: int, states: tuple[int, ...], together: tuple[int, ...]
    ) -> Price | None:
        """What the best plan costs more in which a class is in some states; None: forbidden."""
        if (number, states) not in self._prices:
            network, variables = self._built.network, self._built.variables
            if together not in self._reduced:
                kept = frozenset(variables[n].number for n in together)
                self._reduced[together] = _Reduced(network, kept)
            solution = self._reduced[together].solve(variables[number].number, states)
            price = None
            if solution.cost < FORBIDDEN / 2:
                more = self._sent_bytes(solution) - self.best_bytes
                seconds = max(0.0, solution.cost - self.best.cost)
                price = Price(seconds, more, exact=solution.exact)
            self._prices[number, states] = price
        return self._prices[number, states]


class _Reduced:
    """A network made small for questions about a few of its variables, with the way back.

    To make it small takes longer than to solve what is left, so it is done once for many questions.

    Attributes:
      network: the whole network.
      alive: for each of its variables, the states that no other state always undercuts; variables
        that are asked about keep all of theirs.
      gone: how the variables with one or two neighbours follow from the others.
      core: the network of the others.
    """

    def __init__(self, network: Network, kept: frozenset[int]) -> None:
        self.network = network
        self.alive = undominated(network, kept)
        self.gone = Elimination(network.restricted(self.alive))
        self.gone.run(TABLE_LIMIT, neighbours=2, keep=kept)
        self.core = self.gone.core()

    def solve(self, variable: int, states: Sequence[int]) -> Solution:
        """The cheapest joint state of the whole network in which a variable is in some states."""
        left = self.gone.left
        allowed = [np.arange(len(costs)) for costs in self.core.unary]
        allowed[left.index(variable)] = np.flatnonzero(np.isin(self.alive[variable], states))
        found = solve(self.core.restricted(allowed))
        # States were numbered anew twice: among those allowed, and among those alive.
        known = {v: int(k[s]) for v, k, s in zip(left, allowed, found.states, strict=True)}
        joint = [int(a[s]) for a, s in zip(self.alive, self.gone.unwound(known), strict=True)]
        cost = self.network.cost(joint)
        return Solution(tuple(joint), cost, cost - (found.cost - found.lower))


class _Bytes(CostNetwork):
    """The network whose costs are the bytes that each device sends for reshards.

    Variables and states are those of the network in seconds. Where a use may take either of two
    copies, the one that needs fewer bytes counts.
    """

    def own_cost(self, op: Op, choice: Choice) -> float:
        return 0.0

    def figure(self, path: Path) -> float:
        return FORBIDDEN if path is NO_WAY else path.bytes / UNIT
