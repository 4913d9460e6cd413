"""The choices that planners weigh for an op, and tables of what reshards between them cost."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np

from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import FIXED, MERGE, PASS, REPLICATE, RING, UNCLAIMED, WINDOW, Rule
from spmd.ir.program import Op, OpKind, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.plan import Choice
from spmd.planning.problem import Problem, laid_out
from spmd.planning.solver import FORBIDDEN, Table
from spmd.predict.ops import op_seconds
from spmd.propagation.projection import (
    Assignment,
    dim_to_factors,
    is_legal_assignment,
    may_exchange,
    project,
    reduced_axes,
    ring_axes,
    unsplit,
)
from spmd.reshard.paths import SPLITTABLE, States

MOST_CARRIED = 12  # choices with partial operands that are made from what lies around an op
Partial = tuple[tuple[int, ...], Axes, str]  # which operands are partial, over what, and how
Sums = tuple[tuple[tuple[int, ...], str], ...]  # which operands may be partial, and how


class Choices:
    """Makes the choices for the ops of one problem; ops of one kind share what is made.

    `around` derives choices from known shardings of an op's operands and results, `placed` tries
    every place for some mesh axes, and `of_mark` takes what the user marked.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.propagated = problem, problem.propagated
        self.mesh, self.topology = problem.mesh, problem.topology
        self.resharder = problem.resharder
        self._reshards: dict[object, Table] = {}
        self._made: dict[object, tuple[Choice, ...]] = {}
        self._plain = cache(lambda kind, split: plain_choice(rule_of(kind), split, self.mesh))
        at = self.mesh, self.topology
        self._seconds = cache(lambda kind, held, of: op_seconds(kind, rule_of(kind), of, *at, held))

    def around(
        self, op: Op, operands: tuple[States, ...], wishes: tuple[States, ...]
    ) -> tuple[Choice, ...]:
        """Returns the choices of an op that follow from known shardings of operands and results.

        `operands` has for each operand the shardings that it exists in (none: it can be made in
        any), `wishes` for each result those it should have, the best first. Choices without partial
        operands come first, one for each of `assignments_around`; then those in which some operands
        flow through partial, if the op's rule allows it. A mark has just the choice of `of_mark`.
        """
        if op.is_mark:
            return self.of_mark(op)
        key = (op.kind, self.resharder.held(op.results[0]), operands, wishes)
        if key not in self._made:
            rule = rule_of(op.kind, op.loc)
            assignments = assignments_around(rule, (*operands, *wishes), self.mesh.atom_sizes)
            partials: list[Partial] = []
            for group in rule.linear:
                # Whatever one operand of a linear group may be. The others of the group are made
                # partial, too, where their kind allows it.
                some = [s for i in group for s in operands[i] if s.partial]
                for partial, kind in dict.fromkeys((s.partial, s.kind) for s in some):
                    alike = all(any(s.kind == kind for s in operands[i]) for i in group)
                    if rule.lets_through(kind) and (alike or kind in SPLITTABLE):
                        partials.append((group, partial, kind))
            carried: dict[tuple[Assignment, Partial], None] = {}
            for flowing in partials:
                for assignment in assignments:
                    # Factors keep the atoms in front of the first one that operands are partial
                    # over: that one can split nothing, and what is behind it has other pieces.
                    ends = [[k for k, a in enumerate(own) if a in flowing[1]] for own in assignment]
                    pairs = zip(assignment, ends, strict=True)
                    kept = tuple([own[: min(end, default=len(own))] for own, end in pairs])
                    carried[kept, flowing] = None
            found = [self._carried(op.kind, rule, *each) for each in carried]
            more = [choice for choice in found if choice is not None][:MOST_CARRIED]
            options = [*(self._plain(op.kind, a) for a in assignments), *more]
            self._made[key] = tuple(dict.fromkeys(options))
        return self._made[key]

    def placed(
        self, op: Op, axes: Sequence[Axes], base: Choice | None, sums: Sums
    ) -> tuple[Choice, ...]:
        """Returns the choices of an op with the mesh `axes` in every place that its rule allows.

        Each of `axes` (the atoms of one) splits a factor, or operands are partial over it, or it
        does nothing. Other axes, and held ones, are where the choice `base` has them; without it
        they only split fixed factors. Each of `sums` is a group of operands that may be partial
        together, and how terms combine: `((0, 1), "add")`. They do not count if operands of `base`
        are partial over other axes: those stay so. A mark has only the choice of `of_mark`.
        """
        if op.is_mark:
            return self.of_mark(op)
        held = self.resharder.held(op.results[0])
        key = (op.kind, held, tuple(axes), base, sums)
        if key not in self._made:
            rule = rule_of(op.kind, op.loc)
            runs = [atoms for atoms in axes if not set(atoms) & {*held, *rule.held}]
            moved = set(itertools.chain(*runs))
            start = base.assignment if base else unsplit(rule)
            start = tuple([tuple([a for a in own if a not in moved]) for own in start])
            assignments = placements(rule, start, runs, self.mesh.atom_sizes)
            sets = axis_sets(runs)
            partials = [(group, over, how) for (group, how) in sums for over in sets]
            found: list[Choice | None] = []
            # What flows through the base partial over other axes goes on to do so.
            group = tuple([i for i, s in enumerate(base.operands) if s.partial]) if base else ()
            state = base.operands[group[0]] if base and group else None
            if state and (kept := tuple([a for a in state.partial if a not in moved])):
                over = [kept, *(tuple(sorted((*kept, *more))) for more in sets)]
                partials = [(group, axes, state.kind) for axes in over]
            else:
                found += [self._plain(op.kind, a) for a in assignments]
            for partial in partials:
                owed = set(partial[1])
                found += [
                    self._carried(op.kind, rule, a, partial)
                    for a in assignments
                    if owed.isdisjoint(itertools.chain(*a))
                ]
            self._made[key] = tuple(dict.fromkeys([c for c in found if c is not None]))
        return self._made[key]

    def of_mark(self, op: Op) -> tuple[Choice, ...]:
        """Returns the one choice of a mark: operand and result as marked, open dims as proposed."""
        wanted = Sharding(self.propagated.proposals[op.results[0]])
        return (Choice(wanted.dims, (wanted,), (wanted,)),)

    def own_seconds(self, op: Op, assignment: Assignment) -> float:
        """Returns one device's seconds for an op under an assignment, without reshards."""
        return self._seconds(op.kind, self.problem.stored(op), assignment)

    def reshards(self, value: Value, states: States, needs: States, stores: bool) -> Table:
        """Returns a table of the seconds of reshards of a value, memory traffic included.

        Rows are the `states` before, columns the `needs` after; an impossible reshard costs
        `FORBIDDEN` (1e9). `stores` says whether the reader needs the value in memory.
        """
        problem, type_ = self.problem, self.problem.program.types[value]
        key = type_, self.resharder.held(value), problem.in_memory[value], states, needs, stores
        if key not in self._reshards:
            seconds = self.resharder.table(value, states, needs)
            more = problem.traffic(value, states, needs, seconds > 0, stores)
            self._reshards[key] = np.minimum(seconds + more, FORBIDDEN)
        return self._reshards[key]

    def _carried(
        self, kind: OpKind, rule: Rule, assignment: Assignment, flowing: Partial
    ) -> Choice | None:
        # The choice in which a group of operands flows through partial, if the op allows that.
        group, partial, how = flowing
        may = rule.lets_through(how) and set(partial).isdisjoint(rule.held)
        may = may and not (reduced_axes(rule, assignment) and rule.reduction != how)
        if not may or not is_legal_assignment(rule, assignment, self.mesh.atom_sizes):
            return None
        plain = self._plain(kind, assignment)
        operands = [
            s.with_partial(partial, how) if i in group else s for i, s in enumerate(plain.operands)
        ]
        results = [s.with_partial((*partial, *s.partial), how) for s in plain.results]
        return Choice(assignment, tuple(operands), tuple(results))


