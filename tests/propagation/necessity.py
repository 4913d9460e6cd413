"""What of a propagation follows by necessity, computed from rules and marks alone.

An axis *may* reach a dim if rules lead it there from some mark, whoever else is there. A dim is
*contested* if claims may reach it of which neither continues the other, or if another dim of the
same value may get one of its axes too. Two factors of an op *dispute* an axis that both may be
split over. What reaches a dim from a mark through dims none of which is contested, along factors
none of which is disputed, is *necessary*: there is one source, nobody else wants the place, and any
propagation has to find it.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from spmd.ir.control_flow import ties
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import Rule
from spmd.ir.program import Op, Program, Value
from spmd.mesh.sharding import Axes
from spmd.propagation.projection import dim_to_factors, factors_to_dim
from spmd.propagation.propagate import Propagated, tie_rule

MOST_CLAIMS = 64
"""Combinations of claims on the factors of one dim beyond which a dim counts as contested."""

Place = tuple[Value, int]
"""A dim of a value."""


class Node(NamedTuple):
    """Values between which axes flow, and the rule by which."""

    rule: Rule
    values: tuple[Value, ...]


class Necessity(NamedTuple):
    """Claims on every dim.

    Attributes:
      may: the axes that may reach a dim.
      contested: dims that claims compete for.
      disputed: dims around an op that mean a disputed factor of it.
      must: the axes that necessarily reach a dim.
    """

    may: Mapping[Place, frozenset[Axes]]
    contested: frozenset[Place]
    disputed: frozenset[Place]
    must: Mapping[Place, Axes]


def necessity(propagated: Propagated) -> Necessity:
    """What may, and what must, reach every dim of a program."""
    flow = _Flow(propagated)
    may = flow.spread(frozenset())
    contested = frozenset(p for p in may if flow.is_contested(p, may))
    disputed = frozenset(p for node in flow.nodes for p in flow.disputed(node, may))
    sure = flow.spread(contested | disputed)
    must = {place: max(claims, key=len) for place, claims in sure.items()}
    known = {place: frozenset(claims) for place, claims in may.items()}
    return Necessity(known, contested, disputed, must)


class _Flow:
    def __init__(self, propagated: Propagated) -> None:
        self.marks = propagated.marks
        self.cheap = propagated.cheap
        self.sizes = propagated.mesh.atom_sizes
        self.program = propagated.program
        self.nodes = list(nodes(propagated.program))
        self.touching: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.values:
                self.touching.setdefault(value, []).append(node)
        body = self.program.body
        self.boundary = frozenset((*body.args, *body.results))

    def spread(self, closed: frozenset[Place]) -> dict[Place, set[Axes]]:
        """Lets claims flow from the marks until nothing is new, but into no closed place."""
        claims: dict[Place, set[Axes]] = {}
        for value, mark in self.marks.items():
            for dim, axes in enumerate(mark.dims):
                if axes:
                    claims[value, dim] = {axes}
        waiting = deque(self.nodes)
        while waiting:
            for place, axes in self.visit(waiting.popleft(), claims):
                if place in closed or not self.accepts(place, axes):
                    continue
                found = claims.setdefault(place, set())
                if axes not in found:
                    found.add(axes)
                    waiting.extend(self.touching[place[0]])
        return claims

    def visit(self, node: Node, claims: Mapping[Place, set[Axes]]) -> Iterator[tuple[Place, Axes]]:
        """Every claim that a node passes on, given those around it."""
        rule, sizes = node.rule, self.sizes
        wants = self.wants(node, claims)
        for value, dims in zip(node.values, rule.values, strict=True):
            if value in self.cheap:
                continue
            for d, dim in enumerate(dims):
                options = itertools.product(*(sorted(wants[f]) for f in dim))
                for option in itertools.islice(options, MOST_CLAIMS):
                    chosen = dict(zip(dim, option, strict=True))
                    assignment = [chosen.get(f, ()) for f in range(len(rule.factors))]
                    axes = factors_to_dim(dim, assignment, rule.factors, sizes)
                    if axes and len(set(axes)) == len(axes):
                        yield (value, d), axes

    def wants(self, node: Node, claims: Mapping[Place, set[Axes]]) -> list[set[Axes]]:
        """For each factor, what the dims around it would have it split over; always nothing."""
        rule = node.rule
        wants: list[set[Axes]] = [{()} for _ in rule.factors]
        for value, dims in zip(node.values, rule.values, strict=True):
            if value in self.cheap:
                continue
            for d, dim in enumerate(dims):
                for axes in claims.get((value, d), ()):
                    for factor, part in dim_to_factors(axes, dim, rule, self.sizes):
                        wants[factor].add(part)
        return wants

    def disputed(self, node: Node, may: Mapping[Place, set[Axes]]) -> Iterator[Place]:
        """Dims of factors that share an axis with another factor of the same op."""
        atoms = [{a for axes in found for a in axes} for found in self.wants(node, may)]
        for value, dims in zip(node.values, node.rule.values, strict=True):
            for d, dim in enumerate(dims):
                others = [atoms[f] for f in range(len(atoms)) if f not in dim]
                if any(not atoms[f].isdisjoint(set().union(*others)) for f in dim):
                    yield value, d

    def accepts(self, place: Place, axes: Axes) -> bool:
        """Whether a dim may take some axes at all: its mark is open, a boundary dim divides."""
        value, dim = place
        size = self.program.types[value].shape[dim]
        if value in self.boundary and size % math.prod(self.sizes[a] for a in axes):
            return False
        mark = self.marks.get(value)
        if mark is None:
            return True
        others = {a for d, own in enumerate(mark.dims) if d != dim for a in own}
        own = mark.dims[dim]
        return mark.open[dim] and axes[: len(own)] == own and others.isdisjoint(axes)

    def is_contested(self, place: Place, may: Mapping[Place, set[Axes]]) -> bool:
        value, dim = place
        if self.is_closed(place):
            return False
        longest = max(may[place], key=len)
        if any(longest[: len(axes)] != axes for axes in may[place]):
            return True
        rank = len(self.program.types[value].shape)
        others = {
            a for d in range(rank) if d != dim for axes in may.get((value, d), ()) for a in axes
        }
        return not others.isdisjoint(longest)

    def is_closed(self, place: Place) -> bool:
        mark = self.marks.get(place[0])
        return mark is not None and not mark.open[place[1]]


def nodes(program: Program) -> Iterator[Node]:
    """Ops with their rules, and values that control flow makes one with the identity's."""
    for op in program.walk():
        if op.regions:
            yield from _ties(op, program)
        else:
            yield Node(rule_of(op.kind, op.loc), op.operands + op.results)


def _ties(op: Op, program: Program) -> Iterator[Node]:
    for tie in ties(op):
        values = (*(() if tie.source is None else (tie.source,)), *tie.inside, tie.result)
        yield Node(tie_rule(len(values), program.types[tie.result].shape), values)
