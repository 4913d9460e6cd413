"""What flows through one op when the propagation visits it.

A pure function of the op's shape and the proposals around it, so that ops that are alike share it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.ir.dialect.rule import FIXED, REPLICATE, Rule
from spmd.mesh.sharding import Axes
from spmd.propagation.projection import dim_to_factors, factors_to_dim, fitting

OPEN, CLOSED = -1, -2
"""Flags of a dim: it may be split further, or it is as a mark says."""

RULE = -1
"""The source of axes that the rule itself fixes."""

Masks = tuple[int, ...]
"""For each dim of a value a set of atoms, a bit each."""

Proposal = tuple[Axes, ...]
"""The axes of each dim of a value."""

_Claim = tuple[Axes, int, int]
"""Axes, and the position and dim of the value that wants a factor split over them."""


class Shape(NamedTuple):
    """What two nodes share when the same axes flow through them alike: equal nodes are `is`.

    Attributes:
      rule: factors of every value's dims.
      flags: for each value and dim, `OPEN`, `CLOSED`, or the size of a dim at the boundary, where
        axes must divide it; None for a cheap value.
      reduces: whether the rule sums factors away.
    """

    rule: Rule
    flags: tuple[tuple[int, ...] | None, ...]
    reduces: bool


class Change(NamedTuple):
    """One dim of one of a node's values gets longer axes, because of another dim or of the rule."""

    position: int
    dim: int
    axes: Axes
    source: int
    source_dim: int


class _Dispute(NamedTuple):
    """An atom that two dims of one of a node's values claim."""

    position: int
    atom: int
    dims: tuple[int, int]


class Flow(NamedTuple):
    """What a visit of a node does, given the proposals around it.

    Attributes:
      changes: dims that get longer axes.
      conflicts: factors that are wanted split in different ways, with the claims.
      undivided: dims at the boundary, with wanted axes that don't divide them.
      disputed: atoms that two dims of a value claim.
    """

    changes: tuple[Change, ...]
    conflicts: tuple[tuple[int, tuple[_Claim, ...]], ...]
    undivided: tuple[tuple[int, int, Axes], ...]
    disputed: tuple[_Dispute, ...]


def flow_through(
    shape: Shape, around: tuple[Proposal, ...], guess: bool, sizes: Sequence[int]
) -> Flow:
    """What flows through a node: claims on factors, merged, and projected back onto every dim.

    Args:
      shape: the node's.
      around: the proposals of its values.
      guess: whether the more major of two dims gets an atom that both claim, else neither.
      sizes: of all atoms of the mesh.
    """
    claims = _claims(shape, around, sizes)
    if not claims:
        return Flow((), (), (), ())
    assignment, source, conflicts = _merged(claims, len(shape.rule.factors))
    changes: list[Change] = []
    undivided: list[tuple[int, int, Axes]] = []
    disputed: list[_Dispute] = []
    for position, (flags, have) in enumerate(zip(shape.flags, around, strict=True)):
        if flags is None:
            continue
        wanted, uneven = _wishes(shape.rule, position, flags, have, assignment, sizes)
        undivided += [(position, dim, axes) for dim, axes in uneven]
        more, stuck = _extensions(have, wanted, guess)
        disputed += [_Dispute(position, atom, dims) for atom, dims in stuck]
        for dim, axes in more:
            changes += _changes(shape.rule, position, dim, len(have[dim]), axes, source)
    return Flow(tuple(changes), conflicts, tuple(undivided), tuple(disputed))


def _merged(
    claims: Mapping[int, Sequence[_Claim]], count: int
) -> tuple[list[Axes], dict[int, tuple[int, int]], tuple[tuple[int, tuple[_Claim, ...]], ...]]:
    """The axes that claims agree on for each factor, whose claim is the longest, and conflicts."""
    assignment: list[Axes] = [()] * count
    source: dict[int, tuple[int, int]] = {}
    conflicts = []
    for factor, found in claims.items():
        axes, position, dim = max(found, key=lambda claim: len(claim[0]))
        agreed = _common_prefix(axes, found)
        if agreed != axes:
            conflicts.append((factor, tuple(found)))
        assignment[factor] = agreed
        source[factor] = (position, dim)
    return assignment, source, tuple(conflicts)


def _claims(
    shape: Shape, around: tuple[Proposal, ...], sizes: Sequence[int]
) -> dict[int, list[_Claim]]:
    """Factor -> the (axes, position, dim) that want it split."""
    factors = shape.rule.factors
    found: dict[int, list[_Claim]] = {
        i: [(factor.axes, RULE, 0)] for i, factor in enumerate(factors) if factor.kind == FIXED
    }
    for position, dims in enumerate(shape.rule.values):
        if shape.flags[position] is None:
            continue
        for d, axes in enumerate(around[position]):
            if not axes:
                continue
            for factor, part in dim_to_factors(axes, dims[d], factors, sizes):
                part = fitting(part, shape.rule, factors[factor], sizes)
                if part:
                    found.setdefault(factor, []).append((part, position, d))
    return found