def making_choice(op: Op, wanted: Sharding, mesh: Mesh) -> Choice:
    """Returns the choice by which an op recomputed at a use makes its result split as `wanted`."""
    rule = rule_of(op.kind, op.loc)
    assignment = list(unsplit(rule))
    for dim, axes in zip(rule.results[0], wanted.dims, strict=True):
        assignment[dim[0]] = axes
    return plain_choice(rule, tuple(assignment), mesh)


def plain_choice(rule: Rule, assignment: Assignment, mesh: Mesh) -> Choice:
    """Returns the choice that an assignment makes if no operand is partial; results may be."""
    sizes = mesh.atom_sizes
    operands = [project(rule, dims, assignment, sizes) for dims in rule.operands]
    results = [
        project(rule, dims, assignment, sizes).with_partial(
            reduced_axes(rule, assignment, dims), rule.reduction
        )
        for dims in rule.results
    ]
    return Choice(assignment, tuple(operands), tuple(results))


def axis_sets(runs: Sequence[Axes]) -> list[Axes]:
    """Returns each non-empty union of some runs: `(0,), (1, 2)` -> `(0,), (1, 2), (0, 1, 2)`."""
    return [
        tuple(sorted(itertools.chain(*chosen)))
        for count in range(1, len(runs) + 1)
        for chosen in itertools.combinations(runs, count)
    ]


