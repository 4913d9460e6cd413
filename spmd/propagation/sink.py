"""Sink: what a loop carries unchanged and could make anew is made inside it.

before: `%2 = broadcast %1; %5 = while(%a = %0, %b = %2) { ... add %a, %b ...; return %x, %b }`
after:  `%5 = while(%a = %0) { %7 = broadcast %6; ... add %a, %7 ...; return %x }`

jax lifts the constants of a `scan`'s body into carries, masks and zeros as large as activations
among them. As carries they would need a sharding and memory; as cheap values they need neither.
"""

from __future__ import annotations

from collections.abc import Iterable

from spmd.ir.control_flow import producers_of
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.propagation.cheap import cheap_values


def sink_invariants(program: Program) -> Program:
    """Takes cheap values that do not change out of the carries of every loop, outermost first."""
    if not any(op.is_loop for op in program.walk()):
        return program
    return _Sink(program).run()


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
        """The loop without the carries that can be made inside."""
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
        regions = []
        for region in op.regions:
            ops = list(region.ops)
            made: dict[Value, Value] = {}
            first: list[Op] = []
            for i, chain in sunk.items():
                for maker in chain:
                    self.copy(maker, made, first)
                self.instead[region.args[i]] = made[op.operands[i]]
            is_body = region is body
            results = tuple(region.results[i] for i in kept) if is_body else region.results
            args = tuple(region.args[i] for i in kept)
            regions.append(Region(args, (*first, *ops), results))
        types = tuple(op.kind.results[i] for i in kept)
        return Op(
            OpKind(op.name, types, types, op.kind.attrs),
            tuple(op.operands[i] for i in kept),
            tuple(op.results[i] for i in kept),
            tuple(regions),
            op.loc,
        )

    def chain(self, value: Value) -> list[Op] | None:
        """The ops that make a cheap value from nothing, in order; None if they need a scalar."""
        if value not in self.cheap:
            return None
        found: dict[Value, Op] = {}

        def visit(v: Value) -> bool:
            if v in found:
                return True
            op = self.producers.get(v)
            if op is None or not (v in self.cheap or op.kind.about.is_constant):
                return False
            if not all(visit(operand) for operand in self.values(op.operands)):
                return False
            found[v] = op._replace(operands=self.values(op.operands))
            return True

        return list(found.values()) if visit(value) else None

    def copy(self, op: Op, made: dict[Value, Value], into: list[Op]) -> None:
        """Appends a copy of one op of a chain."""
        (old,) = op.results
        if old in made:
            return
        new = made[old] = len(self.types)
        self.types.append(self.types[old])
        copied = op._replace(operands=tuple(made[v] for v in op.operands), results=(new,))
        into.append(copied)
        self.producers[new] = copied
        if old in self.cheap:
            self.cheap.add(new)
