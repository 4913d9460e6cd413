"""`Domains`: the states that each class of units may be in, and the choices that each op has.

States spread from where they are known. Forward, an op's choices follow from the states that its
operands may have; backward, what an op's consumers could use is a wish for its results. A few
passes in both directions reach the choices that are worth costing; sets are small and ordered, the
likely first, and what does not fit is dropped.

In an open problem there is nothing to spread from: one pass collects every way to lay whole axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmd.ir.program import Op, Region
from spmd.mesh.sharding import Sharding, replicated
from spmd.planning.choices import Choices, axis_sets
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem, every_state
from spmd.planning.units import ARGUMENT, CARRY, OP, RESULT, Unit, Units
from spmd.reshard.paths import WHOLE_TERMS
from spmd.reshard.resharder import States

MOST_STATES = 6
"""States of one value that are looked at."""

MOST_LATE = 2
"""Partial states of a carry that are looked at beyond these."""

PASSES, MORE_PASSES = 5, 2
"""Passes forward, with one backward between two of them; and more for each loop inside of another:
what the innermost one wants has to travel through the carries of all."""


class Domains(NamedTuple):
    """What there is to choose from.

    Attributes:
      left: for each class and each of its results, the state for each of its choices.
      choices: for each class of ops its choices; none for others.
    """

    left: tuple[tuple[States, ...], ...]
    choices: tuple[tuple[Choice, ...], ...]


def domains_of(
    problem: Problem, units: Units, choices: Choices, known: Plan | None = None
) -> Domains:
    """States and choices worth costing, for a whole program.

    Args:
      problem: what is to be planned.
      units: the program taken apart.
      choices: makes the choices of ops.
      known: a plan whose choices are to be among them; an open problem has every choice anyway.
    """
    found = (_Everything if problem.is_open else _Spread)(problem, units, choices, known)
    found.run()
    return Domains(tuple(found.left), tuple(found.choices))


class _Spread:
    def __init__(
        self, problem: Problem, units: Units, choices: Choices, known: Plan | None
    ) -> None:
        self.problem = problem
        self.units = units
        self.maker = choices
        self.known = known
        count = len(units.units)
        self.left: list[tuple[States, ...]] = [() for _ in range(count)]
        self.states: list[tuple[States, ...]] = [() for _ in range(count)]
        self.choices: list[tuple[Choice, ...]] = [()] * count
        self.wants: dict[tuple[int, int], States] = {}
        self.into: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        self.readers: list[set[int]] = [set() for _ in range(count)]
        for use in units.uses:
            self.into[use.target].append((use.position, use.source, use.result))
            self.readers[use.source].add(use.target)
        # Classes around which something changed, to be looked at again: forward, and backward.
        self.stale, self.asking = set(range(count)), set(range(count))

    def run(self) -> None:
        depth = loop_depth(self.problem.program.body)
        for number in range(PASSES + MORE_PASSES * max(0, depth - 1)):
            if number:
                self.backward()
            if not self.forward():
                break

    # Forward: states of operands -> choices -> states of results.

    def forward(self) -> bool:
        """One pass; returns whether the states of any class changed."""
        changed = False
        for i, unit in enumerate(self.units.units):
            if i not in self.stale:
                continue
            self.stale.discard(i)
            self.asking.add(i)
            before = self.states[i]
            self.step(i, unit)
            if self.states[i] != before:
                self.stale |= self.readers[i]
                changed = True
        return changed

    def step(self, i: int, unit: Unit) -> None:
        """The states of one class, as those around it have them."""
        count = len(self.units.wishes[i])
        if unit.role == ARGUMENT:
            self.settle(i, (self.problem.arguments[unit.number],))
        elif unit.role == CARRY:
            self.settle(i, (self.carry_states(i, unit),) * count)
        elif unit.op is not None:
            options = self.choices[i] = self.op_choices(i, unit.op)
            self.settle(i, tuple(tuple([c.results[k] for c in options]) for k in range(count)))

    def settle(self, number: int, left: tuple[States, ...]) -> None:
        self.left[number] = left
        self.states[number] = tuple(tuple(dict.fromkeys(states)) for states in left)

    def op_choices(self, number: int, op: Op) -> tuple[Choice, ...]:
        operands: list[States] = [()] * len(op.operands)
        for position, source, index in self.into[number]:
            found = self.states[source][index] if self.states[source] else ()
            # Units of a class may owe over different axes. Whole terms can be made owing over all.
            more = [s for s in found if s.kind in WHOLE_TERMS and s not in operands[position]]
            operands[position] = (*operands[position], *more) if operands[position] else found
        made = self.maker.around(op, tuple(operands), self.wished(number))
        if self.known is not None and (choice := self.known.choice(op)) not in made:
            made = (*made, choice)
        return made

    def wished(self, number: int) -> tuple[States, ...]:
        """What results should look like: as proposed, then as their consumers could use them."""
        return tuple(
            _first((*((wish,) if wish else ()), *self.wants.get((number, k), ())), MOST_STATES)
            for k, wish in enumerate(self.units.wishes[number])
        )

    def carry_states(self, number: int, unit: Unit) -> States:
        """A carry's states: as proposed, as what flows in has it, as its users want it."""
        assert unit.tie is not None
        wish = self.units.wishes[number][0]
        found: list[Sharding] = [wish] if wish else []
        if self.known is not None and (state := self.known.states[unit.tie.result]) is not None:
            found.append(state)
        sources = [self.states[s][k] for _, s, k in sorted(self.into[number]) if self.states[s]]
        flowing = [state for states in sources for state in states]
        found += [*(s.full() for s in flowing[:1]), *flowing, *self.carry_wants(number)]
        whole = replicated(self.problem.program.types[unit.tie.result].rank)
        every = tuple(dict.fromkeys(found))
        # A sum that is finished after the loop and not in it is worth most, and comes last.
        late = [state for state in every[MOST_STATES + 2 :] if state.partial][:MOST_LATE]
        # Of whole terms, what is owed over most axes can take the place of the others.
        terms = [state for state in every if state.kind in WHOLE_TERMS]
        widest = sorted(terms, key=lambda state: -len(state.partial))[:1]
        return tuple(dict.fromkeys((*every[: MOST_STATES + 2], *late, *widest))) or (whole,)

    def carry_wants(self, number: int) -> States:
        """What users of a carry want, behind its loop and inside."""
        return (*self.wants.get((number, 0), ()), *self.wants.get((number, 1), ()))

    # Backward: choices -> wishes for operands.

    def backward(self) -> None:
        for i, unit in reversed(list(enumerate(self.units.units))):
            if i not in self.asking:
                continue
            self.asking.discard(i)
            for position, source, index in self.into[i]:
                self.want(source, index, self.wanted_by(i, unit, position))

    def wanted_by(self, number: int, unit: Unit, position: int) -> Iterable[Sharding]:
        """In which states a unit could use one of its operands."""
        if unit.role == OP:
            return [c.operands[position] for c in self.choices[number]]
        if unit.role == CARRY:
            return (*self.states[number][0], *self.carry_wants(number))
        if unit.role == ARGUMENT:
            return self.left[number][0]
        wanted = self.problem.results[unit.number] if unit.role == RESULT else None
        return (wanted,) if wanted else ()

    def want(self, source: int, index: int, states: Iterable[Sharding]) -> None:
        have = self.wants.get((source, index), ())
        if len(have) < MOST_STATES:
            wants = _first((*have, *(s.full() for s in states)), MOST_STATES)
            if wants != have:
                self.wants[source, index] = wants
                self.stale.add(source)
                self.asking.add(source)


class _Everything(_Spread):
    """Every choice of every op, and every state of a carry, in one pass."""

    def run(self) -> None:
        self.forward()

    def op_choices(self, number: int, op: Op) -> tuple[Choice, ...]:
        return self.maker.everywhere(op)

    def carry_states(self, number: int, unit: Unit) -> States:
        """Every way a carry may lie, and be partial over the axes that are left and not held."""
        assert unit.tie is not None
        problem, value = self.problem, unit.tie.result
        full = every_state(problem.program.types[value], problem.mesh)
        partial = [
            state.with_partial(axes, "add")
            for state in full
            for axes in axis_sets(problem.mesh, set(state.used))
        ]
        held = problem.index.held.get(value, ())
        return tuple(s for s in (*full, *partial) if s.used.isdisjoint(held))


def loop_depth(region: Region) -> int:
    """How many loops are inside of each other, at the most."""
    depths = [max(map(loop_depth, op.regions)) + op.is_loop for op in region.ops if op.regions]
    return max(depths, default=0)


def _first(states: Iterable[Sharding], most: int) -> States:
    """The first few different states."""
    return tuple(dict.fromkeys(states))[:most]
