"""The first op of a program whose value differs between the partitioned and the whole program.

A *cut* behind some ops of a program is compared by the values that are still needed behind it.
Nothing differs at the cut before the first op, something does at the one behind the last. The
search halves this interval, running both programs up to the cut, until one op is left. If that is a
loop, its body is run by itself for one iteration after the other, and the first in which it differs
is searched in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from spmd.ir.dialect.manual import MANUAL
from spmd.ir.program import Op, Program, Region, Value, free_values
from spmd.ir.rewrite import rewrite_ops
from spmd.ir.text import format_op
from spmd.lowering.emit import emit
from spmd.lowering.emitted import Emitted
from spmd.lowering.execute import executable, executable_on, on_own_mesh
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, format_sharding
from spmd.mesh.spec import jax_mesh
from spmd.planning.choices import making_choice
from spmd.planning.plan import Plan
from spmd.planning.problem import whole_axes
from spmd.verify.compare import Comparison, Tolerance, compare_results

Arrays = list[Any]
Run = Callable[[Arrays], Arrays]  # a program, from flat host arrays to flat host arrays
Lower = Callable[[Plan], Emitted]  # the stages from the plan to the emitted program


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


def whole_run(program: Program, mesh: Mesh) -> Run:
    """The global program as it is: see `text_run`."""
    bare = rewrite_ops(program, lambda b, op, operands: operands if op.is_mark else None)
    return text_run(emit(bare, mesh), program, mesh)


def text_run(text: str, program: Program, mesh: Mesh) -> Run:
    """A whole program compiled for the mesh's first device; with manual regions for all, by XLA."""
    types = tuple(program.types[v] for v in program.body.results)
    is_manual = any(op.name == MANUAL for op in program.walk())
    where = mesh if is_manual else jax_mesh(mesh).devices.flat[0]
    run = executable_on(text, types, where, program.callbacks)
    return lambda arguments: host_arrays(run(*arguments))


def host_arrays(arrays: Sequence[Any]) -> Arrays:
    """Arrays as numpy's."""
    return [np.asarray(array) for array in arrays]


class Search(NamedTuple):
    """The search in one block: the program, or a body taken by itself with a plan of its own."""

    plan: Plan
    arguments: Arrays  # for each argument of the block a host array
    lower: Lower  # how a plan becomes a program to run
    tolerance: Tolerance  # the largest difference that still counts as equal
    inside: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the block."""
        return self.plan.program.body.ops

    def run(self) -> Culprit | None:
        """The first op whose value differs, or None when both programs agree after all."""
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
        """An op of the block, and where it is."""
        return Culprit(op, _describe(self.plan, op), self.inside + inside, wrong)

    # Cuts.

    def wrong_at(self, cut: int) -> tuple[Comparison, ...]:
        """The values that differ behind the first `cut` ops; see `run` for the last cut."""
        plan = _passed(self.plan) if cut > len(self.ops) else _until(self.plan, cut)
        return self.differing(plan)(self.arguments) if plan.results else ()

    def differing(self, plan: Plan) -> Callable[[Arrays], tuple[Comparison, ...]]:
        """A function of a plan's arguments that runs both programs and returns what differs."""
        emitted = self.lower(plan)
        partitioned = executable(emitted)
        whole = whole_run(plan.program, plan.mesh)

        def differing_values(arguments: Arrays) -> tuple[Comparison, ...]:
            with on_own_mesh(emitted.boundary_mesh):
                got = host_arrays(partitioned(*arguments))
            want = whole(arguments)
            compared = compare_results(plan.program, got, want, self.tolerance)
            return tuple(comparison for comparison in compared if not comparison.ok)

        return differing_values

    def values_before(self, index: int, values: Sequence[Value]) -> Arrays:
        """The values that the whole program has in front of an op."""
        body = self.plan.program.body
        program = _with_body(self.plan.program, Region(body.args, body.ops[:index], tuple(values)))
        return whole_run(program, self.plan.mesh)(self.arguments)

    # Control flow.

    def descend(self, index: int, op: Op, wrong: tuple[Comparison, ...]) -> Culprit | None:
        """The culprit inside of an op; None if nothing in there differs by itself."""
        if op.name == MANUAL:  # what is inside has no value on the whole program's side
            return self.culprit(op, wrong, f"{_place(op)}, taken as one op")
        if op.is_loop:
            return self.descend_loop(index, op)
        if op.regions:
            (selector,) = self.values_before(index, op.operands[:1])
            number, last = int(selector), len(op.regions) - 1
            if op.kind.about.selector == "i1":
                number = 0 if number else 1
            elif not 0 <= number <= last:
                number = last
            branch = _region_program(self.plan, op.regions[number])
            captured = self.values_before(index, branch.body.args)
            plan = _piece_plan(self.plan, branch)
            return plan and self.search(plan, captured, f"branch {number} of {_place(op)}")
        return None

    def descend_loop(self, index: int, op: Op) -> Culprit | None:
        """Searches the first iteration whose body differs."""
        # The whole program makes the carries of every iteration, so that an error in one does not
        # reach the next: the body is always compared on equal inputs.
        condition, body = (_region_program(self.plan, region) for region in op.regions)
        plan = _piece_plan(self.plan, body)
        if plan is None:
            return None
        carries = self.values_before(index, op.operands)
        tested, read = (
            self.values_before(index, program.body.args[len(carries) :])
            for program in (condition, body)
        )
        goes_on, step = (whole_run(program, self.plan.mesh) for program in (condition, body))
        differing = self.differing(plan)
        iteration = 0
        while goes_on([*carries, *tested])[0]:
            iteration += 1
            given = [*carries, *read]
            if differing(given):
                return self.search(plan, given, f"iteration {iteration} of {_place(op)}")
            carries = step(given)
        return None

    def search(self, plan: Plan, arguments: Arrays, place: str) -> Culprit | None:
        """Searches a piece of the program as one of its own."""
        inside = (*self.inside, place)
        return self._replace(plan=plan, arguments=arguments, inside=inside).run()


# ---------------------------------------------------------------------------------------------
# Pieces of a program, and their plans.


def _with_body(program: Program, body: Region) -> Program:
    args = tuple(f"%{v}" for v in body.args)
    return program._replace(
        body=body, arg_names=args, result_names=tuple(f"%{v}" for v in body.results), constants=()
    )


def _with_program(plan: Plan, program: Program) -> Plan:
    """The plan's decisions for another program that has some of the same values."""
    results = tuple(probe_sharding(plan, v) for v in program.body.results)
    problem = replace(plan.problem, propagated=replace(plan.propagated, program=program))
    return plan._replace(problem=problem, results=results)


def _passed(plan: Plan) -> Plan:
    """The plan of a program to which constants are passed as other arguments are."""
    passed = _with_program(plan, plan.program._replace(constants=()))
    return passed._replace(results=plan.results)


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


def _piece_plan(plan: Plan, piece: Program) -> Plan | None:
    """The plan of a region's program; None if an argument is partial, for none can be given."""
    states = [plan.states[v] for v in piece.body.args]
    if any(state is not None and state.partial for state in states):
        return None
    arguments = tuple(probe_sharding(plan, v) for v in piece.body.args)
    return _with_program(plan, piece)._replace(arguments=arguments)


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
