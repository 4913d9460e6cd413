"""Propagation: axes flow from marks along factors until nothing changes.

Every value ends with a *proposal*: the axes that the marks suggest for each of its dims. The plan
reads proposals as wishes and is free to decide otherwise, except for marks.

Tie-breaks, all of them: (1) ops that only pass dims through are settled before ops that reduce;
(2) within a kind, first in program order, first operand before second, operands before results;
(3) where two dims of one value claim the same axis, neither gets it, until everything that
follows by necessity is settled; then the more major dim gets it, first op in program order first;
(4) where two values disagree about one factor, their common part flows on and the conflict is
recorded for the planner.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import ties
from spmd.ir.program import Loc, Op, Program, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Mark
from spmd.propagation.projection import dim_to_factors, factors_to_dim
from spmd.propagation.registry import rule_of
from spmd.propagation.rule import REDUCE, REPLICATE, Factor, Rule


class Origin(NamedTuple):
    """Why a dim has some of its atoms: from a neighbouring value's dim, or from a mark."""

    atoms: Axes
    value: Value | None
    dim: int
    reason: str


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
        chain: list[str] = []
        at: Value | None = value
        while at is not None:
            origin = next((o for o in self.origins.get((at, dim), ()) if atom in o.atoms), None)
            if origin is None:
                break
            chain.append(origin.reason)
            at, dim = origin.value, origin.dim
        return tuple(chain)


