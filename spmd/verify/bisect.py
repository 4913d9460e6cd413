"""The first op of a program whose value differs between the partitioned and the whole program.

A *cut* behind some ops of a program is compared by the values that are still needed behind it.
Nothing differs at the cut before the first op, something does at the one behind the last. The
search halves this interval, running both programs up to the cut, until one op is left. A loop is
run for fewer iterations to find the first wrong one, and its body is then searched by itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.manual import MANUAL
from spmd.ir.program import Op, OpKind, Program, Region, Value, free_values
from spmd.ir.rewrite import rewrite_ops
from spmd.ir.text import format_op
from spmd.ir.types import TensorType
from spmd.lowering.emit import emit
from spmd.lowering.emitted import Emitted
from spmd.lowering.execute import executable, executable_on
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, format_sharding
from spmd.mesh.spec import jax_mesh
from spmd.planning.choices import making_choice
from spmd.planning.plan import Choice, Plan
from spmd.planning.problem import whole_axes
from spmd.verify.compare import Comparison, Tolerance, compare_results

Arrays = list[Any]
Lower = Callable[[Plan], Emitted]
"""The stages from the plan to the emitted program."""

_SCALAR = Sharding(())
_I32 = TensorType((), "i32")
_MOST_ITERATIONS = 1 << 16
"""The last iteration that is tried in a loop with an unknown trip count."""


class Culprit(NamedTuple):
    """The first op whose value differs.

    Attributes:
      op: the op; None where only the reshard of a result can be at fault.
      text: the op, its operands' and results' shardings and its source line.
      inside: the loops and branches around it, outermost first.
      comparisons: the values that differ behind it.
    """

    op: Op | None
    text: str
    inside: tuple[str, ...]
    comparisons: tuple[Comparison, ...]

    def __str__(self) -> str:
        lines = [self.text]
        lines += [f"  inside: {place}" for place in self.inside]
        lines += [f"  {comparison}" for comparison in self.comparisons]
        return "\n".join(lines)


def find_culprit(
    plan: Plan, arguments: Arrays, lower: Lower, tolerance: Tolerance
) -> Culprit | None:
    """The first op whose value differs, or None when both programs agree after all.

    Args:
      plan: the whole program's plan.
      arguments: for each argument of the program a host array.
      lower: how a plan becomes a program to run.
      tolerance: the largest difference that still counts as equal.
    """
    return _Search(plan, arguments, lower, tolerance).run()


def run_whole(program: Program, arguments: Arrays, mesh: Mesh) -> Arrays:
    """The global program as it is: see `run_text`."""
    bare = rewrite_ops(program, lambda b, op, operands: operands if op.is_mark else None)
    return run_text(emit(bare, mesh), program, arguments, mesh)


def run_text(text: str, program: Program, arguments: Arrays, mesh: Mesh) -> Arrays:
    """A whole program's module on the first device of the mesh.

    With manual regions it takes the whole mesh, and XLA's partitioner.
    """
    types = tuple(program.types[v] for v in program.body.results)
    is_manual = any(op.name == MANUAL for op in program.walk())
    where = mesh if is_manual else jax_mesh(mesh).devices.flat[0]
    return host_arrays(executable_on(text, types, where)(*arguments))


def host_arrays(arrays: Sequence[Any]) -> Arrays:
    """Arrays as numpy's."""
    return [np.asarray(array) for array in arrays]