# Assignments of one op: which atoms split its factors, from what lies around it or at large.

Claims = Mapping[int, Axes]  # factor -> atoms that one operand or result has on it
MOST_ASSIGNMENTS = 12  # assignments that are made from what lies around an op
MOST_MOVED = 4  # of these, also tried with other factors split instead of whole dims


def assignments_around(
    rule: Rule, states: Sequence[States], sizes: Sequence[int]
) -> tuple[Assignment, ...]:
    """Returns assignments that fit known shardings of operands and results, and the unsplit one.

    `states` has for each operand and result the shardings that it may have, the likeliest first
    (none: any will do). Each of these in turn splits the op's factors first, and the likeliest one
    of each value splits what is left; then each is used alone. Variants keep window and merge
    factors whole, move atoms away from dims that the op needs whole, and split ring or exchanging
    factors. At most `MOST_ASSIGNMENTS` are kept.

    Example:
      `b i, i j -> b j`, the left operand in `[{x}, {}]`, the right one in `[{}, {y}]`: b over x and
      j over y; b over x alone; j over y alone; nothing split.
    """
    claims = [
        [c for state in options if (c := claims_of(rule, dims, state, sizes))]
        for options, dims in zip(states, rule.values, strict=True)
    ]
    first = [options[0] for options in claims if options]
    leads: dict[tuple[tuple[int, Axes], ...], Claims] = {}
    for lead in itertools.chain(first, *claims):
        leads.setdefault(tuple(sorted(lead.items())), lead)
    orders = [[lead, *[c for c in first if c is not lead]] for lead in leads.values()]
    orders += [[lead] for lead in leads.values()]
    # Factors that share a dim with others: their pieces have to be equal.
    joined = frozenset(
        f
        for dims in rule.values
        for dim in dims
        if len(dim) > 1 and rule.factors[dim[0]].kind != FIXED
        for f in dim
    )
    merged = dict.fromkeys([merge(rule, order, sizes, joined) for order in orders or [[]]])
    # Only factors that share a dim can be split in a way that is not legal.
    legal = [a for a in merged if not joined or is_legal_assignment(rule, a, sizes)]
    if rule.halos or rule.merges:
        # Where no window and no merge is split, devices exchange nothing, and compute more each.
        stays = {halo.factor for halo in rule.halos}
        stays |= {i for i, factor in enumerate(rule.factors) if factor.kind in (WINDOW, MERGE)}
        legal += [tuple([() if i in stays else own for i, own in enumerate(a)]) for a in legal]
    legal += [m for a in legal[:MOST_MOVED] for m in moved_whole(rule, a, states, sizes)]
    every = varied(rule, legal, list(itertools.chain(*claims)), sizes)
    kept, whole = tuple(dict.fromkeys(every))[: MOST_ASSIGNMENTS - 1], unsplit(rule)
    return kept if whole in kept else (*kept, whole)


def placements(
    rule: Rule, base: Assignment, runs: Sequence[Axes], sizes: Sequence[int]
) -> list[Assignment]:
    """Returns all ways to add each run of atoms to a factor of `base` that it divides, or to none.

    Runs, mostly whole axes, have no atom that is held or that `base` uses. `varied` adds variants.

    Example:
      Two axes have 16 placements on `b i, i j -> b j`: each splits `b`, `i`, `j`, or nothing.
    """

    def fits(number: int, axes: Axes) -> bool:
        factor = rule.factors[number]
        is_open = factor.kind not in UNCLAIMED and factor.size > 1
        return is_open and factor.size % math.prod([sizes[a] for a in axes]) == 0

    legal = [a for a in laid_out(base, runs, fits) if is_legal_assignment(rule, a, sizes)]
    wanted = [{number: own} for number, _ in rule.exchanges for own in runs]
    return varied(rule, legal, wanted, sizes)


