"""Rewrite for TPUs: permutes that overlap with a product take the place of its reduce-scatter.

before: `%2 = dot %0, %1; %3 = reduce_scatter %2 {data} dim=0`
after, four devices, of which this is the d-th; piece i is the i-th quarter of `%0`:
        `%4 = dot piece[d-1], %1; %5 = collective_permute %4 {data}` (to the next device)
        `%6 = dot piece[d-2], %1; %7 = add %5, %6; %8 = collective_permute %7 {data}`
        `%9 = dot piece[d-3], %1; ...; %3 = add %11, dot piece[d], %1`

The TPU compiler waits for every reduce-scatter, and for no permute: each is under way while the
next piece is multiplied. But operands that are read whole are read once for each piece, and every
step has its latency. So a sum is taken apart where that is predicted to be faster. What elementwise
ops make of products on the way to the sum is made piece by piece, too. Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition in Large Deep Learning Models".

Over a whole slice, whose devices jax puts in an order in which each is next to the one before it,
pieces go round both ways at once, half of the way each: the fifth of eight devices gets the terms
of 1 to 4 from one side, and those of 6 to 8 from the other. The compiler makes an all-reduce of
such a sum, and waits for it. Where a plan scatters in two steps, they may travel as one sum. Sums
among more than `MOST_DEVICES` of a slice stay: neighbours in that ring are no neighbours in the
torus.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

from spmd.ir.control_flow import users_of
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import PASS
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops, remove_dead
from spmd.ir.types import TensorType
from spmd.lowering.local.dims import dynamic_take_dim, to_next
from spmd.lowering.partition import HELD
from spmd.lowering.rewrites.simplify import again, operand_dims, pieces_of
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology
from spmd.predict.timeline import predict_timeline
from spmd.reshard.comm import collective_seconds

MOST_DEVICES = 8
"""Among more devices sums are left to the compiler, but for those over a whole slice."""

TIE = 0.98
"""Two steps travel as one sum if that saves about as much: what travels is also hidden by products
that are not weighed here, a step that stays is waited for."""


def ring(program: Program, mesh: Mesh, topology: Topology) -> Program:
    """Replaces reduce-scatters of products by permutes of pieces, on TPUs where it is faster."""
    # A permute is an exchange among all of the mesh: not where devices go different ways.
    if topology.platform != "tpu" or any(HELD in op.kind.attrs for op in program.walk()):
        return program
    slow = {a for a, link in enumerate(topology.atom_links(mesh)) if link == topology.chip.dcn}
    users = users_of(program)
    found: dict[Value, _Sum] = {}
    known: dict[object, float] = {}  # equal sums of equal products, as of layers, are weighed once

    def is_near(axes: Axes) -> bool:
        near = 1 < mesh.extent(axes) <= MOST_DEVICES or _is_whole(axes, mesh, topology)
        return near and slow.isdisjoint(axes)

    def gain(sum_: _Sum) -> float:
        key = (*(scatter.kind for scatter in sum_.scatters), sum_.term.form(program))
        if key not in known:
            known[key] = _seconds_less(program, sum_, mesh, topology)
        return known[key]

    def visit(region: Region) -> None:
        made = {v: op for op in region.ops for v in op.results if len(users.get(v, ())) == 1}
        for op in region.ops:
            for inner in op.regions:
                visit(inner)
            chain = _scatters(op, made)
            # A scatter that another one follows is weighed by itself, too; one alone is a chain.
            one, joined = (_sum(scatters, made) for scatters in (chain[-1:], chain))
            if one and is_near(one.axes) and gain(one) > 0:
                found[op.results[0]] = one
            if joined and is_near(joined.axes):
                apart = [found[s.results[0]] for s in chain if s.results[0] in found]
                if gain(joined) > TIE * sum(map(gain, apart)):
                    found[op.results[0]] = joined

    visit(program.body)

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value]:
        sum_ = found[op.results[0]]
        ways = 2 if _is_whole(sum_.axes, mesh, topology) else 1
        return (_in_pieces(b, op, sum_, now, mesh, ways),)

    return remove_dead(edit_ops(program, edit, found)) if found else program


class _Sum(NamedTuple):
    """A sum to take apart: reduce-scatters, each of which reads the one before, and its term."""

    scatters: tuple[Op, ...]
    term: _Term

    @property
    def axes(self) -> Axes:
        """The axes of all its reduce-scatters, in the order in which they split the dim."""
        return tuple(a for scatter in self.scatters for a in scatter.kind.attrs["axes"])


def _scatters(op: Op, made: Mapping[Value, Op]) -> tuple[Op, ...]:
    """Returns the reduce-scatters along one dim that end in `op`, each read by the next alone."""
    if op.collective != "reduce_scatter":
        return ()
    (before,) = (made.get(v) for v in op.operands)
    own = op.kind.attrs["scatter_dimension"], op.kind.attrs["body"]
    if before is None or before.collective != "reduce_scatter":
        return (op,)
    is_same = own == (before.kind.attrs["scatter_dimension"], before.kind.attrs["body"])
    return (*_scatters(before, made), op) if is_same else (op,)


def _sum(scatters: Sequence[Op], made: Mapping[Value, Op]) -> _Sum | None:
    """Returns reduce-scatters and what they sum, if that is made of a product; else None."""
    if not scatters:
        return None
    first, last = scatters[0], scatters[-1]
    count, dim = math.prod(map(pieces_of, scatters)), last.kind.attrs["scatter_dimension"]
    term = _term(first.operands[0], dim, count, made)
    is_sum = last.kind.attrs["body"] == reducer_body("add", last.kind.results[0].dtype)
    has_product = any(t.op and t.op.kind.about.flops is not None for t in term.walk())
    return _Sum(tuple(scatters), term) if is_sum and has_product else None


def _seconds_less(program: Program, sum_: _Sum, mesh: Mesh, topology: Topology) -> float:
    """Returns the seconds that are saved if a sum is taken apart, its product included.

    A step takes as long as the piece that is made, with what it reads and its addition, or as the
    one that travels meanwhile, whichever is longer.
    """
    (*_, scatter), term, axes = *sum_, sum_.axes
    (type_,) = scatter.kind.results
    count = mesh.extent(axes)
    inputs = tuple(dict.fromkeys(t.value for t in term.walk() if t.op is None))

    def seconds(args: Sequence[Value], ops: Sequence[Op], result: Value, b: Builder) -> float:
        body = Region((*inputs, *args), tuple(ops), (result,))
        alone = program._replace(body=body, types=tuple(b.types))
        return predict_timeline(alone, mesh, topology).seconds

    b = Builder(program.types)
    whole_ops = [t.op for t in term.walk() if t.op is not None]
    whole = seconds((), (*whole_ops, *sum_.scatters), scatter.results[0], b)
    number, arrived = b.value(TensorType((), "i32")), b.value(type_)
    b.begin()
    total = b.binary("add", arrived, _piece(b, term, number, count, lambda value: value))
    made = seconds((number, arrived), b.end((), ()).ops, total, b)
    sizes = type_.bytes, type_.bytes
    travels = collective_seconds("collective_permute", axes, *sizes, mesh, topology)
    return whole - count * max(made, travels)


def _is_whole(axes: Axes, mesh: Mesh, topology: Topology) -> bool:
    """Whether axes span a whole slice, in the order in which its devices are neighbours."""
    return mesh.extent(axes) == topology.count and list(axes) == sorted(axes)


class _Term(NamedTuple):
    """What a device adds to a sum, or an operand of that, computed in pieces along `dim`."""

    value: Value
    dim: int | None  # the dim that is taken apart; None of what is read whole
    # makes a piece of it of its operands' pieces; None where pieces are cut out of it
    op: Op | None = None
    operands: tuple[_Term, ...] = ()

    def walk(self) -> Iterator[_Term]:
        for operand in self.operands:
            yield from operand.walk()
        yield self

    def form(self, program: Program) -> object:
        """Returns what its time depends on: ops and types, not the numbers of values."""
        made = self.op.kind if self.op else program.types[self.value]
        return made, self.dim, tuple(operand.form(program) for operand in self.operands)


def _term(value: Value, dim: int, count: int, made: Mapping[Value, Op]) -> _Term:
    """Returns how to make pieces of a value along a dim; `made` has those that are read once."""
    op = made.get(value)
    if op is None:
        return _Term(value, dim)
    # A product of matrices or images is the same op on a piece; a kernel takes its own shapes.
    if op.kind.about.reads:
        rule = rule_of(op.kind)
        factors = rule.results[0][dim]
        passes = len(factors) == 1 and rule.factors[factors[0]].kind == PASS
        if passes and not rule.reads and not rule.merges:
            cut = [dims.index(factors) if factors in dims else None for dims in rule.operands]
            operands = tuple(_Term(v, d) for v, d in zip(op.operands, cut, strict=True))
            if any(d is not None for d in cut):
                return _Term(value, dim, op, operands)
    inner = operand_dims(op.kind, dim, count)
    if inner is None:
        return _Term(value, dim)
    operands = tuple(
        _Term(v, None) if d is None else _term(v, d, count, made)
        for v, d in zip(op.operands, inner, strict=True)
    )
    return _Term(value, dim, op, operands)


def _in_pieces(b: Builder, op: Op, sum_: _Sum, now: Now, mesh: Mesh, ways: int) -> Value:
    axes, term, (type_,) = sum_.axes, sum_.term, op.kind.results
    count, own = mesh.extent(axes), b.axis_index(axes)

    def own_term(place: int) -> Value:
        number = b.binary("add", own, b.constant(place % count, "i32"))
        number = b.binary("remainder", number, b.constant(count, "i32"))
        return _piece(b, term, number, count, now)

    # A piece begins farthest from its owner, and each device on its way adds a term.
    far = {1: count - 1} if ways == 1 else {1: count // 2, -1: count - 1 - count // 2}
    total: dict[int, Value] = {}
    for left in range(max(far.values()), 0, -1):
        for way in [way for way in far if left <= far[way]]:
            b.loc = op.loc._replace(note=f"{op.loc.note} ({left} from its device)".strip())
            more = own_term(way * left)
            sent = b.binary("add", total[way], more) if way in total else more
            pairs = to_next(axes, mesh, way)
            total[way] = b.collective("collective_permute", sent, type_, axes, pairs=pairs)
    b.loc = op.loc
    return reduce(partial(b.binary, "add"), [*total.values(), own_term(0)])


def _piece(b: Builder, term: _Term, number: Value, count: int, now: Now) -> Value:
    """Appends piece `number` of `count` of a term; all of it if it is read whole."""
    if term.op is not None and term.dim is not None:
        operands = [_piece(b, operand, number, count, now) for operand in term.operands]
        return again(b, term.op, operands, term.op.kind.results[0].scaled(term.dim, 1, count))
    value = now(term.value)
    if term.dim is None:
        return value
    size = b.types[value].shape[term.dim] // count
    start = b.binary("multiply", number, b.constant(size, "i32"))
    return dynamic_take_dim(b, value, term.dim, start, size)
