"""What flows through one op when the propagation visits it.

A pure function of the op's shape and the proposals around it, so that ops that are alike share it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from spmd.ir.dialect.rule import FIXED, MERGE, REDUCE, UNCLAIMED, WINDOW, Rule
from spmd.mesh.sharding import Axes, common_prefix
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


@dataclass(frozen=True, eq=False)
class Shape:
    """What decides how axes flow through a node, besides the axes; made once for nodes alike.

    Two shapes are compared by identity: flows are remembered by shape, and hashing a rule is slow.

    Attributes:
      rule: factors of every value's dims.
      flags: for each value and dim, `OPEN`, `CLOSED`, or the size of a dim at the boundary, where
        axes must divide it; None for a cheap value.
    """

    rule: Rule
    flags: tuple[tuple[int, ...] | None, ...]

    @cached_property
    def reduces(self) -> bool:
        """Whether the op does more than pass its dims through, where they are split."""
        return any(factor.kind in (MERGE, REDUCE, WINDOW) for factor in self.rule.factors)


class Change(NamedTuple):
    """One dim of one of a node's values gets longer axes, because of another dim or of the rule."""

    position: int
    dim: int
    axes: Axes
    source: int
    source_dim: int


class Flow(NamedTuple):
    """What a visit of a node does, given the proposals around it.

    Attributes:
      changes: dims that get longer axes.
      conflicts: factors that are wanted split in different ways, with the claims.
      undivided: dims at the boundary, with wanted axes that don't divide them.
      disputed: atoms that two dims of a value claim: its position, the atom, and the dims.
    """

    changes: tuple[Change, ...]
    conflicts: tuple[tuple[int, tuple[_Claim, ...]], ...]
    undivided: tuple[tuple[int, int, Axes], ...]
    disputed: tuple[tuple[int, int, tuple[int, int]], ...]


def flow_through(
    sizes: Sequence[int], shape: Shape, around: tuple[Proposal, ...], guess: bool
) -> Flow:
    """What flows through a node: claims on factors, merged, and projected back onto every dim.

    Args:
      sizes: of all atoms of the mesh.
      shape: the node's.
      around: the proposals of its values.
      guess: whether the more major of two dims gets an atom that both claim, else neither.
    """
    # Trace, `b i k, k j -> i j` with the first operand [{x}, {}], the second [{}, {y}]:
    #   claims    i: {x} by dim 0 of the first, j: {y} by dim 1 of the second
    #   wanted    the result's dims want {x} and {y}; nothing new for the operands
    #   changes   the result gets {x}, from the first operand, and {y}, from the second
    # Were the second operand [{}, {x}] both dims of the result would claim x: a dispute.
    rule = shape.rule
    claims = _claims(shape, around, sizes)
    if not claims:
        return Flow((), (), (), ())
    merged = {factor: _merged(found) for factor, found in claims.items()}
    conflicts = [
        (factor, tuple(found))
        for factor, found in claims.items()
        if len(merged[factor][0]) < max(len(axes) for axes, _, _ in found)
    ]
    assignment = [merged[f][0] if f in merged else () for f in range(len(rule.factors))]
    changes: list[Change] = []
    undivided: list[tuple[int, int, Axes]] = []
    disputed: list[tuple[int, int, tuple[int, int]]] = []
    for position, (flags, have) in enumerate(zip(shape.flags, around, strict=True)):
        if flags is None:
            continue
        wanted = []
        for d, (dim, flag) in enumerate(zip(rule.values[position], flags, strict=True)):
            axes = kept = _wanted(have[d], dim, flag, rule, assignment, sizes)
            while flag >= 0 and flag % math.prod([sizes[a] for a in kept]):
                kept = kept[:-1]
            if len(kept) < len(axes):
                undivided.append((position, d, axes))
                kept = max(kept, have[d], key=len)
            wanted.append(kept)
        longer, stuck = _extensions(have, wanted, guess)
        disputed += [(position, atom, dims) for atom, dims in stuck]
        for d, axes in longer:
            changes += _changes(rule, position, d, len(have[d]), axes, merged)
    return Flow(tuple(changes), tuple(conflicts), tuple(undivided), tuple(disputed))


def _merged(claims: Sequence[_Claim]) -> _Claim:
    """The longest claim on a factor, up to where another one disagrees with it."""
    axes, position, dim = max(claims, key=lambda claim: len(claim[0]))
    for other, _, _ in claims:
        if axes[: len(other)] != other:
            axes = common_prefix(axes, other)
    return axes, position, dim


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


def _changes(
    rule: Rule, position: int, dim: int, held: int, axes: Axes, claims: Mapping[int, _Claim]
) -> Iterator[Change]:
    """A dim's longer axes: first what the rule fixes of them, then what its factors want."""
    factors = rule.values[position][dim]
    fixed = rule.factors[factors[0]].axes
    if held < len(fixed):
        yield Change(position, dim, axes[: len(fixed)], RULE, 0)
    if len(axes) > len(fixed):
        _, source, source_dim = next(claims[f] for f in reversed(factors) if f in claims)
        yield Change(position, dim, axes, source, source_dim)


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


def spread_through(shape: Shape, around: tuple[Masks, ...]) -> tuple[Masks, ...]:
    """What may come to each open dim through the factors that it shares with others.

    As `flow_through`, but for atoms that dims may get yet: any of them, in any order.
    """
    factors = shape.rule.factors
    reach = [0] * len(factors)
    for masks, dims in zip(around, shape.rule.values, strict=True):
        for mask, dim in zip(masks, dims, strict=True):
            for factor in dim if mask else ():
                if factors[factor].kind not in UNCLAIMED:
                    reach[factor] |= mask
    found: list[Masks] = []
    for masks, flags, dims in zip(around, shape.flags, shape.rule.values, strict=True):
        if flags is not None:
            masks = tuple(
                mask if flag == CLOSED else union([mask, *[reach[f] for f in dim]])
                for mask, flag, dim in zip(masks, flags, dims, strict=True)
            )
        found.append(masks)
    return tuple(found)


def as_mask(axes: Axes) -> int:
    """Some atoms as a set, a bit each."""
    return union(1 << a for a in axes)


def union(masks: Iterable[int]) -> int:
    """Every atom of some sets of atoms, a bit each."""
    return functools.reduce(operator.or_, masks, 0)