class _Search(NamedTuple):
    """The search in one block: the program, or a body taken by itself."""

    plan: Plan
    arguments: Arrays
    lower: Lower
    tolerance: Tolerance
    inside: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.plan.program.body.ops

    def run(self) -> Culprit | None:
        # Nothing differs at the cut `equal`, something at `differs`; cut n is behind n ops, and the
        # one behind all ops and one more has the results in the shardings that are returned. Of 4
        # ops the third is wrong:
        #   [0, 5] cut 2 agrees -> [2, 5] cut 3 differs -> [2, 3]: it is ops[2]
        # A value that nobody needs any more is not compared, so a difference may be gone again at a
        # later cut. The search still ends at an op behind which something differs, and in front of
        # which nothing does.
        equal, differs = 0, len(self.ops) + 1
        wrong = self.wrong_at(differs)
        if not wrong:
            return None
        while differs - equal > 1:
            middle = (equal + differs) // 2
            found = self.wrong_at(middle)
            if found:
                differs, wrong = middle, found
            else:
                equal = middle
        if equal == len(self.ops):
            return Culprit(None, "only the reshard of a result differs", self.inside, wrong)
        op = self.ops[equal]
        return self.descend(equal, op, wrong) or self.culprit(op, wrong)

    def culprit(self, op: Op, wrong: tuple[Comparison, ...], *inside: str) -> Culprit:
        return Culprit(op, _describe(self.plan, op), self.inside + inside, wrong)

    # Cuts.

    def wrong_at(self, cut: int) -> tuple[Comparison, ...]:
        """The values that differ behind the first `cut` ops; see `run` for the last cut."""
        plan = self.plan if cut > len(self.ops) else _until(self.plan, cut)
        return self.differing(plan, self.arguments) if plan.results else ()

    def differing(self, plan: Plan, arguments: Arrays) -> tuple[Comparison, ...]:
        program = plan.program
        got = host_arrays(executable(self.lower(plan))(*arguments))
        want = run_whole(program, arguments, plan.mesh)
        compared = compare_results(program, got, want, self.tolerance)
        return tuple(comparison for comparison in compared if not comparison.ok)

    def values_before(self, index: int, values: Sequence[Value]) -> Arrays:
        """The values that the whole program has in front of an op."""
        body = self.plan.program.body
        program = _with_body(self.plan.program, Region(body.args, body.ops[:index], tuple(values)))
        return run_whole(program, self.arguments, self.plan.mesh)

    # Control flow.

    def descend(self, index: int, op: Op, wrong: tuple[Comparison, ...]) -> Culprit | None:
        if op.is_loop:
            return self.descend_loop(index, op, wrong)
        if op.name == MANUAL:  # what is inside has no value on the whole program's side
            return self.culprit(op, wrong, f"{_place(op)}, taken as one op")
        if op.regions:
            (selector,) = self.values_before(index, op.operands[:1])
            number = _branch(op, int(selector))
            place = f"branch {number} of {_place(op)}"
            return self.search_region(index, op.regions[number], (), place)
        return None

    def descend_loop(self, index: int, op: Op, wrong: tuple[Comparison, ...]) -> Culprit | None:
        limited = _with_limit(self.plan, index)
        last = self.first_wrong_iteration(limited, self.plan.trips.get(op.results[0]))
        if not last:
            return None
        before = [*self.arguments, np.int32(last - 1)]
        carries = run_whole(limited.program, before, self.plan.mesh)
        place = f"iteration {last} of {_place(op)}"
        found = self.search_region(index, op.regions[1], carries, place)
        return found or self.culprit(op, wrong, f"iteration {last}; its body alone does not differ")

    def first_wrong_iteration(self, limited: Plan, trips: int | None) -> int:
        """The first iteration after which a carry differs, from 1; 0 if it is none of them."""
        # Limits double until one differs, then the interval is halved. Where the eleventh of 100
        # iterations is wrong: 0 1 2 4 8 agree, 16 differs; then 12 differs, 10 agrees, 11 differs.
        # If carries differ after 0 iterations, their reshard into the loop is to blame.

        def differs(limit: int) -> bool:
            return bool(self.differing(limited, [*self.arguments, np.int32(limit)]))

        equal, wrong = 0, 1
        if differs(0):
            return 0
        most = _MOST_ITERATIONS if trips is None else trips
        while not differs(wrong):
            equal, wrong = wrong, min(2 * wrong, most)
            if equal == wrong:
                return 0
        return equal + 1 + bisect_left(range(equal + 1, wrong), True, key=differs)

    def search_region(
        self, index: int, region: Region, arguments: Sequence[Any], place: str
    ) -> Culprit | None:
        """Searches a region by itself, as a program of its own with these arguments."""
        piece = _region_program(self.plan, region)
        captured = piece.body.args[len(region.args) :]
        arguments_at = tuple(probe_sharding(self.plan, v) for v in piece.body.args)
        plan = _with_program(self.plan, piece)._replace(arguments=arguments_at)
        states = [self.plan.states[v] for v in piece.body.args]
        if any(state is not None and state.partial for state in states):
            return None  # a partial value cannot be handed in from outside
        given = [*arguments, *self.values_before(index, captured)]
        return self._replace(plan=plan, arguments=given, inside=(*self.inside, place)).run()


def _branch(op: Op, selector: int) -> int:
    if op.kind.about.selector == "i1":
        return 0 if selector else 1
    return selector if 0 <= selector < len(op.regions) else len(op.regions) - 1


# ---------------------------------------------------------------------------------------------
# Pieces of a program, and their plans.


def _with_body(program: Program, body: Region) -> Program:
    args = tuple(f"%{v}" for v in body.args)
    return program._replace(
        body=body, arg_names=args, result_names=tuple(f"%{v}" for v in body.results)
    )


def _with_program(plan: Plan, program: Program) -> Plan:
    """The plan's decisions for another program that has some of the same values."""
    results = tuple(probe_sharding(plan, v) for v in program.body.results)
    problem = replace(plan.problem, propagated=replace(plan.propagated, program=program))
    return plan._replace(problem=problem, results=results)


def _until(plan: Plan, cut: int) -> Plan:
    """The plan of a program's first ops, with what is needed behind them as results."""
    program = plan.program
    body = program.body
    rest = Region((), body.ops[cut:], body.results)
    known = {v for op in body.ops[:cut] for v in op.results}
    needed = [v for v in free_values(rest) if v in known and program.types[v].dtype != "token"]
    return _with_program(plan, _with_body(program, Region(body.args, body.ops[:cut], (*needed,))))


