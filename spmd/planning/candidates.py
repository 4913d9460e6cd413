"""Candidate assignments of one op, from what its operands are and what its results should be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from spmd.ir.dialect.rule import FIXED, MERGE, PASS, REPLICATE, WINDOW, Rule
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding
from spmd.planning.plan import Choice
from spmd.propagation.projection import (
    Assignment,
    dim_to_factors,
    fitting,
    is_legal_assignment,
    project,
    reduced_axes,
    unsplit,
)

Claims = Mapping[int, Axes]
"""Factor -> atoms that one operand or result has on it."""


def candidates(
    rule: Rule,
    operands: Sequence[Sharding | None],
    results: Sequence[Sharding | None],
    mesh: Mesh,
) -> tuple[Choice, ...]:
    """Every assignment worth costing, each with and without partial operands carried through.

    Each operand's state and each result's wish leads once, and the others add what still fits;
    each result's wish is also tried alone. What needs an exchange where it is split is also tried
    whole, and atoms of dims that are whole also on others. Two candidates are never equal.

    Args:
      rule: the op's rule.
      operands: the state of each operand, None if it is made to order.
      results: what each result should look like, None if nothing is known.
      mesh: the mesh.
    """
    found: dict[Choice, None] = {}
    for assignment in candidate_assignments(rule, operands, results, mesh):
        found[reduced_first(rule, assignment, mesh.atom_sizes)] = None
        for group, partial, kind in carried_partials(rule, operands):
            choice = _carried(rule, assignment, group, partial, kind, mesh.atom_sizes)
            if choice is not None:
                found[choice] = None
    return tuple(found)


def candidate_assignments(
    rule: Rule,
    operands: Sequence[Sharding | None],
    results: Sequence[Sharding | None],
    mesh: Mesh,
) -> tuple[Assignment, ...]:
    """The assignments of `candidates`; at least one: nothing split."""
    sizes = mesh.atom_sizes
    sources = [
        claims
        for sharding, dims in zip((*operands, *results), rule.values, strict=True)
        if sharding and (claims := claims_of(rule, dims, sharding, sizes))
    ]
    wishes = [
        claims
        for sharding, dims in zip(results, rule.results, strict=True)
        if sharding and (claims := claims_of(rule, dims, sharding, sizes))
    ]
    orders: list[list[Claims]] = [
        [lead, *(other for other in sources if other is not lead)] for lead in sources
    ]
    orders += [[wish] for wish in wishes]
    found: dict[Assignment, None] = {}
    for order in orders or [[]]:
        assignment = merge(rule, order, sizes)
        if is_legal_assignment(rule, assignment, sizes):
            found[assignment] = None
    found = found or {unsplit(rule): None}
    more = {}
    if rule.halos or rule.merges:
        more = {without_exchanges(rule, assignment): None for assignment in found}
    states = tuple(zip(rule.values, (*operands, *results), strict=True))
    for assignment in (*found, *more):
        more |= dict.fromkeys(moved_whole(rule, assignment, states, sizes))
    kept = _never_gathered(rule, operands)
    return tuple(found | {a: None for a in more if kept.issubset(x for axes in a for x in axes)})


def without_exchanges(rule: Rule, assignment: Assignment) -> Assignment:
    """The same with windows and merges whole: that may cost less than what they exchange."""
    halos = {halo.factor for halo in rule.halos}
    return tuple(
        () if number in halos or factor.kind in (WINDOW, MERGE) else axes
        for number, (factor, axes) in enumerate(zip(rule.factors, assignment, strict=True))
    )


def _never_gathered(rule: Rule, operands: Sequence[Sharding | None]) -> frozenset[int]:
    """Atoms of operands along dims that a network can sort: the whole may not fit in memory."""
    networks = {merge.factor for merge in rule.merges if merge.network}
    return frozenset(
        a
        for sharding, dims in zip(operands, rule.operands, strict=True)
        if sharding
        for axes, dim in zip(sharding.dims, dims, strict=True)
        if dim and dim[0] in networks
        for a in axes
    )


_STUCK = (REPLICATE, WINDOW, MERGE)
"""Kinds of factors that split dims do not simply pass along."""


def moved_whole(
    rule: Rule,
    assignment: Assignment,
    states: Sequence[tuple[Sequence[tuple[int, ...]], Sharding | None]],
    sizes: Sequence[int],
) -> Iterable[Assignment]:
    """The same with the atoms of dims that it has whole on factors that pass instead.

    So a sort along a split dim costs an all-to-all there and back, and nothing is ever gathered.
    Every factor that all these values share leads once; what has no room there goes to the others.
    """
    if all(factor.kind not in _STUCK for factor in rule.factors):
        return
    used = {a for axes in assignment for a in axes}
    stuck: dict[int, None] = {}
    targets = [i for i, f in enumerate(rule.factors) if f.kind == PASS]
    for dims, sharding in states:
        idle = [a for a in _on_whole_dims(rule, dims, sharding) if a not in used]
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


def _on_whole_dims(
    rule: Rule, dims: Sequence[tuple[int, ...]], sharding: Sharding | None
) -> Iterable[int]:
    """Atoms of a value on dims that do not pass."""
    if sharding:
        for axes, dim in zip(sharding.dims, dims, strict=True):
            if any(rule.factors[f].kind in _STUCK for f in dim):
                yield from axes


def claims_of(
    rule: Rule, dims: Sequence[tuple[int, ...]], sharding: Sharding, sizes: Sequence[int]
) -> dict[int, Axes]:
    """The atoms that a value's sharding has on each factor of an op."""
    claims: dict[int, Axes] = {}
    for axes, dim in zip(sharding.dims, dims, strict=True):
        if axes:
            for factor, part in dim_to_factors(axes, dim, rule.factors, sizes):
                part = fitting(part, rule, rule.factors[factor], sizes)
                if part:
                    claims[factor] = part
    return claims