class _Node(NamedTuple):
    """An op, or a tie of values that are one, as the propagation sees it."""

    rule: Rule
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
        self.boundary = {*program.body.args, *program.body.results}
        self.proposals: list[list[Axes]] = [[()] * t.rank for t in program.types]
        self.closed: set[tuple[Value, int]] = set()
        self.origins: dict[tuple[Value, int], list[Origin]] = {}
        self.nodes: list[_Node] = []
        self.touching: list[list[int]] = [[] for _ in program.types]
        self.conflicts: dict[tuple[int, int], Conflict] = {}
        self.undivided: dict[tuple[Value, int], Axes] = {}
        self.blocked: set[int] = set()
        self.queues: tuple[deque[int], deque[int]] = (deque(), deque())
        self.queued: set[int] = set()
        for value, mark in marks.items():
            for dim, axes in enumerate(mark.dims):
                self.proposals[value][dim] = axes
                if not mark.open[dim]:
                    self.closed.add((value, dim))
                if axes:
                    self.origins[value, dim] = [Origin(axes, None, dim, mark.reason)]

    # Building the graph.

    def add_op(self, op: Op) -> None:
        if op.regions:
            for tie in ties(op):
                values = (*tie.inside, tie.result)
                if tie.source is not None:
                    values = (tie.source, *values)
                self.add_tie(values, op.loc, op.name)
            return
        values = op.operands + op.results
        if all(v in self.cheap for v in op.results):
            return
        self.add(_Node(rule_of(op.kind, op.loc), values, op, op.loc, op.name))

    def add_tie(self, values: tuple[Value, ...], loc: Loc, label: str) -> None:
        shape = self.program.types[values[-1]].shape
        dims = tuple((i,) for i in range(len(shape)))
        rule = Rule((dims,) * (len(values) - 1), (dims,), tuple(Factor(n) for n in shape))
        self.add(_Node(rule, values, None, loc, label))

    def add(self, node: _Node) -> None:
        if not node.rule.factors or len(self.mesh.atoms) == 0:
            return
        index = len(self.nodes)
        self.nodes.append(node)
        for value in dict.fromkeys(node.values):
            self.touching[value].append(index)
        self.enqueue(index)

    def enqueue(self, index: int) -> None:
        if index not in self.queued:
            self.queued.add(index)
            reduces = any(f.kind == REDUCE for f in self.nodes[index].rule.factors)
            self.queues[reduces].append(index)

    # The fixed point.

    def run(self) -> None:
        self.drain()
        progress = True
        while progress:
            progress = False
            for index in sorted(self.blocked):
                self.blocked.discard(index)
                if self.visit(index, guess=True):
                    progress = True
                    self.drain()

    def drain(self) -> None:
        first, second = self.queues
        while first or second:
            index = (first or second).popleft()
            self.queued.discard(index)
            self.visit(index, guess=False)

    def visit(self, index: int, guess: bool) -> bool:
        """Lets axes flow through one node; returns whether anything changed."""
        node = self.nodes[index]
        claims = self.claims(node)
        if not claims:
            return False
        assignment: list[Axes] = [()] * len(node.rule.factors)
        source: dict[int, tuple[Value, int]] = {}
        for factor, found in claims.items():
            axes, value, dim = max(found, key=lambda claim: len(claim[0]))
            agreed = _common_prefix(axes, found)
            if agreed != axes:
                self.conflicts[index, factor] = Conflict(
                    node.op or _tie_op(node), factor, tuple(dict.fromkeys(found))
                )
            assignment[factor] = agreed
            source[factor] = (value, dim)
        changed = False
        for value, dims in zip(node.values, node.rule.values, strict=True):
            if value not in self.cheap:
                changed |= self.update(index, node, value, dims, assignment, source, guess)
        return changed

    def claims(self, node: _Node) -> dict[int, list[tuple[Axes, Value, int]]]:
        """Factor -> the (axes, value, dim) that want it split."""
        found: dict[int, list[tuple[Axes, Value, int]]] = {}
        factors = node.rule.factors
        for value, dims in zip(node.values, node.rule.values, strict=True):
            if value in self.cheap:
                continue
            for d, axes in enumerate(self.proposals[value]):
                if not axes:
                    continue
                for factor, part in dim_to_factors(axes, dims[d], factors, self.sizes):
                    if part and factors[factor].kind != REPLICATE:
                        found.setdefault(factor, []).append((part, value, d))
        return found

    def update(
        self,
        index: int,
        node: _Node,
        value: Value,
        dims: Sequence[tuple[int, ...]],
        assignment: Sequence[Axes],
        source: Mapping[int, tuple[Value, int]],
        guess: bool,
    ) -> bool:
        """Extends one value's proposal by what its factors say; returns whether it changed."""
        current = self.proposals[value]
        wanted = [
            self.wanted(value, d, dim, assignment, node.rule.factors) for d, dim in enumerate(dims)
        ]
        changed = False
        for d, axes in enumerate(wanted):
            have = current[d]
            if len(axes) <= len(have):
                continue
            taken = {a for e, other in enumerate(current) if e != d for a in other}
            if not guess:
                taken |= {a for e, other in enumerate(wanted) if e != d for a in other}
            else:
                taken |= {a for e, other in enumerate(wanted) if e < d for a in other}
            clash = next((k for k, a in enumerate(axes) if k >= len(have) and a in taken), None)
            if clash is not None:
                held = {a for e, other in enumerate(current) if e != d for a in other}
                if axes[clash] not in held:
                    self.blocked.add(index)
                axes = axes[:clash]
            if len(axes) > len(have):
                self.extend(node, value, d, axes, dims[d], source)
                changed = True
        if changed:
            for neighbour in self.touching[value]:
                if neighbour != index:
                    self.enqueue(neighbour)
        return changed

    def wanted(
        self,
        value: Value,
        d: int,
        dim: tuple[int, ...],
        assignment: Sequence[Axes],
        factors: Sequence[Factor],
    ) -> Axes:
        """What the factors want for one dim: an extension of what it has.

        At the boundary only as much of it as divides the dim.
        """
        have = self.proposals[value][d]
        if (value, d) in self.closed:
            return have
        axes = factors_to_dim(dim, assignment, factors, self.sizes)
        if axes is None or axes[: len(have)] != have:
            return have
        if value not in self.boundary:
            return axes if len(axes) > len(have) else have
        size = self.program.types[value].shape[d]
        if size % math.prod(self.sizes[a] for a in axes):
            self.undivided[value, d] = axes
        while size % math.prod(self.sizes[a] for a in axes):
            axes = axes[:-1]
        return axes if len(axes) > len(have) else have

    def extend(
        self,
        node: _Node,
        value: Value,
        d: int,
        axes: Axes,
        dim: tuple[int, ...],
        source: Mapping[int, tuple[Value, int]],
    ) -> None:
        added = axes[len(self.proposals[value][d]) :]
        cause = next(source[f] for f in reversed(dim) if f in source)
        reason = f"through {node.label}" + (f" at {node.loc.source}" if node.loc.source else "")
        self.origins.setdefault((value, d), []).append(Origin(added, *cause, reason))
        self.proposals[value][d] = axes

    def finish(self) -> Propagated:
        return Propagated(
            self.program,
            self.mesh,
            tuple(tuple(dims) for dims in self.proposals),
            self.marks,
            self.cheap,
            {key: tuple(found) for key, found in self.origins.items()},
            tuple(self.conflicts[key] for key in sorted(self.conflicts)),
            dict(sorted(self.undivided.items())),
        )


def _common_prefix(axes: Axes, claims: Iterable[tuple[Axes, Value, int]]) -> Axes:
    """The part of the longest claim with which no other claim disagrees."""
    for other, _, _ in claims:
        pairs = enumerate(zip(axes, other, strict=False))
        axes = axes[: next((k for k, (a, b) in pairs if a != b), len(axes))]
    return axes


def _tie_op(node: _Node) -> Op:
    """Stands for a tie in a conflict: an op of the same name over the tied values."""
    from spmd.ir.program import OpKind

    return Op(OpKind(node.label, (), (), {}), node.values, (), (), node.loc)