def varied(
    rule: Rule, assignments: Iterable[Assignment], wanted: Sequence[Claims], sizes: Sequence[int]
) -> list[Assignment]:
    """Returns each assignment, and its variants that also split ring and exchanging factors.

    A ring factor (keys of attention) gets the atoms of the factor that its `Ring` names: its pieces
    then go round the devices. A factor with an exchange gets atoms that split others if a mapping
    in `wanted` (factor -> atoms) has them for it: experts over the atoms of tokens, by all-to-all.
    """
    found: list[Assignment] = []
    for plain in assignments:
        rings = list(plain)
        for number, _ in rule.rings:
            rings[number] = ring_axes(rule, number, plain, sizes)
        for each in dict.fromkeys((plain, tuple(rings))):
            more: dict[Assignment, None] = {each: None}
            for number, _ in rule.exchanges:
                for axes in dict.fromkeys(claims.get(number, ()) for claims in wanted):
                    if not each[number] and may_exchange(rule, number, axes, each, sizes):
                        more[(*each[:number], axes, *each[number + 1 :])] = None
            found += more
    return found


_STUCK = (REPLICATE, RING, WINDOW, MERGE)  # kinds of factors along which dims do not just pass


def moved_whole(
    rule: Rule, assignment: Assignment, states: Sequence[States], sizes: Sequence[int]
) -> Iterable[Assignment]:
    """Yields variants of an assignment that split other dims in place of those an op needs whole.

    If a sort along dim 0 has an operand in `[{a}, {}]`, one can gather dim 0; or split dim 1, along
    which the sort passes, over `a`. That takes an all-to-all before and one after the sort, and no
    device holds all of the operand.

    `states` has the shardings of each operand and result, of which the first counts. There is one
    assignment for each `pass` factor that all values with such atoms have: this gets as many of the
    atoms as fit, the other such factors get the rest. One that adds nothing is left out.
    """
    used = {a for axes in assignment for a in axes}
    stuck: dict[int, None] = {}
    targets = [i for i, f in enumerate(rule.factors) if f.kind == PASS]
    for dims, options in zip(rule.values, states, strict=True):
        idle = [
            a
            for sharding in options[:1]
            for axes, dim in zip(sharding.dims, dims, strict=True)
            if any(rule.factors[f].kind in _STUCK for f in dim)
            for a in axes
            if a not in used
        ]
        if idle:
            stuck |= dict.fromkeys(idle)
            targets = [f for f in targets if any(f in dim for dim in dims)]
    for lead in targets:
        moved = list(assignment)
        for atom in stuck:
            for factor in (lead, *(f for f in targets if f != lead)):
                longer = (*moved[:factor], (*moved[factor], atom), *moved[factor + 1 :])
                extent = math.prod(sizes[a] for a in longer[factor])
                if extent <= rule.factors[factor].size and is_legal_assignment(rule, longer, sizes):
                    moved = list(longer)
                    break
        if tuple(moved) != assignment:
            yield tuple(moved)


def claims_of(
    rule: Rule, dims: Sequence[tuple[int, ...]], sharding: Sharding, sizes: Sequence[int]
) -> dict[int, Axes]:
    """Returns factor -> atoms that a value's sharding puts on it; `dims` has each dim's factors."""
    return {
        factor: part
        for axes, dim in zip(sharding.dims, dims, strict=True)
        for factor, part in (dim_to_factors(axes, dim, rule, sizes) if axes else ())
    }


def merge(
    rule: Rule, order: Iterable[Claims], sizes: Sequence[int], joined: frozenset[int]
) -> Assignment:
    """Returns the assignment that takes atoms from claims (factor -> atoms), the first claim first.

    If a claim's atoms for a factor begin with all that the factor has by then, those behind are
    added, up to the first that is held or already used; else none is. For factors in `joined`,
    which share a dim with others, adding also ends at an atom that does not divide the size.
    """
    assignment = list(unsplit(rule))
    used = set(rule.held)
    for claims in order:
        for factor, axes in claims.items():
            have = assignment[factor]
            if axes[: len(have)] != have:
                continue
            taken = len(have)
            extent = math.prod([sizes[a] for a in have]) if factor in joined else 1
            for atom in axes[taken:]:
                if atom in used:
                    break
                if factor in joined:
                    extent *= sizes[atom]
                    if rule.factors[factor].size % extent:
                        break
                used.add(atom)
                taken += 1
            assignment[factor] = axes[:taken]
    return tuple(assignment)