def merge(rule: Rule, order: Iterable[Claims], sizes: Sequence[int]) -> Assignment:
    """Lets each source in turn split factors, or split them further, with atoms still free."""
    assignment = list(unsplit(rule))
    used = set(rule.held)
    joined = {
        f
        for dims in rule.values
        for dim in dims
        if len(dim) > 1 and rule.factors[dim[0]].kind != FIXED
        for f in dim
    }
    for claims in order:
        for factor, axes in claims.items():
            have = assignment[factor]
            if axes[: len(have)] != have:
                continue
            extent = math.prod(sizes[a] for a in have)
            for atom in axes[len(have) :]:
                extent *= sizes[atom]
                if atom in used or (factor in joined and rule.factors[factor].size % extent):
                    break
                used.add(atom)
                assignment[factor] += (atom,)
    return tuple(assignment)


def reduced_first(rule: Rule, assignment: Assignment, sizes: Sequence[int]) -> Choice:
    """The choice in which every operand arrives full."""
    return Choice(
        assignment,
        tuple(project(rule, dims, assignment, sizes) for dims in rule.operands),
        tuple(
            project(rule, dims, assignment, sizes).with_partial(
                reduced_axes(rule, assignment, dims), rule.reduction
            )
            for dims in rule.results
        ),
    )


def _carried(
    rule: Rule,
    assignment: Assignment,
    group: tuple[int, ...],
    partial: Axes,
    kind: str,
    sizes: Sequence[int],
) -> Choice | None:
    """The choice in which a group's partial flows through; its axes cannot split a factor too."""
    stripped = tuple(
        axes[: next((k for k, a in enumerate(axes) if a in partial), len(axes))]
        for axes in assignment
    )
    if not is_legal_assignment(rule, stripped, sizes) or not set(partial).isdisjoint(rule.held):
        return None
    full = reduced_first(rule, stripped, sizes)
    reduced = reduced_axes(rule, stripped)
    if reduced and rule.reduction != kind:
        return None
    return Choice(
        stripped,
        tuple(
            s.with_partial(partial, kind) if i in group else s for i, s in enumerate(full.operands)
        ),
        tuple(s.with_partial((*partial, *s.partial), kind) for s in full.results),
    )


def carried_partials(
    rule: Rule, operands: Sequence[Sharding | None]
) -> Iterable[tuple[tuple[int, ...], Axes, str]]:
    """Groups of operands whose common partial may flow through: (group, atoms, kind)."""
    for group in rule.linear:
        states = [operands[i] for i in group]
        kinds = {s.kind for s in states if s is not None}
        if None in states or len(kinds) != 1 or kinds == {""}:
            continue
        kind = kinds.pop()
        if kind != "add" and not rule.moves:
            continue
        common = set.intersection(*(set(s.partial) for s in states if s is not None))
        if common:
            yield group, tuple(sorted(common)), kind
