"""Propagation: axes flow from marks along factors until nothing changes.

Every value ends with a *proposal*: the axes that the marks suggest for each of its dims. The plan
reads proposals as wishes and is free to decide otherwise, except for marks.

Tie-breaks, all of them:
(1) ops that only pass dims through are settled before ops that reduce or read their neighbours;
(2) within a kind, first in program order, first operand before second, operands before results;
(3) where two dims of one value claim the same axis, neither gets it, through whatever op it comes,
until all else that must follow is settled; then the more major dim gets it, first op in program
order first;
(4) where two values disagree about one factor, their common part flows on and the conflict is
recorded for the planner.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import NamedTuple

from spmd.ir.control_flow import Index, ties
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import FIXED, MERGE, REDUCE, UNCLAIMED, WINDOW, Factor, Rule
from spmd.ir.program import Loc, Op, OpKind, Program, Value
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Mark, common_prefix
from spmd.propagation.projection import dim_to_factors, factors_to_dim

OPEN, CLOSED = -1, -2  # flags of a dim: it may be split further, or it is as a mark says
RULE = -1  # the source of axes that the rule itself fixes
Atoms = frozenset[int]
Proposal = tuple[Axes, ...]  # the axes of each dim of a value
_Claim = tuple[Axes, int, int]  # axes, and position and dim of the value that wants them


class Origin(NamedTuple):
    """Where some atoms of a dim came from: another value's dim, through an op, or a mark."""

    atoms: Axes
    value: Value | None  # where they came from, and its dim; None: a mark
    dim: int
    label: str  # the op that they came through, or the mark's reason
    loc: Loc = Loc()  # of that op

    @property
    def reason(self) -> str:
        """The origin as text: `through add at train.py:12 (step)`, or the mark's reason."""
        if self.value is None:
            return self.label
        source = self.loc.trail
        label = self.label.removeprefix("stablehlo.")
        return f"through {label}" + (f" at {source}" if source else "")


class Conflict(NamedTuple):
    """A factor of an op that its values want split differently; a claim: (axes, value, its dim)."""

    op: Op
    factor: int
    claims: tuple[tuple[Axes, Value, int], ...]


@dataclass(frozen=True, eq=False)
class Propagated:
    """The result of propagation: a program, with a proposal for every value."""

    program: Program
    mesh: Mesh
    proposals: tuple[Proposal, ...]
    marks: Mapping[Value, Mark]
    cheap: frozenset[Value]  # values that each use recomputes, without a proposal
    origins: Mapping[tuple[Value, int], tuple[Origin, ...]]  # of a dim's atoms, oldest first
    conflicts: tuple[Conflict, ...]  # factors that marks split differently, for the planner
    undivided: Mapping[tuple[Value, int], Axes]  # axes wanted that do not divide the dim

    @cached_property
    def index(self) -> Index:
        """The `Index` of the program: producers, users, trip counts, manual atoms."""
        return Index(self.program)

    def why(self, value: Value, dim: int, atom: int) -> tuple[str, ...]:
        """Returns why an atom splits a dim: reasons, from the nearest origin back to the mark."""
        return tuple([origin.reason for _, origin in self._chain(value, dim, atom)])

    def root(self, value: Value, dim: int, atom: int) -> Value | None:
        """Returns the value whose mark put an atom on a dim; None if no mark or `shard_map` did."""
        chain = list(self._chain(value, dim, atom))
        return chain[-1][0] if chain and chain[-1][1].value is None else None

    def _chain(self, value: Value, dim: int, atom: int) -> Iterator[tuple[Value, Origin]]:
        """Yields (value, origin of the atom there), from a value back to the mark."""
        at: Value | None = value
        while at is not None:
            origin = next((o for o in self.origins.get((at, dim), ()) if atom in o.atoms), None)
            if origin is None:
                return
            yield at, origin
            at, dim = origin.value, origin.dim


