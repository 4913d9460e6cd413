"""Converts between the atoms that split a value's dims and those that split an op's factors."""

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
    axes: Axes, dim: DimFactors, rule: Rule, sizes: Sequence[int]
) -> list[tuple[int, Axes]]:
    """Returns (factor, its atoms) for the factors that atoms `axes` of a dim split, major first.

    A dim's only factor gets all atoms; one behind a fixed factor gets those behind the fixed one's,
    with which `axes` must begin. Of others each gets the next atoms as long as their `sizes` divide
    it, and some only if the one before is split completely, as pieces have to be contiguous. Left
    out are the rest, the atoms of factors of kinds in `UNCLAIMED`, those from the first in
    `Rule.held` on, and those that would cut a window factor into more pieces than elements.
    """
    first, rest = rule.factors[dim[0]], axes
    dealt: list[tuple[int, Axes]] = []
    if len(dim) == 1:
        dealt = [(dim[0], axes)]
    elif first.kind == FIXED:
        count = len(first.axes)
        dealt = [(dim[1], axes[count:])] if axes[:count] == first.axes else []
    else:
        for number in dim:
            left, taken = rule.factors[number].size, 0
            while taken < len(rest) and left % sizes[rest[taken]] == 0:
                left //= sizes[rest[taken]]
                taken += 1
            dealt.append((number, rest[:taken]))
            rest = rest[taken:] if left == 1 else ()
    found = []
    for number, own in dealt:
        factor = rule.factors[number]
        end = next((k for k, a in enumerate(own) if a in rule.held), len(own))
        while factor.kind == WINDOW and math.prod(sizes[a] for a in own[:end]) > factor.size:
            end -= 1
        if end and factor.kind not in UNCLAIMED:
            found.append((number, own[:end]))
    return found


def factors_to_dim(
    dim: DimFactors, assignment: Sequence[Axes], factors: Sequence[Factor], sizes: Sequence[int]
) -> Axes | None:
    """Returns the atoms that split a dim if an assignment splits its factors.

    None: its pieces would not be equal and contiguous. A dim of one factor takes any atoms, with
    padded pieces where they don't divide it, and so does the factor behind a fixed one.
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

    A fixed factor must have its own atoms, and no other an atom in `Rule.held`. Only ring factors,
    and those with an `Exchange`, may have the atoms of another factor, too.
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
    """Returns the atoms that may split ring factor `number`; () if it has to stay whole."""
    factor = rule.factors[number]
    assert factor.ring is not None, "no ring factor"
    axes, along = assignment[factor.ring.along], rule.factors[factor.ring.along]
    pieces = math.prod(atom_sizes[a] for a in axes)
    return axes if factor.ring.allows(pieces, factor.size, along.size) else ()


def may_exchange(
    rule: Rule, number: int, axes: Axes, assignment: Assignment, atom_sizes: Sequence[int]
) -> bool:
    """Whether `axes` may split factor `number` by its `Exchange`: evenly, all from its `along`."""
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
    """Returns the sharding of a value, its dims given as factors, under a legal assignment."""
    dims = []
    for dim in value:
        axes = factors_to_dim(dim, assignment, rule.factors, atom_sizes)
        assert axes is not None, "illegal assignment"
        dims.append(axes)
    return Sharding(tuple(dims))


def reduced_axes(rule: Rule, assignment: Assignment, result: Sequence[DimFactors] = ()) -> Axes:
    """Returns the atoms over which a result becomes partial: those of the split `reduce` factors.

    A result is not partial over atoms that split its own dims, whose factors are `result`: in `b s,
    b t -> b s, b t` with `s` reduced only the second result is partial, and not over atoms that
    split `t`, too (a ring factor). Without `result` no atoms are left out.
    """
    own = {a for dim in result for f in dim for a in assignment[f]}
    split = zip(rule.factors, assignment, strict=True)
    owed = {a for factor, axes in split if factor.kind == REDUCE for a in axes}
    return tuple(sorted(owed - own))
