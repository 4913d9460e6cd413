"""Partition: rewrites the global program, as its plan says, as one program for every device.

A value has a local copy in every sharding that one of its uses needs. A copy is made once for all
readers that can see it, by resharding an existing copy, the one from which that costs least. Cheap
values (splats, iotas) are computed anew in each sharding instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

from spmd.ir.description import BARRIER, FROM_MANUAL
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.collectives import RESIZED
from spmd.ir.dialect.manual import MANUAL, TO_MANUAL
from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.program import Loc, Op, OpKind, Program, Region, Value, numberless
from spmd.ir.rewrite import Now, edit_ops
from spmd.ir.types import Order, TensorType, local_type
from spmd.lowering.local import dims
from spmd.lowering.local.table import LocalOp, lower_op
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, axes_text, replicated, spec_text
from spmd.planning.choices import making_choice
from spmd.planning.plan import Choice, Plan
from spmd.reshard.paths import WHOLE_TERMS, PathStep, permute_pairs

_USES = {TO_MANUAL: "shard_map", FROM_MANUAL: "shard_map's result"}
_REDUCED = {
    "add": "sum", "mul": "product", "max": "maximum", "min": "minimum", "and": "conjunction",
    "or": "disjunction", "xor": "parity",
}  # fmt: skip
"""Kind of a partial value -> the word for its reduction in notes to users."""


class Partitioned(NamedTuple):
    """A local program, its mesh, the shardings and memory orders of its arguments and results."""

    program: Program
    mesh: Mesh
    # arguments, results: shardings of the global ones
    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    # the order of dims in memory of each, None for 0, 1, 2, ...; empty until chosen (`lay_out`)
    argument_orders: tuple[Order | None, ...] = ()
    result_orders: tuple[Order | None, ...] = ()


def partition(plan: Plan) -> Partitioned:
    """Returns the program of one device, with explicit collectives, that a plan describes."""
    return _Partitioner(plan).run()


class _Partitioner:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.mesh = plan, plan.mesh
        self.types, self.cheap = plan.program.types, plan.propagated.cheap
        self.producers = plan.problem.index.producers
        self.resharder = plan.problem.resharder
        self.b = Builder()
        self.copies: list[dict[Value, dict[Sharding, Value]]] = [{}]
        self.use: str | tuple[Op, int] = ""  # what reshards are for: words, or an op's operand
        self.recipes: dict[tuple[OpKind, Sharding], Choice] = {}
        self.local_kinds: dict[tuple[int, int], OpKind] = {}

    def run(self) -> Partitioned:
        program = self.plan.program
        args = [
            self.bind(value, sharding)
            for value, sharding in zip(program.body.args, self.plan.arguments, strict=True)
        ]
        self.b.begin()
        self.ops(program.body.ops)
        names = [f"result {numberless(name)}" for name in program.result_names]
        results = self.returned(program.body.results, self.plan.results, names, Loc())
        local = program._replace(body=self.b.end(args, results), types=tuple(self.b.types))
        local = without_permutes(local, self.mesh)
        return Partitioned(local, self.mesh, self.plan.arguments, self.plan.results)

    def returned(
        self, values: Sequence[Value], shardings: Sequence[Sharding], names: Sequence[str], loc: Loc
    ) -> list[Value]:
        """Returns local copies of `values` in `shardings`; reshards note that `names` need them."""
        found = []
        for value, sharding, name in zip(values, shardings, names, strict=True):
            maker = self.producers.get(value)
            self.b.loc = Loc(loc.scope, (maker.loc.frames if maker else ()) or loc.frames)
            self.use = name
            found.append(self.get(value, sharding))
        return found

    # Values.

    def bind(self, value: Value, sharding: Sharding) -> Value:
        local = self.b.value(local_type(self.types[value], sharding, self.mesh))
        self.copies[-1][value] = {sharding: local}
        return local

    def get(self, value: Value, wanted: Sharding) -> Value:
        """Returns the local copy of a global value in a sharding, made here if none is visible."""
        # A copy that was made inside a region is visible there alone; one from outside may be used.
        for scope in reversed(self.copies):
            copies = scope.get(value)
            if copies is not None and (found := copies.get(wanted)) is not None:
                return found
        if self.types[value].is_empty:  # carried by a loop, say: it is never sent
            return self.b.splat(0, local_type(self.types[value], wanted, self.mesh))
        if value in self.cheap:
            made = self.recompute(value, wanted)
        else:
            shared = self.plan.copies.get(value)
            if shared is not None and shared != wanted:
                self.get(value, shared)
            made = self.convert(value, wanted)
        self.copies[-1].setdefault(value, {})[wanted] = made
        return made

    def recompute(self, value: Value, wanted: Sharding) -> Value:
        if wanted.partial:
            full = self.get(value, wanted.full())
            mask = PathStep("mask", wanted.full(), wanted, wanted.partial, ())
            return apply_step(self.b, full, self.types[value], mask, self.mesh)
        op = self.producers[value]
        choice = self.recipes.get((op.kind, wanted))
        if choice is None:
            choice = self.recipes[op.kind, wanted] = making_choice(op, wanted, self.mesh)
        operands = tuple(
            [self.get(v, s) for v, s in zip(op.operands, choice.operands, strict=True)]
        )
        outer, self.b.loc = self.b.loc, op.loc
        (made,) = self.lower(op, choice, operands)
        self.b.loc = outer
        return made

    def lower(self, op: Op, choice: Choice, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        # Where its local form is one op over just its operands, equal ops with equal choices repeat
        # that op without asking the local lowering again.
        key = (id(op.kind), id(choice))
        kind = self.local_kinds.get(key)
        if kind is not None:
            return self.b.repeat(kind, operands)
        before = self.b.count
        results = lower_op(LocalOp(self.b, self.mesh, op, choice, operands))
        if self.b.count == before + 1:
            last = self.b.last
            if last.operands == operands and last.results == tuple(results):
                self.local_kinds[key] = last.kind
        return results

    def convert(self, value: Value, wanted: Sharding) -> Value:
        copies: dict[Sharding, Value] = {}
        for scope in self.copies:
            copies = {**scope.get(value, {}), **copies}
        have, path = self.resharder.cheapest(value, copies, wanted)
        local = copies[have]
        outer = self.b.loc
        summed = self.partial_source(value) if have.partial != wanted.partial else None
        where = summed.loc if summed is not None else outer
        note = self.reason(value, have, wanted, summed)
        note += " (in the gradient)" if "transpose(" in where.scope else ""
        steps = sum(step.kind in RESIZED for step in path.steps)
        number = 0
        for step in path.steps:
            number += step.kind in RESIZED
            part = f" (step {number} of {steps})" if steps > 1 else ""
            self.b.loc = where._replace(note=note + part)
            local = apply_step(self.b, local, self.types[value], step, self.mesh)
            if step.after != wanted:
                self.copies[-1].setdefault(value, {}).setdefault(step.after, local)
        self.b.loc = outer
        return local

    def reason(self, value: Value, have: Sharding, wanted: Sharding, summed: Op | None) -> str:
        if isinstance(self.use, str):
            use = self.use
        else:
            op, i = self.use
            use = _USES.get(op.name) or f"operand {i} of {op.label}"
            if op.is_mark:
                use = f"mark_sharding at {op.loc.trail}" if op.loc.frames else "the mark"
            elif op.is_loop:
                use = f"carry {i} of the loop, before its first iteration,"

        def lies(sharding: Sharding) -> str:
            return spec_text(sharding, self.mesh) if sharding.used else "whole"

        needs = f"{use} needs {'' if any(wanted.dims) else 'it '}{lies(wanted)}"
        if summed is None:
            return f"{needs}, {self.described(value)} is {lies(have)}"
        axes = axes_text(tuple([a for a in have.partial if a not in wanted.partial]), self.mesh)
        if have.dims != wanted.dims:
            needs += f", it is {lies(have.full())}"
        return f"{_REDUCED.get(have.kind, have.kind)} of {summed.label} over {axes}: {needs}"

    def described(self, value: Value) -> str:
        if value in self.plan.program.body.args:
            index = self.plan.program.body.args.index(value)
            return f"argument {numberless(self.plan.program.arg_names[index])}"
        op = self.producers.get(value)
        if op is None:
            return "the loop's carry"
        return "the marked value" if op.is_mark else f"the result of {op.label}"

    def partial_source(self, value: Value) -> Op | None:
        """Returns the op that made a value partial, not ops it flowed through; None if none did."""
        op = self.producers.get(value)
        while op is not None and not op.regions and op.results[0] in self.plan.choices:
            choice = self.plan.choice(op)
            carried = [v for v, s in zip(op.operands, choice.operands, strict=True) if s.partial]
            if not carried:
                return op
            op = self.producers.get(carried[0])
        return op

    # Ops.

    def ops(self, ops: Sequence[Op]) -> None:
        waiting: list[Op] = []  # barriers next to each other, of which none waits for another
        for op in ops:
            is_barrier = op.name == BARRIER
            fresh = {v for barrier in waiting for v in barrier.results}
            if waiting and not (is_barrier and fresh.isdisjoint(op.operands)):
                self.barrier(waiting)
                waiting = []
            if is_barrier:
                waiting.append(op)
            else:
                self.op(op)
        if waiting:
            self.barrier(waiting)

    def barrier(self, ops: Sequence[Op]) -> None:
        """Appends one optimization barrier in place of several, `ops`, over the operands of all."""
        choices = [self.plan.choice(op) for op in ops]
        operands = [
            v for op, choice in zip(ops, choices, strict=True) for v in self.operands(op, choice)
        ]
        self.b.loc = ops[0].loc
        results = self.b.op(ops[0].name, operands, [self.b.types[v] for v in operands])
        for op, choice, result in zip(ops, choices, results, strict=True):
            self.keep(op, choice, (result,))

    def op(self, op: Op) -> None:
        if op.regions:
            (self.manual if op.name == MANUAL else self.control_flow)(op)
        elif not self.cheap.issuperset(op.results):
            choice = self.plan.choices[op.results[0]]
            self.b.loc = op.loc
            self.keep(op, choice, self.lower(op, choice, self.operands(op, choice)))
        else:  # made where it is used, of scalars that are put together here
            self.b.loc = op.loc
            for i, value in enumerate(op.operands):
                if value not in self.cheap:
                    self.use = op, i
                    self.get(value, replicated(0))

    def operands(self, op: Op, choice: Choice) -> tuple[Value, ...]:
        found = []
        for i, (value, wanted) in enumerate(zip(op.operands, choice.operands, strict=True)):
            self.use = op, i
            found.append(self.get(value, wanted))
        return tuple(found)

    def keep(self, op: Op, choice: Choice, results: Sequence[Value]) -> None:
        for value, sharding, local in zip(op.results, choice.results, results, strict=True):
            self.copies[-1][value] = {sharding: local}

    def manual(self, op: Op) -> None:
        (region,) = op.regions
        self.ops(region.ops)
        choice = self.plan.choice(op)
        names = [f"result {i} of shard_map" for i in range(len(op.results))]
        self.keep(op, choice, self.returned(region.results, choice.results, names, op.loc))

    def control_flow(self, op: Op) -> None:
        choice = self.plan.choice(op)
        self.b.loc = op.loc
        operands = self.operands(op, choice)
        regions = []
        for number, region in enumerate(op.regions):
            states = choice.results
            if op.is_loop and number == 0:  # the condition
                states = tuple(replicated(self.types[v].rank) for v in region.results)
            self.copies.append({})
            carried = choice.results if op.is_loop else ()
            args = [self.bind(v, s) for v, s in zip(region.args, carried, strict=True)]
            self.b.begin(isolated=op.is_loop)
            self.ops(region.ops)
            end = ("carry", "the loop, at the end of each iteration,")
            kind, of = end if op.is_loop else ("result", f"a branch of {op.label}")
            names = [f"{kind} {i} of {of}" for i in range(len(states))]
            outs = self.returned(region.results, states, names, op.loc)
            self.copies.pop()
            regions.append(self.b.end(args, outs))
        self.b.loc = op.loc
        types = tuple(
            local_type(t, s, self.mesh)
            for t, s in zip(op.kind.results, choice.results, strict=True)
        )
        attrs = op.kind.attrs
        held = self.resharder.held(op.results[0])
        if held and self.plan.trips.get(op.results[0]) is None:
            attrs = {**attrs, HELD: held}
        self.keep(op, choice, self.b.op(op.name, operands, types, attrs, tuple(regions)))


# Reshard steps as ops; and without permutes where devices may take different branches.


def apply_step(b: Builder, x: Value, global_type: TensorType, step: PathStep, mesh: Mesh) -> Value:
    """Appends a reshard step of local `x` in sharding `step.before`; returns it in `step.after`."""
    # Collectives know equal pieces only. A dim that is about to be split is padded first (`cut`),
    # and one that was just joined loses its inner padding afterwards (`Split.join`).
    type_ = local_type(global_type, step.after, mesh)
    if step.kind == "slice":
        return dims.own_piece(b, x, step.dims[0], step.axes, mesh)
    if step.kind == "mask" and step.after.kind in WHOLE_TERMS:
        return x
    if step.kind == "mask":
        first = b.compare("EQ", b.axis_index(step.axes), b.constant(0, "i32"))
        return b.select(first, x, b.splat(0, type_))
    if step.kind == "all_gather":
        (dim,) = step.dims
        x = dims.gather_dim(b, x, dim, step.axes, mesh)
        return dims.Split(dim, type_.shape[dim], step.axes, mesh).join(b, x)
    if step.kind == "all_to_all":
        source, target = step.dims
        x = dims.cut(b, x, target, step.axes, mesh)
        pieces = b.types[x].scaled(source, mesh.extent(step.axes))
        pieces = pieces.with_dim(target, type_.shape[target])
        how = {"concat_dimension": source, "split_dimension": target}
        x = b.collective(step.kind, x, pieces, step.axes, **how)
        return dims.Split(source, type_.shape[source], step.axes, mesh).join(b, x)
    if step.kind == "collective_permute":
        pairs = permute_pairs(step.before, step.after, mesh)
        return b.collective(step.kind, x, type_, step.axes, pairs=pairs)
    if step.kind == "reduce_scatter":
        x = dims.cut(b, x, step.dims[0], step.axes, mesh)
    # Whether XLA's backends reduce this way across devices; bitwise ones only for predicates.
    bitwise = ("and", "or") if type_.dtype == "i1" else ()
    if step.before.kind not in ("add", "mul", "max", "min", *bitwise):  # of the gathered terms
        terms = dims.gather_dim(b, b.reshape(x, (1, *b.types[x].shape)), 0, step.axes, mesh)
        reduced = b.reduce(step.before.kind, terms, (0,))
        is_whole = step.kind == "all_reduce"
        return reduced if is_whole else b.local_slice(reduced, type_, step.axes, step.dims[0])
    body = reducer_body(step.before.kind, type_.dtype)
    to = {"scatter_dimension": step.dims[0]} if step.kind == "reduce_scatter" else {}
    assert to or step.kind == "all_reduce", step.kind
    return b.collective(step.kind, x, type_, step.axes, body=body, **to)


HELD = "spmd.held"
"""Attribute of control flow: atoms along which devices may differ in their branches or trips."""


def without_permutes(program: Program, mesh: Mesh) -> Program:
    """Replaces collective-permutes by all-gathers inside control flow with `HELD`.

    Devices that differ along the held atoms may take different branches there; all others take the
    same. So a collective is safe if it runs over other atoms alone. But XLA runs a permute as one
    exchange among all devices of the mesh, whatever its pairs are, and some may never come to it.
    So a permute over other atoms, which the compiler added, becomes an all-gather over them, of
    which each device keeps what the permute would have sent to it:

    before: `%3 = collective_permute %2 {y} pairs=[[0, 1], [1, 0], ...]`
    after:  `%4 = all_gather (reshape %2) {y}; %3 = %4[table[position]]`
    """
    found: set[Value] = set()

    def visit(region: Region, held: frozenset[int]) -> None:
        for op in region.ops:
            for inner in op.regions:
                visit(inner, held.union(op.kind.attrs.get(HELD, ())))
            permutes = op.collective == "collective_permute"
            if held and permutes and held.isdisjoint(op.kind.attrs["axes"]):
                found.add(op.results[0])

    visit(program.body, frozenset())

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value]:
        # The table has, for each device of the mesh, the coordinate along `axes` of the one that
        # sends to it, or -1. For pairs [[0, 1], [1, 2]] of four devices it is -1 0 1 -1. Devices
        # without a sender have zeros, as behind a permute.
        (x,), axes, type_ = op.operands, op.kind.attrs["axes"], op.kind.results[0]
        gathered = dims.gather_dim(b, b.reshape(x, (1, *type_.shape)), 0, axes, mesh)
        sender = [-1] * mesh.size
        for source, to in op.kind.attrs["pairs"]:
            sender[to] = mesh.coordinate(source, axes)
        mine = dims.per_device(b, tuple(range(len(mesh.atoms))), sender)
        zero = b.constant(0, "i32")
        start = b.binary("maximum", mine, zero)
        received = b.reshape(dims.dynamic_take_dim(b, gathered, 0, start, 1), type_.shape)
        if -1 not in sender:
            return (received,)
        return (b.select(b.compare("GE", mine, zero), received, b.splat(0, type_)),)

    return edit_ops(program, edit, found)
