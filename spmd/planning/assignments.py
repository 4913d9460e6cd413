"""Assignments of one op: which atoms split its factors, from what lies around it or at large."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from spmd.ir.dialect.rule import FIXED, MERGE, PASS, REPLICATE, RING, UNCLAIMED, WINDOW, Rule
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.problem import laid_out
from spmd.propagation.projection import (
    Assignment,
    dim_to_factors,
    fitting,
    is_legal_assignment,
    may_exchange,
    ring_axes,
    unsplit,
)
from spmd.reshard.resharder import States

Claims = Mapping[int, Axes]
"""Factor -> atoms that one operand or result has on it."""

MOST_ASSIGNMENTS = 12
"""Assignments that are made from what lies around an op."""

MOST_MOVED = 4
"""Assignments of which those are tried as well that split other factors instead of whole dims."""


def assignments_around(
    rule: Rule, states: Sequence[States], sizes: Sequence[int]
) -> tuple[Assignment, ...]:
    """What the states of an op's values lead to, and the assignment that splits nothing.

    Every state leads once, and the first states of the other values split what it leaves free; then
    every state is tried alone. What needs an exchange where it is split is also tried whole, atoms
    of dims that are whole also on other factors, and what may go round, or be exchanged, also is.

    `states` are what each operand and result may be, the likely first; none if any state will do.

    Example:
      The product `b i, i j -> b j` of operands in `[{x}, {}]` and `[{}, {y}]` splits b over x and j
      over y, whichever leads; alone they split just b, or just j.
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
    likely = tuple((dims, options[:1]) for dims, options in zip(rule.values, states, strict=True))
    legal += [m for a in legal[:MOST_MOVED] for m in moved_whole(rule, a, likely, sizes)]
    whole = unsplit(rule)
    legal = [each for a in legal for each in (a, *going_round(rule, a, sizes))]
    if rule.exchanges:
        wanted = [c for options in claims for c in options]
        legal = [each for a in legal for each in (a, *exchanging(rule, a, wanted, sizes))]
    kept = tuple(dict.fromkeys(legal))[: MOST_ASSIGNMENTS - 1]
    return kept if whole in kept else (*kept, whole)


def placements(
    rule: Rule, base: Assignment, runs: Sequence[Axes], sizes: Sequence[int]
) -> list[Assignment]:
    """Every way to lay runs of atoms on factors of an op that they divide evenly, or nowhere.

    The runs are whole axes, mostly. No atom of theirs is held, or splits a factor in `base`.

    Example:
      Two axes have 16 places on the product `b i, i j -> b j`: each splits `b`, `i`, `j`, or idles.
    """

    def fits(number: int, axes: Axes) -> bool:
        factor = rule.factors[number]
        is_open = factor.kind not in UNCLAIMED and factor.size > 1
        return is_open and factor.size % math.prod([sizes[a] for a in axes]) == 0

    legal = [a for a in laid_out(base, runs, fits) if is_legal_assignment(rule, a, sizes)]
    legal = [each for a in legal for each in (a, *going_round(rule, a, sizes))]
    if not rule.exchanges:
        return legal
    wanted = [{number: own} for number, _ in rule.exchanges for own in runs]
    return [each for a in legal for each in (a, *exchanging(rule, a, wanted, sizes))]


def going_round(rule: Rule, assignment: Assignment, sizes: Sequence[int]) -> tuple[Assignment, ...]:
    """The assignment that splits ring factors, too: attention's keys, whose pieces then go round.

    None where the rule has no ring factor that can be split.
    """
    round_ = list(assignment)
    for number, _ in rule.rings:
        round_[number] = ring_axes(rule, number, assignment, sizes)
    return (tuple(round_),) if tuple(round_) != assignment else ()


def exchanging(
    rule: Rule, assignment: Assignment, wanted: Iterable[Claims], sizes: Sequence[int]
) -> tuple[Assignment, ...]:
    """Assignments that also split factors over atoms along which they exchange, where wanted."""
    found: dict[Assignment, None] = {}
    for number, _ in rule.exchanges:
        for axes in dict.fromkeys(claims.get(number, ()) for claims in wanted):
            if not assignment[number] and may_exchange(rule, number, axes, assignment, sizes):
                found[(*assignment[:number], axes, *assignment[number + 1 :])] = None
    return tuple(found)


_STUCK = (REPLICATE, RING, WINDOW, MERGE)
"""Kinds of factors that split dims do not simply pass along."""


def moved_whole(
    rule: Rule,
    assignment: Assignment,
    states: Sequence[tuple[Sequence[tuple[int, ...]], States]],
    sizes: Sequence[int],
) -> Iterable[Assignment]:
    """Assignments that split other dims, where the op needs those whole that its values have split.

    A sort along a dim needs the dim whole. If its operand comes with that dim split over `a`, one
    can gather it; or split another dim, along which the sort passes, over `a`. That costs an all-
    to-all there and one back, and no device ever holds all of the operand.

    There is one assignment for each passing factor that all such values share: it takes as many
    atoms as fit into it, and the other passing factors take the rest. `states` has for each operand
    and result its factors, and the state that it is likely in, if any.
    """
    if all(factor.kind not in _STUCK for factor in rule.factors):
        return
    used = {a for axes in assignment for a in axes}
    stuck: dict[int, None] = {}
    targets = [i for i, f in enumerate(rule.factors) if f.kind == PASS]
    for dims, likely in states:
        idle = [
            a
            for sharding in likely
            for axes, dim in zip(sharding.dims, dims, strict=True)
            if any(rule.factors[f].kind in _STUCK for f in dim)
            for a in axes
            if a not in used
        ]
        if idle:
            stuck |= dict.fromkeys(idle)
            targets = [f for f in targets if any(f in dim for dim in dims)]
    if not stuck:
        return
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
    """The atoms that a value's sharding has on each factor of an op."""
    claims: dict[int, Axes] = {}
    for axes, dim in zip(sharding.dims, dims, strict=True):
        if not axes:
            continue
        if len(dim) == 1 and rule.factors[dim[0]].kind == PASS and not rule.held:
            claims[dim[0]] = axes
        else:
            for factor, part in dim_to_factors(axes, dim, rule.factors, sizes):
                part = fitting(part, rule, rule.factors[factor], sizes)
                if part:
                    claims[factor] = part
    return claims


def merge(
    rule: Rule, order: Iterable[Claims], sizes: Sequence[int], joined: frozenset[int]
) -> Assignment:
    """Lets each source in turn split factors, or split them further, with atoms still free.

    Factors that share a dim with others are `joined`: they take only atoms that divide them.
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
