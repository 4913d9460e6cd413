"""`Domains`: the states that each class of units may be in, and the choices that each op has.

States spread from where they are known. Forward, an op's choices follow from the states that its
operands may have; backward, what an op's consumers could use is a wish for its results. A few
passes in both directions reach the choices that are worth costing; sets are small and ordered, the
likely first, and what does not fit is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import Rule
from spmd.ir.program import OpKind
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, replicated
from spmd.mesh.topology import Topology
from spmd.planning.candidates import (
    Claims,
    claims_of,
    merge,
    moved_whole,
    reduced_first,
    without_exchanges,
)
from spmd.planning.cost import op_seconds
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import Problem
from spmd.planning.units import ARGUMENT, CARRY, OP, RESULT, Unit, Units
from spmd.propagation.projection import (
    Assignment,
    is_legal_assignment,
    reduced_axes,
    unsplit,
)
from spmd.reshard.paths import can_reshard, reshard

MOST_STATES = 6
"""States of one value that are looked at."""

MOST_CHOICES = 12
"""Choices of one op, with operands that arrive full; as many again with partial ones."""

MOST_PASSES = 5
"""Passes forward; there is one backward between two of them."""

States = tuple[Sharding, ...]


class Domains(NamedTuple):
    """What there is to choose from.

    Attributes:
      left: for each class and each of its results, the state for each of its choices.
      choices: for each class of ops its choices; none for others.
    """

    left: tuple[tuple[States, ...], ...]
    choices: tuple[tuple[Choice, ...], ...]


def domains_of(problem: Problem, units: Units, known: Plan | None = None) -> Domains:
    """States and choices worth costing, for a whole program.

    Args:
      problem: what is to be planned.
      units: the program taken apart.
      known: a plan whose choices are to be among them.
    """
    return _Spread(problem, units, known).run()


class _Spread:
    def __init__(self, problem: Problem, units: Units, known: Plan | None) -> None:
        self.propagated = problem.propagated
        self.types = self.propagated.program.types
        self.mesh = self.propagated.mesh
        self.problem = problem
        self.units = units
        self.known = known
        count = len(units.units)
        self.left: list[tuple[States, ...]] = [() for _ in range(count)]
        self.states: list[tuple[States, ...]] = [() for _ in range(count)]
        self.choices: list[tuple[Choice, ...]] = [()] * count
        self.wants: dict[tuple[int, int], States] = {}
        self.into: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for use in units.uses:
            self.into[use.target].append((use.position, use.source, use.result))
        self.maker = Maker(self.mesh, problem.topology)
        self.made: dict[tuple[OpKind, tuple[States, ...], tuple[States, ...]], tuple[Choice, ...]]
        self.made = {}

    def run(self) -> Domains:
        for number in range(MOST_PASSES):
            if number:
                self.backward()
            before = list(self.states)
            self.forward()
            if before == self.states:
                break
        return Domains(tuple(self.left), tuple(self.choices))

    # Forward: states of operands -> choices -> states of results.

    def forward(self) -> None:
        for i, unit in enumerate(self.units.units):
            if unit.role == ARGUMENT:
                self.settle(i, (self.problem.arguments[unit.number],))
            elif unit.role == CARRY:
                found = self.carry_states(i, unit)
                self.settle(i, (found,) * len(self.units.wishes[i]))
            elif unit.role == OP:
                options = self.choices[i] = self.op_choices(i, unit)
                count = len(self.units.wishes[i])
                self.settle(i, tuple(tuple([c.results[k] for c in options]) for k in range(count)))

    def settle(self, number: int, left: tuple[States, ...]) -> None:
        self.left[number] = left
        self.states[number] = tuple(tuple(dict.fromkeys(states)) for states in left)

    def wished(self, number: int) -> tuple[States, ...]:
        """What results should look like: as proposed, then as their consumers could use them."""
        return tuple(
            _first((*((wish,) if wish else ()), *self.wants.get((number, k), ())), MOST_STATES)
            for k, wish in enumerate(self.units.wishes[number])
        )

    def op_choices(self, number: int, unit: Unit) -> tuple[Choice, ...]:
        op = unit.op
        assert op is not None
        if op.is_mark:
            wanted = Sharding(self.propagated.proposals[op.results[0]])
            return (Choice(wanted.dims, (wanted,), (wanted,)),)
        operands: list[States] = [()] * len(op.operands)
        for position, source, index in self.into[number]:
            found = self.states[source][index] if self.states[source] else ()
            operands[position] = operands[position] or found
        wishes = self.wished(number)
        key = (op.kind, tuple(operands), wishes)
        made = self.made.get(key)
        if made is None:
            rule = rule_of(op.kind, op.loc)
            made = self.made[key] = self.maker.choices(op.kind, rule, key[1], wishes)
        if self.known is not None and (choice := self.known.choices[op.results[0]]) not in made:
            made = (*made, choice)
        return made

    def carry_states(self, number: int, unit: Unit) -> States:
        """A carry's states: as proposed, as what flows in has it, as its users want it."""
        wish = self.units.wishes[number][0]
        first = [
            s
            for _, source, index in sorted(self.into[number])
            if self.states[source]
            for s in self.states[source][index]
        ]
        assert unit.tie is not None
        found: list[Sharding] = [wish] if wish else []
        if self.known is not None and (state := self.known.states[unit.tie.result]) is not None:
            found.append(state)
        wants = (*self.wants.get((number, 0), ()), *self.wants.get((number, 1), ()))
        found += [*(s.full() for s in first[:1]), *first, *wants]
        return _first(found, MOST_STATES + 2) or (replicated(self.types[unit.tie.result].rank),)

    # Backward: choices -> wishes for operands.

    def backward(self) -> None:
        for i in reversed(range(len(self.units.units))):
            for position, source, index in self.into[i]:
                role = self.units.units[i].role
                if role == OP:
                    self.want(source, index, [c.operands[position] for c in self.choices[i]])
                elif role == CARRY:
                    wants = (*self.wants.get((i, 0), ()), *self.wants.get((i, 1), ()))
                    self.want(source, index, (*self.states[i][0], *wants))
                elif role == RESULT:
                    wanted = self.problem.results[self.units.units[i].number]
                    self.want(source, index, (wanted,) if wanted else ())
                elif role == ARGUMENT:
                    self.want(source, index, self.left[i][0])

    def want(self, source: int, index: int, states: Iterable[Sharding]) -> None:
        full = [s.full() for s in states]
        have = self.wants.get((source, index), ())
        self.wants[source, index] = _first((*have, *full), MOST_STATES)


