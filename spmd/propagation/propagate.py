"""Propagation: axes flow from marks along factors until nothing changes.

Every value ends with a *proposal*: the axes that the marks suggest for each of its dims. The plan
reads proposals as wishes and is free to decide otherwise, except for marks.

Tie-breaks, all of them: (1) ops that only pass dims through are settled before ops that reduce
or read their neighbours;
(2) within a kind, first in program order, first operand before second, operands before results;
(3) where two dims of one value claim the same axis, neither gets it, through whatever op it comes,
until everything that follows by necessity is settled; then the more major dim gets it, first op in
program order first;
(4) where two values disagree about one factor, their common part flows on and the conflict is
recorded for the planner.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import ties
from spmd.ir.program import Loc, Op, OpKind, Program, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Mark
from spmd.propagation.projection import dim_to_factors, factors_to_dim, fitting
from spmd.propagation.registry import rule_of
from spmd.propagation.rule import FIXED, MERGE, REDUCE, REPLICATE, WINDOW, Factor, Rule


class Origin(NamedTuple):
    """Why a dim has some of its atoms: from a neighbouring value's dim, or from a mark.

    Attributes:
      atoms: the atoms.
      value, dim: where they came from; no value: a mark.
      label: the op that they came through, or the mark's reason.
      loc: where that op is.
    """

    atoms: Axes
    value: Value | None
    dim: int
    label: str
    loc: Loc = Loc()

    @property
    def reason(self) -> str:
        """For people: `through stablehlo.add at train.py:12 (step)`, or the mark's reason."""
        if self.value is None:
            return self.label
        source = self.loc.trail
        label = self.label.removeprefix("stablehlo.")
        return f"through {label}" + (f" at {source}" if source else "")


class Conflict(NamedTuple):
    """Values around one op that want different axes for one factor of it."""

    op: Op
    factor: int
    claims: tuple[tuple[Axes, Value, int], ...]


class Propagated(NamedTuple):
    """The program with a proposal for every value.

    Attributes:
      program: unchanged.
      mesh: the mesh that atoms refer to.
      proposals: for each value, the atoms of each dim.
      marks: value -> its mark.
      cheap: values without a sharding of their own.
      origins: (value, dim) -> where its atoms came from, oldest first.
      conflicts: disagreements left to the planner.
      undivided: (value, dim) -> axes that were wanted there and don't divide the dim.
    """

    program: Program
    mesh: Mesh
    proposals: tuple[tuple[Axes, ...], ...]
    marks: Mapping[Value, Mark]
    cheap: frozenset[Value]
    origins: Mapping[tuple[Value, int], tuple[Origin, ...]]
    conflicts: tuple[Conflict, ...]
    undivided: Mapping[tuple[Value, int], Axes]

    def why(self, value: Value, dim: int, atom: int) -> tuple[str, ...]:
        """The chain from an inferred atom back to the mark that caused it, nearest first."""
        return tuple([origin.reason for _, origin in self._chain(value, dim, atom)])

    def root(self, value: Value, dim: int, atom: int) -> Value | None:
        """The marked value that an inferred atom comes from, if any."""
        chain = list(self._chain(value, dim, atom))
        return chain[-1][0] if chain and chain[-1][1].value is None else None

    def _chain(self, value: Value, dim: int, atom: int) -> Iterator[tuple[Value, Origin]]:
        """(value, why it has the atom), back to the mark."""
        at: Value | None = value
        while at is not None:
            origin = next((o for o in self.origins.get((at, dim), ()) if atom in o.atoms), None)
            if origin is None:
                return
            yield at, origin
            at, dim = origin.value, origin.dim


class _Shape(NamedTuple):
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


OPEN, CLOSED = -1, -2
Masks = tuple[int, ...]
"""For each dim of a value a set of atoms, a bit each."""


class _Node(NamedTuple):
    """An op, or a tie of values that are one, as the propagation sees it."""

    shape: _Shape
    values: tuple[Value, ...]
    op: Op | None
    loc: Loc
    label: str


_RULE = -1
"""The source of axes that the rule itself fixes."""


class _Change(NamedTuple):
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


class _Flow(NamedTuple):
    """What a visit of a node does, given the proposals around it.

    Attributes:
      changes: dims that get longer axes.
      conflicts: factors that are wanted split in different ways, with the claims.
      undivided: dims at the boundary, with wanted axes that don't divide them.
      disputed: atoms that two dims of a value claim.
    """

    changes: tuple[_Change, ...]
    conflicts: tuple[tuple[int, tuple[tuple[Axes, int, int], ...]], ...]
    undivided: tuple[tuple[int, int, Axes], ...]
    disputed: tuple[_Dispute, ...]


