"""Loops read cheap invariants from outside instead of carrying them around.

before: `%3 = while %0, %mask { body(%1, %2): use %2; return %1', %2 }`   (%mask: iota, compare)
after:  `%3 = while %0 { body(%1): use %mask; return %1' }`

A carry has one sharding for the whole loop and lies in memory as long as it runs. What is cheap to
compute again needs neither: every use gets its piece. (jax hoists a layer's causal mask out of the
scan over layers, broadcast over batch and heads.)
"""

from __future__ import annotations

from spmd.ir.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.propagation.cheap import cheap_values


def uncarry(program: Program) -> Program:
    """Drops every carry of a loop that the body hands on as it is and that is cheap to compute."""
    if not any(op.name == "stablehlo.while" for op in program.walk()):
        return program
    return _Uncarry(program).run()


class _Uncarry:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.cheap = cheap_values(program)
        self.b = Builder()
        self.env: dict[Value, Value] = {}
        self.recomputed: set[Value] = set()

    def run(self) -> Program:
        body = self.region(self.program.body, self.program.body.args, True)
        return self.program._replace(types=tuple(self.b.types), body=body)

    def bind(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        for value in values:
            self.env[value] = self.b.value(self.program.types[value])
            if value in self.cheap:
                self.recomputed.add(self.env[value])
        return tuple(self.env[value] for value in values)

    def region(self, old: Region, kept: tuple[Value, ...], isolated: bool) -> Region:
        args = self.bind(kept)
        self.b.begin(isolated)
        for op in old.ops:
            self.visit(op)
        dropped = {a for a in old.args if a not in kept}
        results = [v for v in old.results if v not in dropped]
        return self.b.end(args, [self.env[v] for v in results])

    def visit(self, op: Op) -> None:
        if op.name == "stablehlo.while":
            self.loop(op)
            return
        operands = tuple(self.env[v] for v in op.operands)
        self.b.loc = op.loc
        regions = tuple(self.region(r, r.args, False) for r in op.regions)
        self.b.append(Op(op.kind, operands, self.bind(op.results), regions, op.loc))

    def loop(self, op: Op) -> None:
        cond, body = op.regions
        dropped = [
            argument == result and self.env[operand] in self.recomputed
            for operand, argument, result in zip(op.operands, body.args, body.results, strict=True)
        ]
        for i, is_dropped in enumerate(dropped):
            if is_dropped:
                outer = self.env[op.operands[i]]
                self.env.update(dict.fromkeys((cond.args[i], body.args[i], op.results[i]), outer))

        def kept(values: tuple[Value, ...]) -> tuple[Value, ...]:
            return tuple(v for v, gone in zip(values, dropped, strict=True) if not gone)

        operands = tuple(self.env[v] for v in kept(op.operands))
        self.b.loc = op.loc
        regions = tuple(self.region(r, kept(r.args), True) for r in (cond, body))
        results = self.bind(kept(op.results))
        types = tuple(self.program.types[v] for v in kept(op.results))
        kind = OpKind(op.name, types, types, op.kind.attrs)
        self.b.append(Op(kind, operands, results, regions, op.loc))
