"""Sink: what a loop carries unchanged and could make anew is made inside it.

before: `%2 = broadcast %1; %5 = while(%a = %0, %b = %2) { ... add %a, %b ...; return %x, %b }`
after:  `%5 = while(%a = %0) { %7 = broadcast %6; ... add %a, %7 ...; return %x }`

A scalar that is not constant is carried instead: `broadcast` above may read an argument.

jax lifts the constants of a `scan`'s body into carries, masks and zeros as large as activations
among them. As carries they would need a sharding and memory; as cheap values they need neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmd.ir.control_flow import producers_of
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.types import TensorType
from spmd.propagation.cheap import cheap_values


def sink_invariants(program: Program) -> Program:
    """Takes cheap values that do not change out of the carries of every loop, outermost first."""
    if not any(op.is_loop for op in program.walk()):
        return program
    return _Sink(program).run()


class _Chain(NamedTuple):
    """What makes a cheap value: ops in order, and the scalars from elsewhere that they read."""

    ops: tuple[Op, ...]
    scalars: tuple[Value, ...]


class _Sink:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.types = list(program.types)
        self.cheap = set(cheap_values(program))
        self.producers = producers_of(program)
        self.instead: dict[Value, Value] = {}

    def run(self) -> Program:
        body = self.region(self.program.body)
        return self.program._replace(types=tuple(self.types), body=body)

    def values(self, values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple([self.instead.get(v, v) for v in values])

    def region(self, region: Region) -> Region:
        ops = []
        for op in region.ops:
            op = op._replace(operands=self.values(op.operands))
            if op.is_loop:
                op = self.loop(op)
            regions = tuple(self.region(inner) for inner in op.regions)
            ops.append(op._replace(regions=regions))
        return Region(region.args, tuple(ops), self.values(region.results))

    def loop(self, op: Op) -> Op:
        """The loop without the carries that can be made inside, but with the scalars they need."""
        body = op.regions[1]
        sunk = {
            i: chain
            for i, value in enumerate(op.operands)
            if body.results[i] == body.args[i] and (chain := self.chain(value)) is not None
        }
        if not sunk:
            return op
        for i in sunk:
            self.instead[op.results[i]] = op.operands[i]
        kept = [i for i in range(len(op.operands)) if i not in sunk]
        scalars = tuple(dict.fromkeys(v for chain in sunk.values() for v in chain.scalars))
        regions = []
        for region in op.regions:
            ops = list(region.ops)
            inside = tuple(self.value(self.types[v]) for v in scalars)
            made = dict(zip(scalars, inside, strict=True))
            first: list[Op] = []
            for i, chain in sunk.items():
                for maker in chain.ops:
                    self.copy(maker, made, first)
                self.instead[region.args[i]] = made[op.operands[i]]
            results = region.results
            if region is body:
                results = (*(results[i] for i in kept), *inside)
            args = (*(region.args[i] for i in kept), *inside)
            regions.append(Region(args, (*first, *ops), results))
        operands = (*(op.operands[i] for i in kept), *scalars)
        after = tuple(self.value(self.types[v]) for v in scalars)
        types = tuple(self.types[v] for v in operands)
        kind = OpKind(op.name, types, types, op.kind.attrs)
        return Op(
            kind, operands, (*(op.results[i] for i in kept), *after), tuple(regions), op.loc
        )

    def value(self, type_: TensorType) -> Value:
        """A new value."""
        self.types.append(type_)
        return len(self.types) - 1

    def chain(self, value: Value) -> _Chain | None:
        """What makes a cheap value from scalars; None if the value is not cheap."""
        if value not in self.cheap:
            return None
        ops: dict[Value, Op] = {}
        scalars: dict[Value, None] = {}

        def visit(v: Value) -> None:
            op = self.producers.get(v)
            if v in ops or v in scalars:
                return
            if op is None or not (v in self.cheap or _makes_scalar(op)):
                scalars[v] = None
                return
            operands = self.values(op.operands)
            for operand in operands:
                visit(operand)
            ops[v] = op._replace(operands=operands)

        visit(value)
        return _Chain(tuple(ops.values()), tuple(scalars))

    def copy(self, op: Op, made: dict[Value, Value], into: list[Op]) -> None:
        """Appends a copy of one op of a chain."""
        (old,) = op.results
        if old in made:
            return
        new = made[old] = self.value(self.types[old])
        copied = op._replace(operands=tuple(made[v] for v in op.operands), results=(new,))
        into.append(copied)
        self.producers[new] = copied
        if old in self.cheap:
            self.cheap.add(new)


def _makes_scalar(op: Op) -> bool:
    """Whether an op makes a scalar of nothing but scalars."""
    about = op.kind.about
    is_scalar = all(t.rank == 0 for t in (*op.kind.operands, *op.kind.results))
    return is_scalar and len(op.results) == 1 and (about.is_constant or about.is_elementwise)
