"""The cost network of a program: choices of ops and states of carries, and what each pair costs.

A variable of the network is an op's choice, a carry's state, or, for a value with several uses,
these together with one more copy of the value that the uses may share. Costs are the ops' own
seconds and the seconds of the reshards between what a producer leaves and what a use needs, each
times the trips of the loops around it. What looks alike (`units.py`) is one variable.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spmd.ir.control_flow import Tie, ties
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op, Region, Value
from spmd.mesh.sharding import Sharding, replicated
from spmd.planning.choices import Choices
from spmd.planning.greedy import Walk
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem
from spmd.planning.solver import CLOSE, FORBIDDEN, Network, Solution, Table, solve
from spmd.planning.units import ARGUMENT, CARRY, OP, WHOLE, Domains, Units, Use
from spmd.predict.fusion import wants_stored
from spmd.propagation.projection import unsplit
from spmd.reshard.paths import States

# States in which one value may be copied: those that uses agreed on; and others that some use may
# need, as long as the value's variable stays as small as that.
MOST_COPIES, MOST_ROWS = 4, 64
ROUGHLY = 1e-3  # relative gap at which a joint state that is only a proposal is good enough
LATER = 1e-12  # seconds that a partial result costs on top: of equals, plans reduce early
SMALLER = 1e-15  # seconds for each byte of arguments and results: of equals, these are small


class Variable(NamedTuple):
    """A class's variable in the cost network; a state is a choice, maybe with an extra copy."""

    choices: Table  # for each of its states, the choice of the class
    again: Table  # for each of its states, which copy of its value is made as well, or -1
    copied: int = -1  # the result of the class that may be copied, or -1
    copies: States = ()

    def row(self, state: int) -> tuple[int, Sharding | None]:
        """Returns the index of a state's choice, and the sharding of its extra copy or None."""
        again = int(self.again[state])
        return int(self.choices[state]), self.copies[again] if again >= 0 else None

    def state(self, choice: int, copy: Sharding | None) -> int:
        """Returns the number of a choice's state with a copy, or of that without if none has it."""
        again = self.copies.index(copy) if copy in self.copies else -1
        found = np.flatnonzero((self.choices == choice) & (self.again == again))
        return int(found[0]) if len(found) else choice


Copies = Mapping[tuple[int, int], States]  # class and result -> states of possible copies


Needs = tuple[States, Table]  # different shardings, and for each choice its index among them


def _distinct(states: Sequence[Sharding]) -> Needs:
    index: dict[Sharding, int] = {}
    at = [index.setdefault(state, len(index)) for state in states]
    return tuple(index), np.array(at, dtype=np.intp)


class _Flow(NamedTuple):
    """One result of a class of equal ops (or arguments, or carries), and all uses of it."""

    value: Value  # the first of the class
    runs: int  # how often values of the class are made in one run of the program
    left: Needs  # in which choices leave it
    uses: dict[Use, Needs | None]  # what each choice of the reader needs; None if any will do

    @property
    def reads(self) -> int:
        """How often all uses together read the result in one run of the program."""
        return sum(use.trips for use in self.uses)


