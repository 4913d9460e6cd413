"""Sink: what a loop carries unchanged and could make anew is made inside it.

before: `%2 = broadcast %1; %5 = while(%a = %0, %b = %2) { ... add %a, %b ...; return %x, %b }`
after:  `%5 = while(%a = %0) { %7 = broadcast %6; ... add %a, %7 ...; return %x }`

jax lifts the constants of a `scan`'s body into carries, masks and zeros as large as activations
among them. As carries they would need a sharding and memory; as cheap values they need neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
        cond, body = op.regions
        sunk: set[int] = set()
        makers: dict[Value, Op] = {}
        for i, value in enumerate(op.operands):
            if body.results[i] == body.args[i] and (found := self.makers(value)):
                sunk.add(i)
                makers.update(found)
                self.instead[op.results[i]] = value
        if not sunk:
            return op

        def kept(values: Sequence[Value]) -> tuple[Value, ...]:
            return tuple(v for i, v in enumerate(values) if i not in sunk)

        regions = []
        for region in op.regions:
            copies, made = self.copied(makers)
            self.instead.update((region.args[i], made[op.operands[i]]) for i in sunk)
            results = kept(body.results) if region is body else cond.results
            regions.append(Region(kept(region.args), (*copies, *region.ops), results))
        types = tuple(self.types[v] for v in kept(op.results))
        kind = OpKind(op.name, types, types, op.kind.attrs)
        return Op(kind, kept(op.operands), kept(op.results), tuple(regions), op.loc)

    def makers(self, value: Value) -> dict[Value, Op]:
        """The ops that make a cheap value from nothing, in order; none if they need a scalar."""
        found: dict[Value, Op] = {}

        def visit(v: Value) -> bool:
            if v in found:
                return True
            op = self.producers.get(v)
            if op is None or not (v in self.cheap or op.kind.about.is_constant):
                return False
            op = op._replace(operands=self.values(op.operands))
            if not all(visit(operand) for operand in op.operands):
                return False
            found[v] = op
            return True

        return found if value in self.cheap and visit(value) else {}

    def copied(self, makers: Mapping[Value, Op]) -> tuple[list[Op], dict[Value, Value]]:
        """The same ops once more, and for each of their values the copy."""
        made: dict[Value, Value] = {}
        for old, op in makers.items():
            new = made[old] = len(self.types)
            self.types.append(self.types[old])
            operands = tuple(made[v] for v in op.operands)
            self.producers[new] = op._replace(operands=operands, results=(new,))
            if old in self.cheap:
                self.cheap.add(new)
        return [self.producers[new] for new in made.values()], made
