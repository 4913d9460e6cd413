"""Rewrite for TPUs: a product's reduce-scatter becomes permutes, which overlap with the product.

before: `%2 = dot %0, %1; %3 = reduce_scatter %2 {data} dim=0`
after, four devices, of which this is the d-th; piece i is the i-th quarter of `%0`:
        `%4 = dot piece[d-1], %1; %5 = collective_permute %4 {data}` (to the next device)
        `%6 = dot piece[d-2], %1; %7 = add %5, %6; %8 = collective_permute %7 {data}`
        `%9 = dot piece[d-3], %1; ...; %3 = add %11, dot piece[d], %1`

On TPUs a reduce-scatter blocks, but a permute is asynchronous: it runs while the next piece is
multiplied. On the other hand `%1` is read again for each piece, and every step has its latency. So
this is done where it is predicted to be faster. Elementwise ops between the product and the
reduce-scatter are done piece by piece, too. Wang et al. 2023, "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models".

jax orders the devices of a whole slice so that each is next to the one before it. Over all of them
pieces are sent both ways round the ring at once, half of the way each: the fifth of eight devices
gets the terms of 1 to 4 from one side, and those of 6 to 8 from the other. Two reduce-scatters in a
row may become one ring. Those over more than `MOST_DEVICES` devices, but not over a whole slice,
stay: consecutive devices of such a ring are not next to each other in the torus.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

from spmd.ir.control_flow import Index
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import PASS
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops, remove_dead
from spmd.ir.types import TensorType
from spmd.lowering.local.dims import dynamic_take_dim, to_next
from spmd.lowering.partition import HELD
from spmd.lowering.rewrites.schedule import pieces_of
from spmd.lowering.rewrites.slices import operand_dim
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology
from spmd.predict.timeline import predict_timeline
from spmd.reshard.comm import collective_seconds

MOST_DEVICES = 8
"""Reduce-scatters over more devices stay as they are, unless they are over a whole slice."""


def ring(program: Program, mesh: Mesh, topology: Topology) -> Program:
    """Replaces reduce-scatters of products by rings of permutes, on TPUs where that is faster."""
    # A permute is an exchange among the whole mesh: not where devices take different branches.
    if topology.platform != "tpu" or any(HELD in op.kind.attrs for op in program.walk()):
        return program
    slow = {a for a, link in enumerate(topology.atom_links(mesh)) if link == topology.chip.dcn}
    users = Index(program).users
    found: dict[Value, _Sum] = {}
    known: dict[object, float] = {}  # times of equal sums of equal products are predicted once

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
            sum_ = _sum(chain, made) if chain else None
            if sum_ and is_near(sum_.axes) and gain(sum_) > 0:
                found[op.results[0]] = sum_

    visit(program.body)

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value]:
        sum_ = found[op.results[0]]
        ways = 2 if _is_whole(sum_.axes, mesh, topology) else 1
        return (_in_pieces(b, op, sum_, now, mesh, ways),)

    return remove_dead(edit_ops(program, edit, found)) if found else program


class _Sum(NamedTuple):
    """Reduce-scatters to replace, each of which reads the one before, and the term they sum."""

    scatters: tuple[Op, ...]
    term: "_Term"

    @property
    def axes(self) -> Axes:
        """The atoms of all reduce-scatters, in the order in which they split the dim."""
        return tuple(a for scatter in self.scatters for a in scatter.kind.attrs["axes"])


def _scatters(op: Op, made: Mapping[Value, Op]) -> tuple[Op, ...]:
    """Returns the reduce-scatters of one dim and body, in a row, up to `op`; () if that is none."""
    if op.collective != "reduce_scatter":
        return ()
    (before,) = (made.get(v) for v in op.operands)
    own = op.kind.attrs["scatter_dimension"], op.kind.attrs["body"]
    if before is None or before.collective != "reduce_scatter":
        return (op,)
    is_same = own == (before.kind.attrs["scatter_dimension"], before.kind.attrs["body"])
    return (*_scatters(before, made), op) if is_same else (op,)


def _sum(scatters: Sequence[Op], made: Mapping[Value, Op]) -> _Sum | None:
    """Returns the `_Sum` of reduce-scatters if they add terms made of a product; else None."""
    first, last = scatters[0], scatters[-1]
    count, dim = math.prod(map(pieces_of, scatters)), last.kind.attrs["scatter_dimension"]
    term = _term(first.operands[0], dim, count, made)
    is_sum = last.kind.attrs["body"] == reducer_body("add", last.kind.results[0].dtype)
    has_product = any(t.op and t.op.kind.about.flops is not None for t in term.walk())
    return _Sum(tuple(scatters), term) if is_sum and has_product else None


def _seconds_less(program: Program, sum_: _Sum, mesh: Mesh, topology: Topology) -> float:
    """Returns the seconds that a ring saves over a sum and its product; negative if it is slower.

    A step of the ring takes the longer one of two times: to compute a piece and add to it, and to
    send a piece to the next device.
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
    """Whether axes span a whole slice, in the order in which consecutive devices are neighbours."""
    return mesh.extent(axes) == topology.count and list(axes) == sorted(axes)


class _Term(NamedTuple):
    """How to make pieces of `value` along `dim` (None: whole): `op` on `operands`, or slices."""

    value: Value
    dim: int | None  # the dim that is cut in pieces; None if the value is read whole
    # computes a piece of the value from pieces of `operands`; None: pieces are slices of the value
    op: Op | None = None
    operands: "tuple[_Term, ...]" = ()

    def walk(self) -> "Iterator[_Term]":
        for operand in self.operands:
            yield from operand.walk()
        yield self

    def form(self, program: Program) -> object:
        """Returns a key, equal for terms of equal ops, types and dims: they take equally long."""
        made = self.op.kind if self.op else program.types[self.value]
        return made, self.dim, tuple(operand.form(program) for operand in self.operands)


def _term(value: Value, dim: int, count: int, made: Mapping[Value, Op]) -> _Term:
    """Returns how to make `count` pieces of a value along `dim`; `made`: value read once -> op."""
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
    inner = operand_dim(op.kind, dim, count)
    if inner is None:
        return _Term(value, dim)
    operands = tuple(
        _term(v, inner, count, made) if type_.rank else _Term(v, None)
        for v, type_ in zip(op.operands, op.kind.operands, strict=True)
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
    """Appends piece `number` (an i32 value) of `count` of a term; all of it if its dim is None."""
    if term.op is not None and term.dim is not None:
        operands = [_piece(b, operand, number, count, now) for operand in term.operands]
        type_ = term.op.kind.results[0].scaled(term.dim, 1, count)
        return b.op(term.op.name, operands, (type_,), term.op.kind.attrs)[0]
    value = now(term.value)
    if term.dim is None:
        return value
    size = b.types[value].shape[term.dim] // count
    start = b.binary("multiply", number, b.constant(size, "i32"))
    return dynamic_take_dim(b, value, term.dim, start, size)