class _Node(NamedTuple):
    """What propagation visits: an op, or a tie of values sharded alike (as a loop's carry is)."""

    shape: "Shape"
    values: tuple[Value, ...]
    op: Op


def propagate(
    program: Program,
    mesh: Mesh,
    marks: Mapping[Value, Mark],
    cheap: frozenset[Value],
    links: Iterable[tuple[Value, Value]] = (),
) -> Propagated:
    """Returns a `Propagated`: the atoms that `marks` suggest for every dim of every value, and why.

    Marked dims keep their atoms; open ones may get more. `cheap` values (see `cheap_values`) get
    none and hand none on. `links` are pairs of values that should be sharded alike: a donated
    argument and its updated result.

    Raises:
      UnsupportedOpError: an op without a rule.
    """
    state = _State(program, mesh, marks, cheap)
    for op in program.walk():
        for tie in ties(op) if op.regions else ():
            source = () if tie.source is None else (tie.source,)
            state.add_tie((*source, *tie.inside, tie.result), op.loc, op.kind.name)
        if not (op.regions or (op.results and cheap.issuperset(op.results))):
            state.add(rule_of(op.kind, op.loc), op)
    for a, b in links:
        state.add_tie((a, b), Loc(), "the donated argument and its update")
    state.run()
    return Propagated(
        program,
        mesh,
        tuple(state.proposals),
        marks,
        cheap,
        {key: tuple(found) for key, found in state.origins.items()},
        tuple(state.conflicts[key] for key in sorted(state.conflicts)),
        dict(sorted(state.undivided.items())),
    )