def _first(states: Iterable[Sharding], most: int) -> States:
    """The first few different states."""
    return tuple(dict.fromkeys(states))[:most]


# ---------------------------------------------------------------------------------------------
# The choices of one op.


class Maker:
    """Makes ops' choices; what is equal is made once."""

    def __init__(self, mesh: Mesh, topology: Topology) -> None:
        self.mesh = mesh
        self.topology = topology
        self.plain: dict[tuple[OpKind, Assignment], Choice] = {}
        self.seconds: dict[tuple[OpKind, Assignment], float] = {}
        self.refined: dict[tuple[Sharding, Sharding], bool] = {}

    def choices(
        self, kind: OpKind, rule: Rule, operands: Sequence[States], wishes: Sequence[States]
    ) -> tuple[Choice, ...]:
        """Assignments that some state or wish leads to, each with and without partial operands.

        Args:
          kind: the op's kind.
          rule: its rule.
          operands: the states that each operand may have; none if it is made to order.
          wishes: for each result, what it should look like, the best first.
        """
        assignments = assignments_of(rule, (*operands, *wishes), self.mesh.atom_sizes)
        found = [self.full(kind, rule, a) for a in assignments]
        carried: dict[tuple[Assignment, tuple[int, ...], Axes, str], None] = {}
        for group, partial, how in partials_of(rule, operands):
            for assignment in assignments:
                carried[_stripped(assignment, partial), group, partial, how] = None
        more = (self.carried(kind, rule, *key) for key in carried)
        found += [choice for choice in more if choice is not None][:MOST_CHOICES]
        return self.undominated(kind, rule, found)

    def full(self, kind: OpKind, rule: Rule, assignment: Assignment) -> Choice:
        """The choice in which every operand arrives full."""
        choice = self.plain.get((kind, assignment))
        if choice is None:
            choice = reduced_first(rule, assignment, self.mesh.atom_sizes)
            self.plain[kind, assignment] = choice
        return choice

    def carried(
        self,
        kind: OpKind,
        rule: Rule,
        assignment: Assignment,
        group: tuple[int, ...],
        partial: Axes,
        how: str,
    ) -> Choice | None:
        """The choice in which a group's partial flows through, if there is one."""
        reduced = reduced_axes(rule, assignment)
        if reduced and rule.reduction != how:
            return None
        if not is_legal_assignment(rule, assignment, self.mesh.atom_sizes):
            return None
        if not set(partial).isdisjoint(rule.held):
            return None
        full = self.full(kind, rule, assignment)
        return Choice(
            assignment,
            tuple(
                [
                    s.with_partial(partial, how) if i in group else s
                    for i, s in enumerate(full.operands)
                ]
            ),
            tuple([s.with_partial((*partial, *s.partial), how) for s in full.results]),
        )

    def undominated(
        self, kind: OpKind, rule: Rule, options: Sequence[Choice]
    ) -> tuple[Choice, ...]:
        """The choices that are not always beaten by a finer one and a reshard of its results.

        A choice loses to another one whose operands are slices of its own, if the time that the
        finer one saves pays for bringing the results to where the coarser one leaves them.
        """
        seconds = [self.own_seconds(kind, rule, c.assignment) for c in options]
        return tuple(
            [
                coarse
                for a, coarse in enumerate(options)
                if not any(
                    seconds[b] < seconds[a]
                    and all(
                        [
                            self.refines(f, c)
                            for f, c in zip(fine.operands, coarse.operands, strict=True)
                        ]
                    )
                    and seconds[b] + self.results_seconds(kind, fine, coarse) < seconds[a]
                    for b, fine in enumerate(options)
                )
            ]
        )

    def own_seconds(self, kind: OpKind, rule: Rule, assignment: Assignment) -> float:
        """An op's own time."""
        found = self.seconds.get((kind, assignment))
        if found is None:
            found = op_seconds(kind, rule, assignment, self.mesh, self.topology)
            self.seconds[kind, assignment] = found
        return found

    def refines(self, fine: Sharding, coarse: Sharding) -> bool:
        """Whether a tile of one sharding is a slice of the other's tile."""
        if fine is coarse:
            return True
        found = self.refined.get((fine, coarse))
        if found is None:
            found = (fine.partial, fine.kind) == (coarse.partial, coarse.kind) and all(
                f[: len(c)] == c for f, c in zip(fine.dims, coarse.dims, strict=True)
            )
            self.refined[fine, coarse] = found
        return found

    def results_seconds(self, kind: OpKind, have: Choice, wanted: Choice) -> float:
        """Time to bring the results of one choice to where another one leaves them."""
        total = 0.0
        for h, w, type_ in zip(have.results, wanted.results, kind.results, strict=True):
            if not can_reshard(h, w):
                return float("inf")
            total += reshard(h, w, type_, self.mesh, self.topology).seconds
        return total