Proposal = tuple[Axes, ...]


def propagate(
    program: Program,
    mesh: Mesh,
    marks: Mapping[Value, Mark],
    cheap: frozenset[Value],
    links: Iterable[tuple[Value, Value]] = (),
) -> Propagated:
    """Proposes axes for every dim of every value.

    Args:
      program: the program.
      mesh: the mesh.
      marks: promises: arguments, results and mark ops' results.
      cheap: values that constrain nothing (`cheap_values`).
      links: pairs of values that should be alike (a donated argument and its updated result).

    Raises:
      UnsupportedOpError: an op without a rule.
    """
    state = _State(program, mesh, marks, cheap)
    for op in program.walk():
        state.add_op(op)
    for a, b in links:
        state.add_tie((a, b), Loc(), "the donated argument and its update")
    state.run()
    return state.finish()


class _State:
    def __init__(
        self, program: Program, mesh: Mesh, marks: Mapping[Value, Mark], cheap: frozenset[Value]
    ) -> None:
        self.program = program
        self.mesh = mesh
        self.sizes = mesh.atom_sizes
        self.marks = marks
        self.cheap = cheap
        self.proposals: list[Proposal] = [((),) * len(t.shape) for t in program.types]
        self.flags: list[tuple[int, ...] | None] = self.value_flags()
        self.origins: dict[tuple[Value, int], list[Origin]] = {}
        self.nodes: list[_Node] = []
        self.touching: list[list[int]] = [[] for _ in program.types]
        self.conflicts: dict[tuple[int, int], Conflict] = {}
        self.undivided: dict[tuple[Value, int], Axes] = {}
        self.blocked: set[int] = set()
        self.pending: dict[Value, Masks] = {}
        self.spreads: dict[tuple[int, tuple[Masks, ...]], tuple[Masks, ...]] = {}
        self.settled: dict[Value, int] = {}
        self.queues: tuple[deque[int], deque[int]] = (deque(), deque())
        self.queued: set[int] = set()
        self.shapes: dict[tuple[int, tuple[tuple[int, ...] | None, ...]], _Shape] = {}
        self.tie_rules: dict[tuple[int, tuple[int, ...]], Rule] = {}
        self.flows: dict[tuple[int, tuple[Proposal, ...], bool], _Flow] = {}
        for value, mark in marks.items():
            self.proposals[value] = mark.dims
            for dim, axes in enumerate(mark.dims):
                if axes:
                    self.origins[value, dim] = [Origin(axes, None, dim, mark.reason)]

    def value_flags(self) -> list[tuple[int, ...] | None]:
        program = self.program
        flags: list[tuple[int, ...] | None] = [(OPEN,) * len(t.shape) for t in program.types]
        for value in (*program.body.args, *program.body.results):
            flags[value] = program.types[value].shape
        for value, mark in self.marks.items():
            found = flags[value] or ()
            flags[value] = tuple(
                flag if is_open else CLOSED for flag, is_open in zip(found, mark.open, strict=True)
            )
        for value in self.cheap:
            flags[value] = None
        return flags

    # Building the graph.

    def add_op(self, op: Op) -> None:
        if op.regions:
            for tie in ties(op):
                values = (*tie.inside, tie.result)
                if tie.source is not None:
                    values = (tie.source, *values)
                self.add_tie(values, op.loc, op.kind.name)
            return
        cheap = self.cheap
        if cheap and all([v in cheap for v in op.results]):
            return
        self.add(rule_of(op.kind, op.loc), op.operands + op.results, op, op.loc, op.kind.name)

    def add_tie(self, values: tuple[Value, ...], loc: Loc, label: str) -> None:
        shape = self.program.types[values[-1]].shape
        rule = self.tie_rules.get((len(values), shape))
        if rule is None:
            dims = tuple((i,) for i in range(len(shape)))
            factors = tuple(Factor(n) for n in shape)
            rule = Rule((dims,) * (len(values) - 1), (dims,), factors)
            self.tie_rules[len(values), shape] = rule
        self.add(rule, values, None, loc, label)

    def add(
        self, rule: Rule, values: tuple[Value, ...], op: Op | None, loc: Loc, label: str
    ) -> None:
        if not rule.factors or not self.sizes:
            return
        all_flags = self.flags
        flags = tuple([all_flags[v] for v in values])
        key = (id(rule), flags)
        shape = self.shapes.get(key)
        if shape is None:
            reduces = any(f.kind in (MERGE, REDUCE, WINDOW) for f in rule.factors)
            shape = self.shapes[key] = _Shape(rule, flags, reduces)
        index = len(self.nodes)
        self.nodes.append(_Node(shape, values, op, loc, label))
        touching = self.touching
        for value in values:
            touching[value].append(index)
        self.queued.add(index)
        self.queues[shape.reduces].append(index)

    # The fixed point.

    def run(self) -> None:
        self.drain()
        progress = True
        while progress:
            progress = False
            for index in sorted(self.blocked):
                self.blocked.discard(index)
                if self.visit(index, True):
                    progress = True
                    self.drain()

    def drain(self) -> None:
        first, second = self.queues
        queued = self.queued
        while first or second:
            index = (first or second).popleft()
            queued.discard(index)
            self.visit(index, False)

    def visit(self, index: int, guess: bool) -> bool:
        """Lets axes flow through one node; returns whether anything changed."""
        node = self.nodes[index]
        proposals = self.proposals
        around = tuple([proposals[v] for v in node.values])
        key = (id(node.shape), around, guess)
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = _flow(node.shape, around, guess, self.sizes)
        if flow.conflicts or flow.undivided or flow.disputed:
            self.note(index, node, flow)
        changes = flow.changes
        if changes and self.pending and not guess:
            changes = self.undisputed(index, node, changes)
        if changes:
            self.apply(index, node, changes)
        return bool(changes)

    def undisputed(
        self, index: int, node: _Node, changes: Iterable[_Change]
    ) -> tuple[_Change, ...]:
        """Changes up to the first atom that another dim may get yet, unless that is settled."""
        kept = []
        for change in changes:
            value, source = node.values[change.position], node.values[change.source]
            pending = self.pending.get(value, ())
            rivals = _union(mask for d, mask in enumerate(pending) if d != change.dim)
            rivals &= ~self.settled.get(source, 0)
            held = len(self.proposals[value][change.dim])
            fresh = enumerate(change.axes[held:], held)
            length = next((k for k, a in fresh if rivals >> a & 1), len(change.axes))
            if length < len(change.axes):
                self.blocked.add(index)
                change = change._replace(axes=change.axes[:length])
            if length > held:
                kept.append(change)
        return tuple(kept)

    def dispute(self, value: Value, atom: int, dims: tuple[int, int]) -> None:
        """Notes that either of two dims of a value may get an atom, and what may follow from it.

        Else a claim that comes by a way without dispute would settle what is held back here.
        """
        none: Masks = (0,) * len(self.proposals[value])
        found = tuple(
            mask | (1 << atom if d in dims else 0)
            for d, mask in enumerate(self.pending.get(value, none))
        )
        if found == self.pending.get(value):
            return
        self.pending[value] = found
        waiting = deque(self.touching[value])
        while waiting:
            node = self.nodes[waiting.popleft()]
            for value in self.spread(node):
                waiting.extend(self.touching[value])

    def spread(self, node: _Node) -> list[Value]:
        """Takes what may come to a node's values to the others; returns those that it is new to."""
        pending, proposals = self.pending, self.proposals
        around = tuple([pending.get(v) or (0,) * len(proposals[v]) for v in node.values])
        key = (id(node.shape), around)
        masks = self.spreads.get(key)
        if masks is None:
            masks = self.spreads[key] = _spread(node.shape, around)
        new = []
        for value, before, wanted in zip(node.values, around, masks, strict=True):
            if before == wanted:
                continue
            have = pending.get(value, before)  # a node may have a value twice
            held = _union(1 << a for axes in proposals[value] for a in axes)
            found = tuple([h | (w & ~held) for h, w in zip(have, wanted, strict=True)])
            if found != have:
                pending[value] = found
                new.append(value)
        return new

    def apply(self, index: int, node: _Node, changes: Iterable[_Change]) -> None:
        touched: dict[Value, None] = {}
        for change in changes:
            value = node.values[change.position]
            have = self.proposals[value]
            if len(have[change.dim]) >= len(change.axes):
                continue  # a value that the node has twice
            added = change.axes[len(have[change.dim]) :]
            if change.source == _RULE:
                place = node.loc.source
                reason = "specs of shard_map" + (f" at {place}" if place else "")
                origin = Origin(added, None, change.dim, reason, node.loc)
            else:
                source = node.values[change.source]
                origin = Origin(added, source, change.source_dim, node.label, node.loc)
            self.origins.setdefault((value, change.dim), []).append(origin)
            dims = (*have[: change.dim], change.axes, *have[change.dim + 1 :])
            self.proposals[value] = dims
            if value in self.pending:
                some = _union(self.pending[value]) & _union(1 << a for a in added)
                self.settled[value] = self.settled.get(value, 0) | some
            touched[value] = None
        for value in touched:
            for neighbour in self.touching[value]:
                if neighbour != index and neighbour not in self.queued:
                    self.queued.add(neighbour)
                    self.queues[self.nodes[neighbour].shape.reduces].append(neighbour)

    def note(self, index: int, node: _Node, flow: _Flow) -> None:
        for position, atom, dims in flow.disputed:
            self.blocked.add(index)
            self.dispute(node.values[position], atom, dims)
        for factor, claims in flow.conflicts:
            named = [(axes, node.values[position], dim) for axes, position, dim in claims]
            op = node.op or _tie_op(node)
            self.conflicts[index, factor] = Conflict(op, factor, tuple(dict.fromkeys(named)))
        for position, dim, axes in flow.undivided:
            self.undivided[node.values[position], dim] = axes

    def finish(self) -> Propagated:
        return Propagated(
            self.program,
            self.mesh,
            tuple(self.proposals),
            self.marks,
            self.cheap,
            {key: tuple(found) for key, found in self.origins.items()},
            tuple(self.conflicts[key] for key in sorted(self.conflicts)),
            dict(sorted(self.undivided.items())),
        )


