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

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from spmd.ir.control_flow import ties
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import MERGE, REDUCE, WINDOW, Factor, Rule
from spmd.ir.program import Loc, Op, OpKind, Program, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Mark
from spmd.propagation.flow import (
    CLOSED,
    OPEN,
    RULE,
    Change,
    Flow,
    Masks,
    Proposal,
    Shape,
    flow_through,
    spread_through,
    union,
)
from spmd.propagation.propagated import Conflict, Origin, Propagated


class _Node(NamedTuple):
    """An op, or a tie of values that are one, as the propagation sees it."""

    shape: Shape
    values: tuple[Value, ...]
    op: Op | None
    loc: Loc
    label: str


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
        self.shapes: dict[tuple[int, tuple[tuple[int, ...] | None, ...]], Shape] = {}
        self.tie_rules: dict[tuple[int, tuple[int, ...]], Rule] = {}
        self.flows: dict[tuple[int, tuple[Proposal, ...], bool], Flow] = {}
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
            shape = self.shapes[key] = Shape(rule, flags, reduces)
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
            flow = self.flows[key] = flow_through(node.shape, around, guess, self.sizes)
        if flow.conflicts or flow.undivided or flow.disputed:
            self.note(index, node, flow)
        changes = flow.changes
        if changes and self.pending and not guess:
            changes = self.undisputed(index, node, changes)
        if changes:
            self.apply(index, node, changes)
        return bool(changes)

    def undisputed(self, index: int, node: _Node, changes: Iterable[Change]) -> tuple[Change, ...]:
        """Changes up to the first atom that another dim may get yet, unless that is settled."""
        kept = []
        for change in changes:
            value, source = node.values[change.position], node.values[change.source]
            pending = self.pending.get(value, ())
            rivals = union(mask for d, mask in enumerate(pending) if d != change.dim)
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

        The invariant: while a dispute is open, no other dim takes the atom from a dim that may get
        it once the dispute is settled. So `pending` holds, for every dim of every value, the atoms
        that may yet come to it, spread along the factors as the atoms themselves would be.

        Trace, `h = x @ w` with `x: [{data}, {}]` and `w: [{}, {data}]`, then `tanh(h) @ v` with
        `v: [{}, {data}]`:
          h's rows (from x) and columns (from w) claim `data`: a dispute, h gets nothing for now.
          Pending: `data` on both dims of h, of tanh(h), and on the rows of the second product.
          v offers `data` to the columns of the second product: its rows may get it yet, so this
          waits, too. When nothing else moves the rows of h win, being more major, and so
          all the rows are split over `data`, as the batch, and v's columns are gathered instead.
        Without `pending` the columns of the second product would have taken `data` at once,
        because v meets no resistance, and the batch could not have followed.
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
            masks = self.spreads[key] = spread_through(node.shape, around)
        new = []
        for value, before, wanted in zip(node.values, around, masks, strict=True):
            if before == wanted:
                continue
            have = pending.get(value, before)  # a node may have a value twice
            held = union(1 << a for axes in proposals[value] for a in axes)
            found = tuple([h | (w & ~held) for h, w in zip(have, wanted, strict=True)])
            if found != have:
                pending[value] = found
                new.append(value)
        return new

    def apply(self, index: int, node: _Node, changes: Iterable[Change]) -> None:
        touched: dict[Value, None] = {}
        for change in changes:
            value = node.values[change.position]
            have = self.proposals[value]
            if len(have[change.dim]) >= len(change.axes):
                continue  # a value that the node has twice
            added = change.axes[len(have[change.dim]) :]
            if change.source == RULE:
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
                some = union(self.pending[value]) & union(1 << a for a in added)
                self.settled[value] = self.settled.get(value, 0) | some
            touched[value] = None
        for value in touched:
            for neighbour in self.touching[value]:
                if neighbour != index and neighbour not in self.queued:
                    self.queued.add(neighbour)
                    self.queues[self.nodes[neighbour].shape.reduces].append(neighbour)

    def note(self, index: int, node: _Node, flow: Flow) -> None:
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


def _tie_op(node: _Node) -> Op:
    """Stands for a tie in a conflict: an op of the same name over the tied values."""
    return Op(OpKind(node.label, (), (), {}), node.values, (), (), node.loc)