def _stripped(assignment: Assignment, partial: Axes) -> Assignment:
    """An assignment without the atoms over which operands are partial: they can split nothing."""
    return tuple(
        axes[: next((k for k, a in enumerate(axes) if a in partial), len(axes))]
        for axes in assignment
    )


def assignments_of(
    rule: Rule, states: Sequence[States], sizes: Sequence[int]
) -> tuple[Assignment, ...]:
    """Every state leads once with the others' first states after it, and once alone."""
    claims: list[list[Claims]] = []
    for options, dims in zip(states, rule.values, strict=True):
        claims.append([c for s in options if (c := claims_of(rule, dims, s, sizes))])
    first = [options[0] for options in claims if options]
    found: dict[Assignment, None] = {}
    seen: set[tuple[tuple[int, Axes], ...]] = set()
    leads = []
    for lead in [*first, *(c for options in claims for c in options)]:
        key = tuple(sorted(lead.items()))
        if key not in seen:
            seen.add(key)
            leads.append(lead)
    orders = [[lead, *(c for c in first if c is not lead)] for lead in leads]
    orders += [[lead] for lead in leads]
    for order in orders:
        found[merge(rule, order, sizes)] = None
    legal = [a for a in found if is_legal_assignment(rule, a, sizes)]
    if rule.halos or rule.merges:
        legal += [without_exchanges(rule, a) for a in legal]
    first_states = tuple(
        (dims, options[0] if options else None)
        for dims, options in zip(rule.values, states, strict=True)
    )
    legal += [m for a in legal[:4] for m in moved_whole(rule, a, first_states, sizes)]
    whole = unsplit(rule)
    kept = tuple(dict.fromkeys(legal))[: MOST_CHOICES - 1]
    return kept if whole in kept else (*kept, whole)


def partials_of(
    rule: Rule, operands: Sequence[States]
) -> Iterable[tuple[tuple[int, ...], Axes, str]]:
    """Groups of operands through which a partial of one of them may flow: (group, atoms, kind).

    Those of the group that are not partial become so by a mask, which only sums allow.
    """
    for group in rule.linear:
        owed = dict.fromkeys((s.partial, s.kind) for i in group for s in operands[i] if s.partial)
        for partial, kind in owed:
            alone = all(any(s.kind == kind for s in operands[i]) for i in group)
            if kind == "add" or (rule.moves and alone):
                yield group, partial, kind