# ---------------------------------------------------------------------------------------------
# One visit, as a pure function of the node's shape and the proposals around it.


def _flow(shape: _Shape, around: tuple[Proposal, ...], guess: bool, sizes: Sequence[int]) -> _Flow:
    """What flows through a node: claims on factors, merged, and projected back onto every dim."""
    claims = _claims(shape, around, sizes)
    if not claims:
        return _Flow((), (), (), ())
    assignment: list[Axes] = [()] * len(shape.rule.factors)
    source: dict[int, tuple[int, int]] = {}
    conflicts = []
    for factor, found in claims.items():
        axes, position, dim = max(found, key=lambda claim: len(claim[0]))
        agreed = _common_prefix(axes, found)
        if agreed != axes:
            conflicts.append((factor, tuple(found)))
        assignment[factor] = agreed
        source[factor] = (position, dim)
    changes: list[_Change] = []
    undivided: list[tuple[int, int, Axes]] = []
    disputed: list[_Dispute] = []
    for position, flags in enumerate(shape.flags):
        if flags is None:
            continue
        dims = shape.rule.values[position]
        wanted = []
        for d, own in enumerate(dims):
            axes = _wanted(around[position][d], own, flags[d], shape.rule, assignment, sizes)
            if flags[d] >= 0:
                kept = _dividing(axes, flags[d], sizes)
                if len(kept) < len(axes):
                    undivided.append((position, d, axes))
                    axes = max(kept, around[position][d], key=len)
            wanted.append(axes)
        more, stuck = _extensions(around[position], wanted, guess)
        disputed += [_Dispute(position, atom, dims) for atom, dims in stuck]
        for d, axes in more:
            fixed = shape.rule.factors[dims[d][0]].axes
            if len(around[position][d]) < len(fixed):
                changes.append(_Change(position, d, axes[: len(fixed)], _RULE, 0))
            if len(axes) > len(fixed):
                cause = next(source[f] for f in reversed(dims[d]) if f in source)
                changes.append(_Change(position, d, axes, *cause))
    return _Flow(tuple(changes), tuple(conflicts), tuple(undivided), tuple(disputed))