class _State:
    def __init__(
        self, program: Program, mesh: Mesh, marks: Mapping[Value, Mark], cheap: frozenset[Value]
    ) -> None:
        self.program, self.mesh = program, mesh
        self.proposals: list[Proposal] = [((),) * t.rank for t in program.types]
        # For each value, the flags of its dims, as in `Shape`.
        self.flags: list[tuple[int, ...] | None] = [(OPEN,) * t.rank for t in program.types]
        for value in (*program.body.args, *program.body.results):
            self.flags[value] = program.types[value].shape
        for value, mark in marks.items():
            pairs = zip(self.flags[value] or (), mark.open, strict=True)
            self.flags[value] = tuple(flag if is_open else CLOSED for flag, is_open in pairs)
        for value in cheap:
            self.flags[value] = None
        self.nodes: list[_Node] = []  # every op and tie, in program order
        self.shapes: dict[tuple[int, tuple[tuple[int, ...] | None, ...]], Shape] = {}
        self.touching: list[list[int]] = [[] for _ in program.types]  # numbers of a value's nodes
        # Nodes to be visited: those that only pass dims through, and those that reduce.
        self.queues: tuple[deque[int], deque[int]] = (deque(), deque())
        self.queued: set[int] = set()
        self.blocked: set[int] = set()  # nodes that would do more if a dispute were settled
        self.any_pending = False
        # For each value, the atoms that may yet come to each dim (see `dispute`), and those that
        # were pending there and have come to one of its dims.
        self.pending: list[tuple[Atoms, ...]] = [(Atoms(),) * t.rank for t in program.types]
        self.settled: dict[Value, Atoms] = {}
        self.origins: dict[tuple[Value, int], list[Origin]] = {}
        self.conflicts: dict[tuple[int, int], Conflict] = {}
        self.undivided: dict[tuple[Value, int], Axes] = {}
        # Equal layers have equal shapes and proposals, so most visits repeat an earlier one.
        self.flow_through = cache(partial(flow_through, mesh.atom_sizes))
        self.spread_through = cache(spread_through)
        for value, mark in marks.items():
            self.proposals[value] = mark.dims
            for dim, axes in enumerate(mark.dims):
                if axes:
                    self.origins[value, dim] = [Origin(axes, None, dim, mark.reason)]

    def add_tie(self, values: tuple[Value, ...], loc: Loc, label: str) -> None:
        rule = tie_rule(len(values), self.program.types[values[-1]].shape)
        self.add(rule, Op(OpKind(label, (), (), {}), values, (), (), loc))

    def add(self, rule: Rule, op: Op) -> None:
        if not rule.factors or not self.mesh.atoms:
            return
        all_flags, values = self.flags, op.operands + op.results
        flags = tuple([all_flags[v] for v in values])
        shape = self.shapes.get((id(rule), flags))
        if shape is None:
            shape = self.shapes[id(rule), flags] = Shape(rule, flags)
        index = len(self.nodes)
        self.nodes.append(_Node(shape, values, op))
        for value in values:
            self.touching[value].append(index)
        self.enqueue(index)

    def enqueue(self, index: int) -> None:
        if index not in self.queued:
            self.queued.add(index)
            self.queues[self.nodes[index].shape.reduces].append(index)

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
        while first or second:
            index = (first or second).popleft()
            self.queued.discard(index)
            self.visit(index, False)

    def visit(self, index: int, guess: bool) -> bool:
        """Updates proposals by a node's `flow_through`; returns whether that has any changes."""
        node = self.nodes[index]
        proposals = self.proposals
        around = tuple([proposals[v] for v in node.values])
        changes, conflicts, undivided, disputed = self.flow_through(node.shape, around, guess)
        for position, atom, dims in disputed:
            self.blocked.add(index)
            self.dispute(node.values[position], atom, dims)
        for factor, claims in conflicts:
            named = [(axes, node.values[position], dim) for axes, position, dim in claims]
            self.conflicts[index, factor] = Conflict(node.op, factor, tuple(dict.fromkeys(named)))
        for position, dim, axes in undivided:
            self.undivided[node.values[position], dim] = axes
        loc = node.op.loc
        for place, dim, axes, giver, giver_dim in changes:
            value = node.values[place]
            have, pending = proposals[value], self.pending[value]
            if self.any_pending and not guess:
                # The change ends before the first atom that another dim may still get.
                others = Atoms().union(*pending[:dim], *pending[dim + 1 :])
                rivals = others - self.settled.get(node.values[giver], Atoms())
                fresh = enumerate(axes[len(have[dim]) :], len(have[dim]))
                length = next((k for k, a in fresh if a in rivals), len(axes))
                if length < len(axes):
                    self.blocked.add(index)
                    axes = axes[:length]
            added = axes[len(have[dim]) :]
            elsewhere = {a for d, own in enumerate(have) if d != dim for a in own}
            if not added or not elsewhere.isdisjoint(added):
                continue  # a value that the node has twice: the first of them counts
            if giver == RULE:
                reason = "specs of shard_map" + (f" at {loc.source}" if loc.source else "")
                origin = Origin(added, None, dim, reason, loc)
            else:
                origin = Origin(added, node.values[giver], giver_dim, node.op.kind.name, loc)
            self.origins.setdefault((value, dim), []).append(origin)
            proposals[value] = (*have[:dim], axes, *have[dim + 1 :])
            if self.any_pending:
                came = Atoms().union(*pending).intersection(added)
                self.settled[value] = self.settled.get(value, Atoms()) | came
            for neighbour in self.touching[value]:
                if neighbour != index:
                    self.enqueue(neighbour)
        return bool(changes)

    def dispute(self, value: Value, atom: int, dims: tuple[int, int]) -> None:
        """Records that two dims of a value claim an atom, and which dims may get it later.

        The invariant: while a dispute is open, no other dim takes the atom from a dim that may get
        it once the dispute is settled. So `pending` holds, for every dim of every value, the atoms
        that may yet come to it, spread along the factors as the atoms themselves would be.

        Trace, `h = x @ w` with `x: [{data}, {}]` and `w: [{}, {data}]`, then `tanh(h) @ v` with
        `v: [{}, {data}]`:
          h's rows (from x) and columns (from w) claim `data`: a dispute, h gets nothing for now.
          Pending: `data` on both dims of h, of tanh(h), and on the rows of the second product.
          v's columns bring `data` to those of the second product: its rows may get it yet, so its
          columns don't for now. When nothing else changes h's rows win, being more major, and so
          all the rows are split over `data`, as the batch, and v's columns are gathered instead.
        Without `pending` the columns of the second product would have taken `data` at once, since
        no other dim claims it there, and the batch could not have been split.
        """
        have = self.pending[value]
        found = tuple(atoms | {atom} if d in dims else atoms for d, atoms in enumerate(have))
        if found == have:
            return
        pending, self.any_pending = self.pending, True
        pending[value] = found
        waiting = deque(self.touching[value])
        while waiting:
            node = self.nodes[waiting.popleft()]
            spread = self.spread_through(node.shape, tuple([pending[v] for v in node.values]))
            for v, wanted in zip(node.values, spread, strict=True):
                taken, have = set().union(*self.proposals[v]), pending[v]
                found = tuple([h | (w - taken) for h, w in zip(have, wanted, strict=True)])
                if found != have:
                    pending[v] = found
                    waiting.extend(self.touching[v])


