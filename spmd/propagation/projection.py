"""Projection: from the axes of dims to the axes of factors, and back."""

import math
from collections.abc import Sequence

from spmd.ir.dialect.rule import (
    FIXED,
    REDUCE,
    REPLICATE,
    UNCLAIMED,
    WINDOW,
    DimFactors,
    Factor,
    Rule,
)
from spmd.mesh.sharding import Axes, Sharding

Assignment = tuple[Axes, ...]  # for one op: which atoms split each factor


def dim_to_factors(
    axes: Axes, dim: DimFactors, factors: Sequence[Factor], atom_sizes: Sequence[int]
) -> tuple[tuple[int, Axes], ...]:
    """Deals a dim's atoms out to its factors, major first, as far as they fit exactly.

    A more minor factor gets atoms only when every more major one is split completely: otherwise
    the pieces of the dim would not be contiguous.
    """
    if len(dim) == 1:
        return ((dim[0], axes),)
    first = factors[dim[0]]
    if first.kind == FIXED:
        count = len(first.axes)
        return ((dim[1], axes[count:]),) if axes[:count] == first.axes else ()
    dealt, rest = list[tuple[int, Axes]](), axes
    for factor in dim:
        left, taken = factors[factor].size, 0
        while taken < len(rest) and left % atom_sizes[rest[taken]] == 0:
            left //= atom_sizes[rest[taken]]
            taken += 1
        dealt.append((factor, rest[:taken]))
        rest = rest[taken:] if left == 1 else ()
    return tuple(dealt)


def fitting(axes: Axes, rule: Rule, factor: Factor, sizes: Sequence[int]) -> Axes:
    """Returns the leading atoms over which a factor may be split.

    They end before the first atom that only `fixed` factors may have (`Rule.held`); and a window
    factor has no more pieces than elements: of size 3, it takes `(0,)` of two atoms `(0, 1)` of
    size 2.
    """
    if factor.kind in UNCLAIMED:
        return ()
    if rule.held:
        axes = axes[: next((k for k, a in enumerate(axes) if a in rule.held), len(axes))]
    if factor.kind == WINDOW:
        while axes and math.prod(sizes[a] for a in axes) > factor.size:
            axes = axes[:-1]
    return axes


def factors_to_dim(
    dim: DimFactors, assignment: Sequence[Axes], factors: Sequence[Factor], sizes: Sequence[int]
) -> Axes | None:
    """Returns a dim's atoms under an assignment; None if its pieces are not equal and contiguous.

    A dim of one factor takes any atoms: where they don't divide it, its pieces are padded. So does
    the factor behind a fixed one.
    """
    if len(dim) == 1:
        return assignment[dim[0]]
    if factors[dim[0]].kind == FIXED:
        return assignment[dim[0]] + assignment[dim[1]]
    axes: Axes = ()
    complete = True
    for factor in dim:
        own, size = assignment[factor], factors[factor].size
        extent = math.prod([sizes[a] for a in own])
        if (own and not complete) or size % extent:
            return None
        axes += own
        complete = complete and extent == size
    return axes


def is_legal_assignment(rule: Rule, assignment: Assignment, atom_sizes: Sequence[int]) -> bool:
    """Whether no atom is used twice, `replicate` factors are whole, and dims' pieces contiguous.

    Only ring factors, and those for which devices exchange, have the atoms of another one, too.
    """
    used: set[int] = set(rule.held)
    for number, (factor, axes) in enumerate(zip(rule.factors, assignment, strict=True)):
        if factor.kind == FIXED:
            legal = axes == factor.axes
        elif factor.ring is not None:
            legal = not axes or axes == ring_axes(rule, number, assignment, atom_sizes)
        elif rule.is_exchanged(number, assignment):
            legal = may_exchange(rule, number, axes, assignment, atom_sizes)
        else:
            legal = used.isdisjoint(axes) and not (axes and factor.kind == REPLICATE)
            used.update(axes)
        if not legal:
            return False
    return all(
        len(dim) == 1 or factors_to_dim(dim, assignment, rule.factors, atom_sizes) is not None
        for value in rule.values
        for dim in value
    )


def ring_axes(rule: Rule, number: int, assignment: Assignment, atom_sizes: Sequence[int]) -> Axes:
    """Returns the atoms that may split a ring factor; none if it has to stay whole."""
    factor = rule.factors[number]
    assert factor.ring is not None, "no ring factor"
    axes, along = assignment[factor.ring.along], rule.factors[factor.ring.along]
    pieces = math.prod(atom_sizes[a] for a in axes)
    return axes if factor.ring.allows(pieces, factor.size, along.size) else ()


def may_exchange(
    rule: Rule, number: int, axes: Axes, assignment: Assignment, atom_sizes: Sequence[int]
) -> bool:
    """Whether atoms that split other factors may split one, too, by an exchange between devices."""
    factor = rule.factors[number]
    assert factor.exchange is not None, "no factor that exchanges"
    along = {a for f in factor.exchange.along for a in assignment[f]}
    is_even = factor.size % math.prod(atom_sizes[a] for a in axes) == 0
    return bool(axes) and is_even and along.issuperset(axes) and along.isdisjoint(rule.held)


def unsplit(rule: Rule) -> Assignment:
    """Returns the assignment that splits nothing but fixed factors."""
    return tuple(factor.axes for factor in rule.factors)


def project(
    rule: Rule, value: Sequence[DimFactors], assignment: Assignment, atom_sizes: Sequence[int]
) -> Sharding:
    """Returns the sharding that a legal assignment gives to a value's dims, nothing partial."""
    dims = []
    for dim in value:
        axes = factors_to_dim(dim, assignment, rule.factors, atom_sizes)
        assert axes is not None, "illegal assignment"
        dims.append(axes)
    return Sharding(tuple(dims))


def reduced_axes(rule: Rule, assignment: Assignment, result: Sequence[DimFactors] = ()) -> Axes:
    """Returns the atoms over which a result becomes partial: those of the split `reduce` factors.

    A result that these atoms split has a part of its own on each device, and is not partial: `b s,
    b t -> b s, b t` with `s` reduced sums just the second result, unless `t` is a ring factor that
    they split, too. Without `result`, the factors of its dims, no atoms split it.
    """
    own = {a for dim in result for f in dim for a in assignment[f]}
    split = zip(rule.factors, assignment, strict=True)
    owed = {a for factor, axes in split if factor.kind == REDUCE for a in axes}
    return tuple(sorted(owed - own))
