"""The exact plan: every op's choice and every carry's state at once, for the least total cost.

A variable of the network is an op's choice, a carry's state, or, for a value with several uses,
these together with one more copy of the value that the uses may share. Costs are the ops' own
seconds and the seconds of the reshards between what a producer leaves and what a use needs, each
times the trips of the loops around it. Units that look alike are one variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd.ir.control_flow import Tie, held_atoms
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op, Value
from spmd.ir.types import TensorType, local_type
from spmd.mesh.sharding import Axes, Sharding, replicated
from spmd.planning.cost import op_seconds
from spmd.planning.domains import Domains, States, domains_of
from spmd.planning.greedy import plan_greedily
from spmd.planning.limit import Prices, plan_within
from spmd.planning.liveness import bound_of
from spmd.planning.network import FORBIDDEN, Network, Table
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem
from spmd.planning.solve import Solution, solve
from spmd.planning.units import ARGUMENT, CARRY, OP, WHOLE, Units, Use, units_of
from spmd.planning.walk import Walk, boundary, whole_axes
from spmd.reshard.paths import can_reshard, reshard

MOST_COPIES = 4
"""Second copies of one value that are looked at."""

LATER = 1e-12
"""What a partial result costs on top, in seconds: of equals, the plan that reduces early."""


def plan_exactly(problem: Problem, memory_limit: int | None = None) -> Plan:
    """Plans a whole program.

    The greedy plan's choices are among those that are weighed, and where the two plans come out
    alike in spite of all, the cheaper one is returned.

    Args:
      problem: what is to be planned.
      memory_limit: bytes that one device may use; the topology's memory if left out, which is then
        a wish: a plan that misses it is returned with a note.

    Raises:
      PlanError: no plan was found that keeps to the limit that was given.
    """
    greedy = plan_greedily(problem)
    units = units_of(problem)
    return best_plan(problem, units, domains_of(problem, units, greedy), greedy, memory_limit)


def best_plan(
    problem: Problem,
    units: Units,
    domains: Domains,
    greedy: Plan,
    memory_limit: int | None,
) -> Plan:
    """The best plan of some domains, or the greedy one if that is better; see `plan_exactly`."""
    built = CostNetwork(problem, units, domains)
    solution = solve(built.network)
    plan = built.decoded(solution)
    plan = plan if plan.seconds <= greedy.seconds else greedy
    plan = plan._replace(greedy_seconds=greedy.seconds, lower_seconds=solution.lower)
    limit = memory_limit if memory_limit is not None else problem.topology.hbm_bytes
    if bound_of(plan) <= limit:
        return plan

    def priced(prices: Prices) -> Plan:
        plan = built.decoded(solve(built.priced(prices)))
        return plan._replace(greedy_seconds=greedy.seconds)

    donated = frozenset(problem.links)
    return plan_within(limit, memory_limit is not None, (plan, greedy), donated, priced)


SMALLER = 1e-15
"""Seconds for each byte of an argument: of equals, the plan whose arguments are smaller."""


def network_of(problem: Problem) -> CostNetwork:
    """The network that `plan_exactly` solves."""
    units = units_of(problem)
    return CostNetwork(problem, units, domains_of(problem, units, plan_greedily(problem)))


class _Variable(NamedTuple):
    """A variable of the network that stands for a class.

    Attributes:
      number: the variable.
      rows: for each of its states, the choice of the class, and which copy of its value is made as
        well, or -1.
      copied: the result of the class that may be copied, or -1.
      copies: the copies that there may be.
    """

    number: int
    rows: tuple[tuple[int, int], ...]
    copied: int = -1
    copies: States = ()


class CostNetwork:
    """The network of a program, and how its variables stand for classes of units."""

    def __init__(self, problem: Problem, units: Units, domains: Domains) -> None:
        self.problem = problem
        self.propagated = problem.propagated
        self.types = self.propagated.program.types
        self.held = held_atoms(self.propagated.program)
        self.mesh = self.propagated.mesh
        self.topology = problem.topology
        self.units = units
        self.domains = domains
        self.network = Network()
        self.tables: dict[tuple[States, States, TensorType, Axes], Table] = {}
        self.own: dict[tuple[int, tuple[Choice, ...]], Table] = {}
        self.values = self._values()
        self.uses: dict[tuple[int, int], list[Use]] = {}
        for use in units.uses:
            self.uses.setdefault((use.source, use.result), []).append(use)
        self.variables = [self._variable(i) for i in range(len(units.units))]
        for (source, index), uses in self.uses.items():
            self._connect(source, index, uses)

    def decoded(self, solution: Solution) -> Plan:
        """The plan that a solution of the network says."""
        return _Decoded(self, solution).plan()

    def _values(self) -> dict[tuple[int, int], Value]:
        """One value of each class and result: the first."""
        found: dict[tuple[int, int], Value] = {}
        for value, place in enumerate(self.units.of):
            found.setdefault(place, value)
        return found

    def priced(self, prices: Prices) -> Network:
        """The network in which what is alive at the peak costs so much a byte."""
        network = Network()
        network.unary = [costs.copy() for costs in self.network.unary]
        network.pairs = self.network.pairs
        for value, price in prices.items():
            number, index = self.units.of[value]
            if number < 0:
                continue
            variable, type_ = self.variables[number], self.types[value]
            left = self.domains.left[number][index]
            held = [price * self._local_bytes(type_, s) for s in left]
            copied = [price * self._local_bytes(type_, s) for s in variable.copies]
            for row, (choice, copy) in enumerate(variable.rows):
                network.unary[variable.number][row] += held[choice]
                if copy >= 0 and variable.copied == index:
                    network.unary[variable.number][row] += copied[copy]
        return network

    def _local_bytes(self, type_: TensorType, state: Sharding) -> int:
        return local_type(type_, state, self.mesh).bytes

    # Variables.

    def _variable(self, number: int) -> _Variable:
        unit = self.units.units[number]
        trips = self.units.trips[number]
        if unit.role == OP:
            assert unit.op is not None
            own = self.own_seconds(unit.op, self.domains.choices[number]) * trips
        elif unit.role == ARGUMENT:
            type_, states = self._type(number, 0), self.domains.left[number][0]
            own = np.array([SMALLER * self._local_bytes(type_, s) for s in states])
        elif unit.role == CARRY:
            own = np.array([LATER * bool(s.partial) for s in self.domains.left[number][0]])
        else:
            own = np.zeros(1)
        shared = {
            index: copies
            for index in range(len(self.domains.left[number]))
            if (copies := self._shared(number, index))
        }
        copied = max(shared, key=lambda k: self._type(number, k).bytes, default=-1)
        copies = shared.get(copied, ())
        rows = [(i, -1) for i in range(len(own))]
        costs = list(own)
        if copies:
            left = self.domains.left[number][copied]
            made = self.table(number, copied, left, copies)
            made = made * (self.units.inner[number] if unit.role == CARRY and copied else trips)
            for i, state in enumerate(left):
                for c, copy in enumerate(copies):
                    if copy != state and made[i, c] < FORBIDDEN:
                        rows.append((i, c))
                        costs.append(own[i] + made[i, c])
        return _Variable(self.network.variable(costs), tuple(rows), copied, copies)

    def own_seconds(self, op: Op, options: tuple[Choice, ...]) -> Table:
        """An op's own time for each choice."""
        key = (id(op.kind), options)
        found = self.own.get(key)
        if found is None:
            if op.is_mark:
                found = np.zeros(1)
            else:
                rule = rule_of(op.kind, op.loc)
                found = np.array(
                    [
                        op_seconds(op.kind, rule, c.assignment, self.mesh, self.topology)
                        + LATER * any(s.partial for s in c.results)
                        for c in options
                    ]
                )
            self.own[key] = found
        return found

    def _shared(self, source: int, index: int) -> States:
        """States that several uses could need and not every choice leaves: copies that may pay."""
        uses = self.uses.get((source, index), ())
        if len(uses) < 2 and sum(use.trips for use in uses) <= self.units.trips[source]:
            return ()
        states = set(self.domains.left[source][index])
        count: dict[Sharding, int] = {}
        for use in uses:
            for need in dict.fromkeys(self._needs(use) or ()):
                count[need] = count.get(need, 0) + 1
        order = {need: i for i, need in enumerate(count)}
        shared = [n for n, c in count.items() if c > 1 and states != {n}]
        return tuple(sorted(shared, key=lambda n: (-count[n], order[n]))[:MOST_COPIES])

    # Edges.

    def _needs(self, use: Use) -> States | None:
        """What the target of a use needs for each of its choices; None if that asks for nothing."""
        unit = self.units.units[use.target]
        if unit.role == OP:
            return tuple([c.operands[use.position] for c in self.domains.choices[use.target]])
        if unit.role in (ARGUMENT, CARRY):
            return self.domains.left[use.target][0]
        if unit.role == WHOLE:
            return (replicated(self._type(use.source, use.result).rank),)
        wanted = self.problem.results[unit.number]
        return (wanted,) if wanted is not None else None

    def _type(self, source: int, index: int) -> TensorType:
        return self.types[self.values[source, index]]

    def _connect(self, source: int, index: int, uses: Sequence[Use]) -> None:
        """Adds the reshards between a value and its uses."""
        variable = self.variables[source]
        left = self.domains.left[source][index]
        choices = [i for i, _ in variable.rows]
        for use in uses:
            needs = self._needs(use)
            if needs is None:
                self._as_it_is(variable, use)
                continue
            table = self.table(source, index, left, needs)
            rows = table[choices]
            if variable.copied == index:
                again = self.table(source, index, variable.copies, needs)
                rows = np.array(
                    [
                        row if c < 0 else np.minimum(row, again[c])
                        for row, (_, c) in zip(rows, variable.rows, strict=True)
                    ]
                )
            if rows.any():
                target = self.variables[use.target]
                columns = [i for i, _ in target.rows]
                self.network.pair(variable.number, target.number, rows[:, columns] * use.trips)

    def _as_it_is(self, variable: _Variable, use: Use) -> None:
        """A result that nothing asks for: it is brought into whole axes at most."""
        value = self.values[use.source, use.result]
        shape = self.types[value].shape
        costs = []
        for i, _ in variable.rows:
            state = self.domains.left[use.source][use.result][i]
            whole = Sharding(whole_axes(state.dims, shape, self.mesh))
            costs.append(self.seconds(value, state, boundary(self.propagated, value, whole)))
        self.network.unary[variable.number] += np.array(costs) * use.trips

    def table(self, source: int, index: int, states: States, needs: States) -> Table:
        """Seconds of the reshard of a value from each state to each need."""
        value = self.values[source, index]
        key = (states, needs, self.types[value], self.held.get(value, ()))
        found = self.tables.get(key)
        if found is None:
            ends = {
                (s, n): self.seconds(value, s, n)
                for s in dict.fromkeys(states)
                for n in dict.fromkeys(needs)
            }
            found = self.tables[key] = np.array([[ends[s, n] for n in needs] for s in states])
        return found

    def seconds(self, value: Value, have: Sharding, wanted: Sharding) -> float:
        """Time of one reshard."""
        if have == wanted:
            return 0.0
        if not can_reshard(have, wanted):
            return FORBIDDEN
        type_, held = self.types[value], self.held.get(value, ())
        return reshard(have, wanted, type_, self.mesh, self.topology, held).seconds


