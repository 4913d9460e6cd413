"""Sink: cheap values that loops carry unchanged are computed inside these loops instead.

before: `%2 = broadcast %1; %5 = while(%a = %0, %b = %2) { ... add %a, %b ...; return %x, %b }`
after:  `%5 = while(%a = %0) { %7 = broadcast %6; ... add %a, %7 ...; return %x }`

If the scalar `%1` is not constant, the loop carries it in place of what is broadcast from it.

jax lifts the constants of a `scan`'s body into carries, masks and zeros as large as activations
among them. As carries they would need a sharding and memory; as cheap values they need neither:
every use gets a copy in the sharding that it wants, so they constrain no plan.
"""

from collections.abc import Iterable

from spmd.ir.control_flow import Index, Tie
from spmd.ir.description import BROADCAST, CONSTANT
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import recarried, repeat_op

LONGEST_CHAIN = 12  # elementwise ops on top of each other that are cheap to recompute


def cheap_values(program: Program) -> frozenset[Value]:
    """Returns values of rank 1 or more that each use recomputes, such as broadcasts of scalars."""
    depth: dict[Value, int] = {}
    types = program.types
    for op in program.walk():
        if op.regions or len(op.results) != 1 or not types[op.results[0]].rank:
            continue
        about = op.kind.about
        if about.is_source:
            depth[op.results[0]] = 0
        elif (about.is_elementwise or op.name == BROADCAST) and all(
            v in depth or not types[v].rank for v in op.operands
        ):
            below = max((depth.get(v, 0) for v in op.operands), default=0)
            if below < LONGEST_CHAIN:
                depth[op.results[0]] = below + 1
    return frozenset(depth)


def sink_invariants(program: Program) -> Program:
    """Returns the program with cheap values computed in loops that carried them unchanged."""
    if not any(op.is_loop for op in program.walk()):
        return program
    sink = _Sink(program)
    return program._replace(body=sink.region(program.body), types=tuple(sink.b.types))


class _Sink:
    def __init__(self, program: Program) -> None:
        self.b = Builder(program.types)
        self.cheap = set(cheap_values(program))
        self.producers = dict(Index(program).producers)
        self.instead: dict[Value, Value] = {}

    def values(self, values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple([self.instead.get(v, v) for v in values])

    def region(self, region: Region) -> Region:
        ops = []
        for op in region.ops:
            op = op._replace(operands=self.values(op.operands))
            if op.is_loop:
                op = self.loop(op)
            ops.append(op._replace(regions=tuple(map(self.region, op.regions))))
        return Region(region.args, tuple(ops), self.values(region.results))

    def loop(self, op: Op) -> Op:
        """Returns the loop with cheap unchanged carries made inside, from scalars it carries."""
        b, body = self.b, op.regions[1]
        pairs = enumerate(zip(body.args, body.results, strict=True))
        sunk = [i for i, (a, z) in pairs if a == z and op.operands[i] in self.cheap]
        if not sunk:
            return op
        makers: dict[Value, Op] = {}
        scalars: dict[Value, None] = {}
        for i in sunk:
            self.find(op.operands[i], makers, scalars)
            self.instead[op.results[i]] = op.operands[i]
        regions, carried = [], []
        for region in op.regions:
            inside = {v: b.value(b.types[v]) for v in scalars}
            made = dict(inside)
            b.begin()
            for maker in makers.values():
                repeat_op(b, maker, made)
                self.producers[made[maker.results[0]]] = b.last
            self.cheap.update(made[v] for v in makers if v in self.cheap)
            self.instead.update((region.args[i], made[op.operands[i]]) for i in sunk)
            regions.append(region._replace(ops=(*b.end((), ()).ops, *region.ops)))
            carried.append(inside)
        test, inside = carried
        more = [Tie(v, (test[v], inside[v], inside[v]), b.value(b.types[v])) for v in scalars]
        return recarried(op._replace(regions=tuple(regions)), b.types, sunk, more)

    def find(self, value: Value, makers: dict[Value, Op], scalars: dict[Value, None]) -> None:
        """Adds a value's ops to `makers`, in order, and the values they start from to `scalars`."""
        if value in makers or value in scalars:
            return
        op = self.producers.get(value)
        if op is None or not (value in self.cheap or _is_scalar(op)):
            scalars[value] = None
            return
        op = op._replace(operands=self.values(op.operands))
        for operand in op.operands:
            self.find(operand, makers, scalars)
        makers[value] = op


def _is_scalar(op: Op) -> bool:
    """Whether an op, constant or elementwise, has only scalars, so that loops may repeat it."""
    is_made = op.name == CONSTANT or op.kind.about.is_elementwise
    types = (*op.kind.operands, *op.kind.results)
    return is_made and len(op.results) == 1 and all(t.rank == 0 for t in types)