class CostNetwork:
    """The cost network of a program: a variable for each class of units, costs for pairs of them.

    `domains` has what each class decides between, what the plan `base` took among it: the solver
    starts there. `known` has (class, result) -> shardings in which a copy of that value may pay, as
    a network of the same units found; if it is None they are searched for.
    """

    def __init__(
        self, problem: Problem, units: Units, choices: Choices, domains: Domains,
        known: Copies | None = None, base: Plan | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.units, self.choices, self.domains = problem, units, choices, domains
        # Share of a reshard's time that arithmetic does not hide, at least; and whether a reshard
        # hides only behind arithmetic between making a value and reading it.
        self.exposed, self.by_slack = 1.0, False
        self._slack: Slack | None = None
        self.variables: list[Variable] = []  # of each class of units
        first = {place: value for value, place in reversed([*enumerate(units.of)])}
        self._flows: dict[tuple[int, int], _Flow] = {}
        for use in units.uses:
            source, index = at = use.source, use.result
            if at not in self._flows:
                unit = units.units[source]
                runs = unit.inner if unit.role == CARRY and index else unit.trips
                left = _distinct(domains.left[source][index])
                self._flows[at] = _Flow(first[at], runs, left, {})
            needs = self._needs_of(use, first[at])
            self._flows[at].uses[use] = None if needs is None else _distinct(needs)
        self._owned = [self._own(number) for number in range(len(units.units))]
        self._close, self._known = ROUGHLY, list[tuple[int, Sharding | None]]()
        if base is not None:  # what it chose comes first, but for arguments
            for unit, made in zip(units.units, domains.left, strict=True):
                is_open = unit.role == ARGUMENT
                choice = made[0].index(base.arguments[unit.number]) if is_open else 0
                self._known.append((choice, None))
        if known is None:
            self._build({}, shares=True)
            known = self.agreed()
        self._close = CLOSE
        self._build(known)

    def settled(self) -> "CostNetwork":
        """Makes the network anew if its solution calls for other shared copies; returns itself."""
        if (copies := self.agreed()) != self.copies:
            self._build(copies)
        return self

    def _build(self, copies: Copies, shares: bool = False) -> None:
        """Makes variables and costs of reshards anew; the solver starts from the old solution.

        `copies` has (class, result) -> shardings in which the value may be copied once, for several
        uses. With `shares` a reshard's cost is divided among the reads of its value: with three
        reads of a value that is made once, each pays a third.
        """
        if "solution" in self.__dict__:
            self._known = self.rows_of(self.solution)
        for name in ("network", "solution"):
            self.__dict__.pop(name, None)
        self.copies = copies
        self._reshards = Network()
        self.variables = [self._variable(i, copies) for i in range(len(self.units.units))]
        for at, flow in self._flows.items():
            share = min(1.0, flow.runs / flow.reads) if shares and flow.runs else 1.0
            self._connect(*at, flow, share)

    @cached_property
    def network(self) -> Network:
        """The network for the solver: seconds of each variable's states, and of pairs of states."""
        network = Network()
        parts = zip(self.variables, self._owned, self._reshards.unary, strict=True)
        for variable, own, more in parts:
            network.variable(own[variable.choices] + more)
        for pair, costs in self._reshards.pairs.items():
            network.pairs[pair] = np.minimum(costs, FORBIDDEN)
        return network

    @cached_property
    def solution(self) -> Solution:
        """The cheapest joint state found: each class's choice or sharding, maybe with a copy."""
        known = [v.state(*row) for v, row in zip(self.variables, self._known, strict=False)]
        return solve(self.network, known=known or None, close=self._close)

    def rows_of(self, solution: Solution) -> list[tuple[int, Sharding | None]]:
        """Returns each class's choice (index) in a joint state, and its extra copy or None."""
        pairs = zip(self.variables, solution.states, strict=True)
        return [variable.row(state) for variable, state in pairs]

    def among(self, role: str, counts: Sequence[int]) -> Solution:
        """Returns the cheapest joint state in which some classes of units have fewer choices.

        Class i, if of the given role (`op`), takes one of its first counts[i] choices. The lower
        bound in what is returned is that of the whole network.
        """
        allowed = [
            np.flatnonzero(v.choices < count) if unit.role == role else np.arange(len(v.choices))
            for v, count, unit in zip(self.variables, counts, self.units.units, strict=True)
        ]
        return solve(self.network, allowed)._replace(lower=self.solution.lower)

    def with_exposed(self, exposed: float, by_slack: bool) -> "CostNetwork":
        """Returns a copy of the network in which arithmetic hides a part of reshards.

        A reshard of t seconds costs `exposed * t`; with `by_slack` at least `t - slack`, where
        slack is the time in which a device computes between making the value and reading it.
        """
        other = copy.copy(self)
        other._close, other.exposed, other.by_slack = ROUGHLY, exposed, by_slack
        other._slack = slack_of(self.choices, self.units) if by_slack else None
        other._build(self.copies)
        return other

    def agreed(self) -> Copies:
        """Returns copies to offer: (class of units, result) -> shardings that uses may share.

        Copies offered before come first, then what uses need in the cheapest joint state where the
        producer leaves the value otherwise, then what uses may need if there is room. Of a class,
        only the largest such result has an entry.
        """
        chosen = [choice for choice, _ in self.rows_of(self.solution)]
        found: dict[int, tuple[int, int, States]] = {}
        for (source, index), flow in self._flows.items():
            left, is_shared = self.domains.left[source][index], flow.reads > flow.runs
            needed = [
                needs[0][needs[1][chosen[use.target]]]
                for use, needs in flow.uses.items()
                if is_shared and needs is not None and len(needs[1]) > 1
            ]
            needed = [need for need in needed if need != left[chosen[source]]]
            shared = list(dict.fromkeys((*self.copies.get((source, index), ()), *needed)))
            size = self.problem.program.types[flow.value].bytes
            if shared and size > found.get(source, (0,))[0]:
                most = max(MOST_COPIES, MOST_ROWS // len(left))
                others = [need for needs in flow.uses.values() if needs for need in needs[0]]
                copies = tuple(dict.fromkeys((*shared[:MOST_COPIES], *others)))
                found[source] = size, index, copies[:most]
        return {(source, index): copies for source, (_, index, copies) in found.items()}

    def priced(self, prices: Mapping[Value, float]) -> Network:
        """Returns the network with a price on memory: value -> seconds for each byte held of it."""
        network = Network()
        network.unary = [costs.copy() for costs in self.network.unary]
        network.pairs = self.network.pairs
        for value, price in prices.items():
            number, index = self.units.of[value]
            if number < 0:
                continue
            variable = self.variables[number]
            held = np.array(self.problem.bytes(value, self.domains.left[number][index]))
            own = held[variable.choices]
            if variable.copied == index and variable.copies:
                copies = np.array([*self.problem.bytes(value, variable.copies), 0])
                own = own + copies[variable.again]
            network.unary[number] += price * own
        return network

    def own_cost(self, op: Op, choice: Choice) -> float:
        """Returns the seconds of an op without reshards, and 1e-12 more if a result is partial."""
        later = LATER * any([s.partial for s in choice.results])
        return self.choices.own_seconds(op, choice.assignment) + later

    def _variable(self, number: int, copies: Copies) -> Variable:
        count = len(self._owned[number])
        choices, again, made = np.arange(count), np.full(count, -1), np.zeros(count)
        copied = next((index for source, index in copies if source == number), -1)
        states = copies.get((number, copied), ())
        if states:
            flow = self._flows[number, copied]
            left, at = flow.left
            costs = self.choices.reshards(flow.value, left, states, stores=True)[at]
            differ = np.array([[state != copy for copy in states] for state in left])[at]
            pays = differ & (costs < FORBIDDEN)
            more = np.nonzero(pays)
            choices, again = np.concatenate([choices, more[0]]), np.concatenate([again, more[1]])
            seen = self._seen(costs[pays], number, copied, flow.uses)
            made = np.concatenate([made, seen * flow.runs])
        self._reshards.variable(made)
        return Variable(choices, again, copied, states)

    def _own(self, number: int) -> Table:
        unit, left = self.units.units[number], self.domains.left[number]
        if unit.role == OP:
            assert unit.op is not None
            own = [self.own_cost(unit.op, c) for c in self.domains.choices[number]]
            return np.array(own) * unit.trips
        if unit.role == ARGUMENT:
            value = self.problem.program.body.args[unit.number]
            return SMALLER * np.array(self.problem.bytes(value, left[0]))
        if unit.role == CARRY:
            return np.array([LATER * bool(s.partial) for s in left[0]])
        return np.zeros(1)

    def _connect(self, source: int, index: int, flow: _Flow, share: float) -> None:
        variable, costs_of, value = self.variables[source], self.choices.reshards, flow.value
        different, left = flow.left[0], flow.left[1][variable.choices]
        for use, needs in flow.uses.items():
            reader = self.units.units[use.target]
            op = reader.op if reader.role == OP else None
            # Whether the reader needs the value in memory, whatever makes it.
            stores = op is None or wants_stored(op, use.position)
            if needs is None:
                # A result for which the user gave no sharding may stay as it is, but for what jax
                # cannot name: parts of axes, and terms of a sum.
                states = self.domains.left[source][index]
                lies = tuple([self.problem.left(value, state) for state in states])
                ways = zip(states, lies, strict=True)
                seconds = [self.problem.resharder.seconds(value, *ends) for ends in ways]
                own = np.array(seconds) + SMALLER * np.array(self.problem.bytes(value, lies))
                costs = self._seen(own, source, index, [use])[variable.choices] * use.trips
                self._reshards.unary[source] += costs
                continue
            wanted, columns = needs
            rows = costs_of(value, different, wanted, stores)[left[:, None], columns]
            rows = self._seen(rows, source, index, [use])
            if variable.copied == index:
                with_copy = np.flatnonzero(variable.again >= 0)
                copies = variable.again[with_copy, None]
                again = costs_of(value, variable.copies, wanted, stores)[copies, columns]
                again = self._seen(again, source, index, [use])
                rows[with_copy] = np.minimum(rows[with_copy], again)
            if rows.any():
                costs = rows[:, self.variables[use.target].choices] * (use.trips * share)
                self._reshards.pair(source, use.target, costs)

    def _seen(self, costs: Table, source: int, index: int, uses: Iterable[Use]) -> Table:
        """Returns the part of reshards' seconds that no arithmetic before the first use hides."""
        if self._slack is None:
            return costs * self.exposed
        slack = [self._slack.get((source, index, use.target), 0.0) for use in uses]
        return np.maximum(self.exposed * costs, costs - min(slack))

    def _needs_of(self, use: Use, value: Value) -> States | None:
        """Returns what sharding a use needs, for each choice of its reader; None if any will do."""
        unit = self.units.units[use.target]
        if unit.role == OP:
            return tuple([c.operands[use.position] for c in self.domains.choices[use.target]])
        if unit.role in (ARGUMENT, CARRY):
            return self.domains.left[use.target][0]
        if unit.role == WHOLE:
            return (replicated(self.problem.program.types[value].rank),)
        wanted = self.problem.results[unit.number]
        return (wanted,) if wanted is not None else None


# Slack: how long a device computes between making a value and reading it.
#
# A machine that communicates beside its arithmetic hides a reshard there. Gathers of weights and
# sums of gradients have much slack, as the device computes layers in between; what one product of a
# layer leaves for the next has none.
#
#     %1 = dot %x, %w0     %w1 is there from the start: its slack is the first product
#     %2 = dot %1, %w1     %1 is read at once: it has none

Slack = Mapping[tuple[int, int, int], float]  # source, result, target of a use -> seconds


def slack_of(choices: Choices, units: Units) -> Slack:
    """Returns for each use the seconds of arithmetic between making the value and reading it.

    Keys are (producer's class, number of its result, reader's class); uses with one key have the
    mean. Arithmetic is taken to be split evenly over all devices, and ops to run in program order.
    No op overlaps with the loop trip before. Results of the program have no slack, and no key.
    """
    problem, of = choices.problem, units.of
    found: dict[tuple[int, int, int], tuple[float, int]] = {}

    def use(value: Value, target: Value, seconds: float) -> None:
        key = (*of[value], of[target][0])
        total, count = found.get(key, (0.0, 0))
        found[key] = total + seconds, count + 1

    def pass_time(region: Region) -> tuple[float, dict[Value, float]]:
        """Notes each use's seconds since its value was made; returns (region's, value -> made)."""
        now, made = 0.0, dict[Value, float]()
        for op in region.ops:
            if op.regions:
                bound = ties(op)
                for tie in bound:
                    if tie.source is not None:
                        use(tie.source, tie.result, now - made.get(tie.source, 0.0))
                for inner in op.regions[op.is_loop :]:
                    end, inside = pass_time(inner)
                    for tie, value in zip(bound, inner.results, strict=True):
                        use(value, tie.result, end - inside.get(value, 0.0))
                    now += end * problem.index.runs(op)
            else:
                for value in op.operands:
                    use(value, op.results[0], now - made.get(value, 0.0))
                whole = unsplit(rule_of(op.kind, op.loc))
                now += choices.own_seconds(op, whole) / choices.mesh.size
            made |= dict.fromkeys(op.results, now)
        return now, made

    pass_time(problem.program.body)
    return {key: seconds / count for key, (seconds, count) in found.items()}


# Decoding: the plan that a solution of the network stands for.


def decoded(costs: CostNetwork, solution: Solution) -> Plan:
    """Returns the plan that a solution of the cost network stands for, its seconds summed anew."""
    plan = _Decoded(costs, solution).run()
    return plan._replace(exposed=costs.exposed, by_slack=costs.by_slack, gap=solution.gap)


class _Decoded(Walk):
    def __init__(self, costs: CostNetwork, solution: Solution) -> None:
        self.costs, self.domains, self.of = costs, costs.domains, costs.units.of
        rows = costs.rows_of(solution)
        self.chosen = [choice for choice, _ in rows]
        arguments = tuple(map(self.state, costs.problem.program.body.args))
        super().__init__(costs.problem, "exact" if solution.exact else "local search", arguments)
        for value, (number, index) in enumerate(self.of):
            again = rows[number][1] if number >= 0 else None
            if again is not None and index == costs.variables[number].copied:
                self.shared[value] = again

    def choose(self, op: Op) -> tuple[Choice, float]:
        number, _ = self.of[op.results[0]]
        choice = self.domains.choices[number][self.chosen[number]]
        return choice, self.costs.own_cost(op, choice)

    def carry(self, tie: Tie) -> Sharding:
        return self.state(tie.result)

    def state(self, value: Value) -> Sharding:
        number, _ = self.of[value]  # the class of an argument or a carry
        return self.domains.left[number][0][self.chosen[number]]