@lru_cache(maxsize=1 << 12)
def tie_rule(count: int, shape: tuple[int, ...]) -> Rule:
    """Returns the rule of `count` values of one shape that are split alike."""
    dims = tuple((i,) for i in range(len(shape)))
    return Rule((dims,) * (count - 1), (dims,), tuple(Factor(size) for size in shape))


# What flows through one op when the propagation visits it: a pure function of the op's shape and
# the proposals around it, so that ops that are alike share it.


@dataclass(frozen=True, eq=False)
class Shape:
    """The rule of a node, and which dims may be split further; nodes that are alike share it.

    It is compared by identity, as the key of a cache: hashing a rule is slow.
    """

    rule: Rule
    # For each value and dim, `OPEN`, `CLOSED`, or the size of a dim at the boundary, where axes
    # must divide it; None for a cheap value.
    flags: tuple[tuple[int, ...] | None, ...]

    @cached_property
    def reduces(self) -> bool:
        """Whether the rule has a `reduce`, `merge` or `window` factor, split or not."""
        return any(factor.kind in (MERGE, REDUCE, WINDOW) for factor in self.rule.factors)


Change = tuple[int, int, Axes, int, int]
"""Number of a node's value, its dim, and the axes that this gets, its old ones and more behind;
number and dim of the value that they come from, or `RULE` and 0."""


class Flow(NamedTuple):
    """The result of `flow_through`: changes of dims, conflicts, uneven axes, and disputes."""

    changes: Sequence[Change] = ()
    conflicts: Sequence[tuple[int, Sequence[_Claim]]] = ()  # factors that claims split differently
    undivided: Sequence[tuple[int, int, Axes]] = ()  # boundary dims, and axes that do not divide
    # Atoms that two dims of a value claim: its position, the atom, and the dims.
    disputed: Sequence[tuple[int, int, tuple[int, int]]] = ()