def _wanted(
    have: Axes,
    dim: tuple[int, ...],
    flag: int,
    rule: Rule,
    assignment: Sequence[Axes],
    sizes: Sequence[int],
) -> Axes:
    """What the factors want for one dim: an extension of what it has, or just that."""
    if flag == CLOSED:
        return have
    axes = factors_to_dim(dim, assignment, rule.factors, sizes)
    if axes is None or len(axes) <= len(have) or axes[: len(have)] != have:
        return have
    if len(dim) > 1 and len(set(axes)) < len(axes):  # two of its factors are split alike
        return have
    return axes


def _wishes(
    rule: Rule,
    position: int,
    flags: Sequence[int],
    have: Proposal,
    assignment: Sequence[Axes],
    sizes: Sequence[int],
) -> tuple[list[Axes], list[tuple[int, Axes]]]:
    """What the factors want for each dim of a value, and (dim, axes) that don't divide it."""
    wanted, undivided = [], []
    for d, own in enumerate(rule.values[position]):
        axes = _wanted(have[d], own, flags[d], rule, assignment, sizes)
        kept = _dividing(axes, flags[d], sizes) if flags[d] >= 0 else axes
        if len(kept) < len(axes):
            undivided.append((d, axes))
            axes = max(kept, have[d], key=len)
        wanted.append(axes)
    return wanted, undivided


def _changes(
    rule: Rule,
    position: int,
    dim: int,
    held: int,
    axes: Axes,
    source: Mapping[int, tuple[int, int]],
) -> Iterator[Change]:
    """A dim's longer axes: first what the rule fixes of them, then what its factors want."""
    factors = rule.values[position][dim]
    fixed = rule.factors[factors[0]].axes
    if held < len(fixed):
        yield Change(position, dim, axes[: len(fixed)], RULE, 0)
    if len(axes) > len(fixed):
        cause = next(source[f] for f in reversed(factors) if f in source)
        yield Change(position, dim, axes, *cause)


def _dividing(axes: Axes, size: int, sizes: Sequence[int]) -> Axes:
    """The longest part of some atoms that divides a dim: all that a boundary may have."""
    while size % math.prod([sizes[a] for a in axes]):
        axes = axes[:-1]
    return axes


def _extensions(
    current: Proposal, wanted: Sequence[Axes], guess: bool
) -> tuple[list[tuple[int, Axes]], list[tuple[int, tuple[int, int]]]]:
    """The dims of one value that get longer axes, and the atoms that two of them claim."""
    more: list[tuple[int, Axes]] = []
    disputed: list[tuple[int, tuple[int, int]]] = []
    now = list(current)
    for d, axes in enumerate(wanted):
        have = current[d]
        if len(axes) <= len(have):
            continue
        held = {a for e, other in enumerate(now) if e != d for a in other}
        rivals = wanted[:d] if guess else [*wanted[:d], *wanted[d + 1 :]]
        taken = held.union(*rivals)
        fresh = axes[len(have) :]
        clash = next((k for k, a in enumerate(fresh) if a in taken), None)
        if clash is not None:
            atom = fresh[clash]
            if atom not in held:
                rival = next(e for e, other in enumerate(wanted) if e != d and atom in other)
                disputed.append((atom, (d, rival)))
            axes = have + fresh[:clash]
        if len(axes) > len(have):
            more.append((d, axes))
            now[d] = axes
    return more, disputed


def _common_prefix(axes: Axes, claims: Iterable[_Claim]) -> Axes:
    """The part of the longest claim with which no other claim disagrees."""
    for other, _, _ in claims:
        pairs = enumerate(zip(axes, other, strict=False))
        axes = axes[: next((k for k, (a, b) in pairs if a != b), len(axes))]
    return axes


def spread_through(shape: Shape, around: tuple[Masks, ...]) -> tuple[Masks, ...]:
    """What may come to each open dim through the factors that it shares with others."""
    factors = shape.rule.factors
    reach = [0] * len(factors)
    for masks, terms in zip(around, shape.rule.values, strict=True):
        for mask, term in zip(masks, terms, strict=True):
            for factor in term if mask else ():
                if factors[factor].kind not in (REPLICATE, FIXED):
                    reach[factor] |= mask
    found: list[Masks] = []
    for masks, flags, terms in zip(around, shape.flags, shape.rule.values, strict=True):
        dims = zip(masks, flags or (), terms, strict=False)
        more = [m if f == CLOSED else union([m, *[reach[x] for x in t]]) for m, f, t in dims]
        found.append(masks if flags is None else tuple(more))
    return tuple(found)


def union(masks: Iterable[int]) -> int:
    """Every atom of some sets of atoms, a bit each."""
    return functools.reduce(operator.or_, masks, 0)
