"""What a plan would cost if one decision were another one, all else at its best.

A decision is a variable of the planner's network. With another choice alone left to it the network
that the plan was taken from is solved again; what it says is a plan, which is brought down to a
local program and timed like the plan itself. So a price counts everything that follows, and is in
seconds of the same kind as all that a report shows. The planner's sum only finds the plan.

    price of a choice  =  time of the best plan that makes it  -  time of the plan
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from spmd.compiler import timed
from spmd.explain.words import bytes_text, seconds_text
from spmd.ir.program import Op, Value
from spmd.ir.types import local_type
from spmd.mesh.sharding import Axes, Sharding
from spmd.options import Options
from spmd.planning.exact import weighed
from spmd.planning.network import CostNetwork, decoded
from spmd.planning.plan import Plan
from spmd.planning.solver import FORBIDDEN, Reduced
from spmd.planning.units import CARRY, OP
from spmd.propagation.projection import Assignment
from spmd.propagation.propagate import Conflict

T = TypeVar("T")


class Price(NamedTuple):
    """What a run with another decision costs more; negative numbers are savings.

    Attributes:
      seconds: predicted time of one run.
      bytes: what each device sends, reshards only.
      argument_bytes: what each device holds of the arguments: open ones may be held whole.
    """

    seconds: float
    bytes: int
    argument_bytes: int = 0

    @property
    def run_text(self) -> str:
        """`1.2 ms more, 30 MiB more sent`, `1.2 ms less, but 3 MiB more sent`."""
        sent = f"{_more(self.bytes, bytes_text)} sent"
        if abs(self.seconds) < 1e-9:
            return f"the same time, {sent}" if self.bytes else "costs the same"
        time = _more(self.seconds, seconds_text)
        if not self.bytes:
            return f"{time}, the same bytes sent"
        return f"{time}, {'' if (self.seconds > 0) == (self.bytes > 0) else 'but '}{sent}"

    @property
    def text(self) -> str:
        """The same, and what each device holds more of the arguments."""
        if not self.argument_bytes:
            return self.run_text
        held = _more(self.argument_bytes, bytes_text)
        return f"{self.run_text}; arguments take {held} per device"


def price_of(plan: Plan, other: Plan) -> Price:
    """What another plan costs more than a plan, by the predicted times of their programs."""

    def sent(of: Plan) -> int:
        return sum(move.bytes for move in of.moves)

    seconds = other.run_seconds - plan.run_seconds
    return Price(seconds, sent(other) - sent(plan), held_bytes(other) - held_bytes(plan))


def held_bytes(plan: Plan) -> int:
    """What each device holds of the arguments."""
    leaves = zip(plan.program.body.args, plan.arguments, strict=True)
    return sum(local_type(plan.program.types[v], s, plan.mesh).bytes for v, s in leaves)


def _more(difference: float, text: Callable[[float], str]) -> str:
    return f"{text(abs(difference))} {'more' if difference > 0 else 'less'}"


class Alternatives:
    """Prices of choices that a plan did not make; made when asked, and remembered."""

    def __init__(self, plan: Plan, options: Options | None = None) -> None:
        self.plan = plan
        self.options = options or Options()
        self._prices: dict[tuple[int, tuple[int, ...]], Price | None] = {}
        self._reduced: dict[tuple[int, ...], Reduced] = {}
        self._timed: dict[object, Plan] = {}

    @cached_property
    def _built(self) -> CostNetwork:
        """The network that the plan was taken from."""
        costs = weighed(self.plan.problem)[1]
        exposed, by_slack = self.plan.exposed, self.plan.by_slack
        return costs if exposed == costs.exposed else costs.with_exposed(exposed, by_slack)

    # Questions.

    def of_value(self, value: Value) -> tuple[tuple[Sharding, Price], ...]:
        """Every other state that was weighed for a value, the cheapest first.

        Arguments, and values made anew for every use, have none: the network does not choose
        theirs.
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
            found.append(self._priced(number, wanted, taken_axes(self.plan, conflict), together))
        return tuple(found)

    def of_ring(self, op: Op, factor: int) -> Price | None:
        """What the other way of a ring factor costs: to gather its pieces, or to let them go."""
        number = self._built.units.of[op.results[0]][0]
        taken = self.plan.choice(op).assignment
        if number < 0:
            return None

        def rest(assignment: Assignment) -> Assignment:
            return (*assignment[:factor], *assignment[factor + 1 :])

        choices = [choice.assignment for choice in self._built.domains.choices[number]]
        labels = [bool(a[factor]) if rest(a) == rest(taken) else None for a in choices]
        found = self._priced(number, labels, bool(taken[factor]), (number,))
        return found[0][1] if found else None

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

    def _priced(
        self, number: int, labels: Sequence[T | None], taken: T | None, together: tuple[int, ...]
    ) -> tuple[tuple[T, Price], ...]:
        """The price of each label but the one taken, the cheapest first.

        A label is what a choice of the class `number` amounts to, None where nobody asks about it.
        `together` are the classes that are asked about beside this one.
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
        if (number, states) in self._prices:
            return self._prices[number, states]
        variables = self._built.variables
        if together not in self._reduced:
            kept = frozenset(variables[n].number for n in together)
            self._reduced[together] = Reduced(self._built.network, kept)
        solution = self._reduced[together].solve({variables[number].number: states})
        price = None
        if solution.cost < FORBIDDEN / 2:
            if solution.states not in self._timed:  # many questions have the same answer
                other = decoded(self._built, solution)._replace(byte_price=self.plan.byte_price)
                self._timed[solution.states] = timed(other, self.options)
            price = price_of(self.plan, self._timed[solution.states])
        self._prices[number, states] = price
        return price


def taken_axes(plan: Plan, conflict: Conflict) -> Axes:
    """The axes that the plan gave to the factor; of tied values, to the last claimant's dim."""
    op = conflict.op
    choice = plan.choices.get(op.results[0]) if op.results else None
    if choice is not None and conflict.factor < len(choice.assignment):
        return choice.assignment[conflict.factor]
    _, value, dim = conflict.claims[-1]
    state = plan.states[value]
    return state.dims[dim] if state is not None else ()