def _claims(
    shape: _Shape, around: tuple[Proposal, ...], sizes: Sequence[int]
) -> dict[int, list[tuple[Axes, int, int]]]:
    """Factor -> the (axes, position, dim) that want it split."""
    factors = shape.rule.factors
    found: dict[int, list[tuple[Axes, int, int]]] = {
        i: [(factor.axes, _RULE, 0)] for i, factor in enumerate(factors) if factor.kind == FIXED
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


def _spread(shape: _Shape, around: tuple[Masks, ...]) -> tuple[Masks, ...]:
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
        more = [m if f == CLOSED else _union([m, *[reach[x] for x in t]]) for m, f, t in dims]
        found.append(masks if flags is None else tuple(more))
    return tuple(found)


def _union(masks: Iterable[int]) -> int:
    """Every atom of some sets of atoms, a bit each."""
    return functools.reduce(operator.or_, masks, 0)


def _common_prefix(axes: Axes, claims: Iterable[tuple[Axes, int, int]]) -> Axes:
    """The part of the longest claim with which no other claim disagrees."""
    for other, _, _ in claims:
        pairs = enumerate(zip(axes, other, strict=False))
        axes = axes[: next((k for k, (a, b) in pairs if a != b), len(axes))]
    return axes


def _tie_op(node: _Node) -> Op:
    """Stands for a tie in a conflict: an op of the same name over the tied values."""
    return Op(OpKind(node.label, (), (), {}), node.values, (), (), node.loc)