class _Decoded(Walk):
    """The walk that takes what the network's solution says."""

    def __init__(self, built: CostNetwork, solution: Solution) -> None:
        super().__init__(built.propagated, built.topology)
        self.built = built
        self.lower = solution.lower
        self.solver = "exact" if solution.exact else "local search"
        rows = [v.rows[solution.states[v.number]] for v in built.variables]
        self.chosen = [choice for choice, _ in rows]
        for value, (number, index) in enumerate(built.units.of):
            variable = built.variables[number]
            if number >= 0 and index == variable.copied and (copy := rows[number][1]) >= 0:
                self.shared[value] = variable.copies[copy]

    def plan(self) -> Plan:
        """The plan."""
        problem = self.built.problem
        arguments = tuple(map(self.state, self.program.body.args))
        return self.run(arguments, problem.results, problem.links)._replace(
            lower_seconds=self.lower
        )

    def choose(self, op: Op) -> tuple[Choice, float]:
        number, _ = self.built.units.of[op.results[0]]
        options = self.built.domains.choices[number]
        own = self.built.own_seconds(op, options)
        return options[self.chosen[number]], float(own[self.chosen[number]])

    def carry(self, tie: Tie) -> Sharding:
        return self.state(tie.result)

    def state(self, value: Value) -> Sharding:
        """The state of an argument or a carry."""
        number, _ = self.built.units.of[value]
        return self.built.domains.left[number][0][self.chosen[number]]