def flow_through(
    sizes: Sequence[int], shape: Shape, around: tuple[Proposal, ...], guess: bool
) -> Flow:
    """Returns how a node's rule changes the proposals of the node's values, and where they clash.

    `around` are these proposals, `sizes` the sizes of atoms. Each dim's axes claim its factors, and
    all dims with a factor want its axes. Of two dims of a value that want an atom the more major
    one gets it with `guess`, else neither.
    """
    # Trace, `b i k, k j -> i j` with the first operand [{x}, {}], the second [{}, {y}]:
    #   claims    i: {x} by dim 0 of the first, j: {y} by dim 1 of the second
    #   wanted    the result's dims want {x} and {y}; nothing new for the operands
    #   changes   the result gets {x}, from the first operand, and {y}, from the second
    # Were the second operand [{}, {x}] both dims of the result would claim x: a dispute.
    rule, factors = shape.rule, shape.rule.factors
    claims: dict[int, list[_Claim]] = {
        i: [(factor.axes, RULE, 0)] for i, factor in enumerate(factors) if factor.kind == FIXED
    }
    for position, (flags, have) in enumerate(zip(shape.flags, around, strict=True)):
        for d, axes in enumerate(have if flags is not None else ()):
            dim = rule.values[position][d]
            for f, part in dim_to_factors(axes, dim, rule, sizes) if axes else ():
                claims.setdefault(f, []).append((part, position, d))
    if not claims:
        return Flow()
    merged: dict[int, _Claim] = {}
    conflicts: list[tuple[int, Sequence[_Claim]]] = []
    for f, found in claims.items():
        # The longest claim on a factor, up to where another one disagrees with it.
        longest, position, d = max(found, key=lambda claim: len(claim[0]))
        agreed = longest
        for other, _, _ in found:
            if agreed[: len(other)] != other:
                agreed = common_prefix(agreed, other)
        merged[f] = agreed, position, d
        if agreed != longest:
            conflicts.append((f, found))
    assignment = [merged[f][0] if f in merged else () for f in range(len(factors))]
    changes: list[Change] = []
    undivided: list[tuple[int, int, Axes]] = []
    disputed: list[tuple[int, int, tuple[int, int]]] = []
    for position, (flags, have) in enumerate(zip(shape.flags, around, strict=True)):
        if flags is None:
            continue
        wanted = []
        for d, (dim, flag) in enumerate(zip(rule.values[position], flags, strict=True)):
            # What the dim's factors want if they extend what it has, and a mark has not fixed it.
            own, more = have[d], factors_to_dim(dim, assignment, factors, sizes) or ()
            is_longer = flag != CLOSED and len(more) > len(own) and more[: len(own)] == own
            if not is_longer or (len(dim) > 1 and len(set(more)) < len(more)):
                more = own  # nothing new, or two of its factors are split alike
            kept = more
            while flag >= 0 and flag % math.prod([sizes[a] for a in kept]):
                kept = kept[:-1]
            if len(kept) < len(more):
                undivided.append((position, d, more))
                kept = max(kept, own, key=len)
            wanted.append(kept)
        longer, stuck = _extensions(have, wanted, guess)
        disputed += [(position, atom, dims) for atom, dims in stuck]
        for d, axes in longer:  # first what the rule fixes of them, then what its factors want
            dim = rule.values[position][d]
            fixed = factors[dim[0]].axes
            if len(have[d]) < len(fixed):
                changes.append((position, d, axes[: len(fixed)], RULE, 0))
            if len(axes) > len(fixed):
                _, giver, giver_dim = next(merged[f] for f in reversed(dim) if f in merged)
                changes.append((position, d, axes, giver, giver_dim))
    return Flow(changes, conflicts, undivided, disputed)


def _extensions(
    current: Proposal, wanted: Sequence[Axes], guess: bool
) -> tuple[list[tuple[int, Axes]], list[tuple[int, tuple[int, int]]]]:
    """Returns two lists: (dim, longer axes) of one value, and (atom, two dims that want it)."""
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


def spread_through(
    shape: Shape, around: tuple[tuple[Atoms, ...], ...]
) -> tuple[tuple[Atoms, ...], ...]:
    """Returns for each dim of a node's values the atoms that it may get yet, through its factors.

    `around` has those known so far.
    """
    factors = shape.rule.factors
    reach: list[Atoms] = [Atoms()] * len(factors)
    for known, dims in zip(around, shape.rule.values, strict=True):
        for atoms, dim in zip(known, dims, strict=True):
            for factor in dim:
                if factors[factor].kind not in UNCLAIMED:
                    reach[factor] |= atoms
    return tuple(
        known
        if flags is None
        else tuple(
            atoms if flag == CLOSED else atoms.union(*[reach[f] for f in dim])
            for atoms, flag, dim in zip(known, flags, dims, strict=True)
        )
        for known, flags, dims in zip(around, shape.flags, shape.rule.values, strict=True)
    )