def _region_program(plan: Plan, region: Region) -> Program:
    """A region as a program: what it reads from outside becomes arguments, or is made again."""
    producers, cheap = plan.problem.index.producers, plan.propagated.cheap
    captured: dict[Value, None] = {}
    made: dict[Value, Op] = {}

    def visit(value: Value) -> None:
        if value in cheap and value in producers:
            for operand in producers[value].operands:
                visit(operand)
            made[value] = producers[value]
        else:
            captured[value] = None

    for value in free_values(region):
        visit(value)
    ops = (*made.values(), *region.ops)
    return _with_body(plan.program, Region((*region.args, *captured), ops, region.results))


def probe_sharding(plan: Plan, value: Value) -> Sharding:
    """The planned sharding of a value, cut down to what a boundary takes: whole, even axes."""
    state = plan.states[value] or _use_of_cheap(plan, value)
    shape = plan.program.types[value].shape
    return Sharding(whole_axes(state.dims, shape, plan.mesh))


def _use_of_cheap(plan: Plan, value: Value) -> Sharding:
    """The sharding that the first use of a cheap value wants; cheap values are made per use."""
    cheap = plan.propagated.cheap
    for op in plan.program.walk():
        if value not in op.operands or op.regions:
            continue
        index = op.operands.index(value)
        if op.results[0] in cheap:
            outer = _use_of_cheap(plan, op.results[0])
            return making_choice(op, outer, plan.mesh).operands[index]
        if op.results[0] in plan.choices:
            return plan.choice(op).operands[index].full()
    return Sharding(((),) * plan.program.types[value].rank)


def _with_limit(plan: Plan, index: int) -> Plan:
    """The program up to a loop, which also ends after a number of iterations, a new argument.

    before: `%5 = while (%a = %1) cond { c } do { b }`
    after:  `%5, .. = while (%a = %1, %n = 0, %m = limit) cond { c and n < m } do { b, n + 1, m }`
    """
    program = plan.program
    loop = program.body.ops[index]
    cond, body = loop.regions
    b = Builder()
    b.types = list(program.types)
    limit = b.value(_I32)
    start, (zero,) = _scalars(b, lambda: (b.constant(0, "i32"),))
    count, most = b.value(_I32), b.value(_I32)
    test, (both,) = _scalars(
        b, lambda: (b.binary("and", cond.results[0], b.compare("LT", count, most)),)
    )
    new_cond = Region((*cond.args, count, most), (*cond.ops, *test), (both,))
    count, most = b.value(_I32), b.value(_I32)
    step, (following,) = _scalars(b, lambda: (b.binary("add", count, b.constant(1, "i32")),))
    new_body = Region(
        (*body.args, count, most), (*body.ops, *step), (*body.results, following, most)
    )
    results = (*loop.results, b.value(_I32), b.value(_I32))
    kind = OpKind(
        loop.name, (*loop.kind.operands, _I32, _I32), (*loop.kind.results, _I32, _I32),
        loop.kind.attrs,
    )  # fmt: skip
    limited = Op(kind, (*loop.operands, zero, limit), results, (new_cond, new_body), loop.loc)
    old = plan.choice(loop)
    choices = {
        op.results[0]: Choice((), (_SCALAR,) * len(op.operands), (_SCALAR,))
        for op in (*start, *test, *step)
    }
    more = (_SCALAR, _SCALAR)
    choices[results[0]] = Choice((), (*old.operands, *more), (*old.results, *more))
    plan = plan._replace(
        choices={**plan.choices, **choices},
        states=plan.states + (_SCALAR,) * (len(b.types) - len(program.types)),
        arguments=(*plan.arguments, _SCALAR),
    )
    ops = (*program.body.ops[:index], *start, limited)
    region = Region((*program.body.args, limit), ops, loop.results)
    return _with_program(plan, _with_body(program._replace(types=tuple(b.types)), region))


def _scalars(
    b: Builder, make: Callable[[], tuple[Value, ...]]
) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
    """The ops that `make` appends to the builder, and the values that it returns."""
    b.begin(isolated=True)
    wanted = make()
    return b.end((), ()).ops, wanted


# ---------------------------------------------------------------------------------------------
# Text.


def _place(op: Op) -> str:
    return f"{op.name} at {op.loc.source or 'an unknown place'}"


def _describe(plan: Plan, op: Op) -> str:
    """The op, where it comes from, and how its operands and results lie."""
    lines = [f"{format_op(op, plan.mesh)}", f"  at: {op.loc.source or 'an unknown place'}"]
    choice = plan.choices.get(op.results[0])
    for i, value in enumerate(op.operands):
        state = plan.states[value]
        have = format_sharding(state, plan.mesh) if state else "made for each use"
        needed = f", needed {format_sharding(choice.operands[i], plan.mesh)}" if choice else ""
        lines.append(f"  operand {i}: %{value} is {have}{needed}")
    for i, value in enumerate(op.results):
        state = plan.states[value] or probe_sharding(plan, value)
        lines.append(f"  result {i}: %{value} is {format_sharding(state, plan.mesh)}")
    return "\n".join(lines)
