"""`verify`: compares the partitioned program with the whole one, and finds the first wrong op.

The search is a bisection. At a *cut* behind the first n ops, both programs run these ops, and the
values that later ops read are compared. If the first wrong op is a loop, both programs run its body
by itself for one iteration after the other, and the first one that differs is searched likewise.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from spmd.errors import ArgumentError
from spmd.ir.dialect.callbacks import INSPECT
from spmd.ir.dialect.manual import MANUAL
from spmd.ir.program import Op, Program, Region, Value, free_values
from spmd.ir.rewrite import edit_ops
from spmd.ir.text import format_op
from spmd.ir.types import TensorType, numpy_dtype
from spmd.lowering.emit import Emitted, emit
from spmd.lowering.execute import executable, executable_on, on_own_mesh, without_shardings
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding, spec_text
from spmd.planning.plan import Plan
from spmd.planning.problem import whole_axes

Arrays = list[Any]
Run = Callable[[Arrays], Arrays]  # a program, from flat host arrays to flat host arrays
Lower = Callable[[Plan], Emitted]  # the stages from the plan to the emitted program

_MANUAL = "in a program with a jax.shard_map no single op is looked for"
_NOT_REPRODUCED = (
    "the program as it was imported agrees with itself, partitioned without XLA's options and "
    "donation: the module was read wrongly, or these matter"
)


class Culprit(NamedTuple):
    """Holds the first op whose value differs from the unpartitioned program's, and where it is."""

    op: Op | None  # None where only the reshard of a result can be at fault
    text: str  # the op, its operands' and results' shardings and its source line
    inside: tuple[str, ...]  # the loops and branches around it, outermost first
    comparisons: "tuple[Comparison, ...]"  # of the values that differ at the cut behind it

    def __str__(self) -> str:
        lines = [self.text]
        lines += [f"  inside: {place}" for place in self.inside]
        lines += [f"  {comparison}" for comparison in self.comparisons]
        return "\n".join(lines)


class Verification(NamedTuple):
    """Holds the outcome of `verify`; it is true if all results agree, and `str` makes a report."""

    ok: bool
    comparisons: "tuple[Comparison, ...]"  # one for each result
    culprit: Culprit | None = None  # the first op whose value differs, if one was found
    problem: str = ""  # what is wrong in words, where no op is to blame

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = f"{len(self.comparisons)} results agree with"
        if not self.ok:
            wrong = sum(not c.ok for c in self.comparisons)
            head = f"{wrong} of {len(self.comparisons)} results differ from"
        lines = [f"{head} the unpartitioned program", *(f"  {c}" for c in self.comparisons)]
        if self.problem:
            lines.append(self.problem)
        if self.culprit is not None:
            lines += ["the first op whose value differs:", str(self.culprit)]
        return "\n".join(lines)


def verify(
    plan: Plan,
    module: Any,
    run: Run,
    arguments: Sequence[Any],
    lower: Lower,
    rtol: float | None = None,
    atol: float | None = None,
) -> Verification:
    """Runs the partitioned and the whole program, compares results, and finds the first wrong op.

    `run` calls the partitioned program, compiled; `lower` emits the program of a plan. `module` is
    the whole program. It runs on one device, or with manual regions on all of the mesh, partitioned
    by XLA, and then no op is looked for; each device that is used needs memory for all of it.
    Arguments are copied, not donated. `rtol` and `atol` are as in `Tolerance`; if left out, `rtol`
    is chosen by dtype.
    ArgumentError: some of an argument is on devices of other processes.
    """
    program = plan.program
    for argument, name in zip(arguments, program.arg_names, strict=False):  # then come constants
        if not getattr(argument, "is_fully_addressable", True):
            raise ArgumentError(
                f"argument {name} lies on other processes as well: verify runs the whole program "
                "in one",
                fix="verify a smaller mesh in one process",
            )
    given = host_arrays(arguments)
    tolerance = Tolerance(default_rtol(program.types) if rtol is None else rtol, atol)
    text = without_shardings(module)
    is_manual = any(op.name == MANUAL for op in program.walk())
    want = _text_run(text, program, plan.mesh if is_manual else _first(plan.mesh))(given)
    got = host_arrays(run([a.copy() for a in given]))
    comparisons = compare_results(program, got, want, tolerance)
    if all(c.ok for c in comparisons):
        return Verification(True, comparisons)
    if is_manual:
        return Verification(False, comparisons, problem=_MANUAL)
    given += [constant.array() for constant in program.constants]
    culprit = _Search(plan, given, lower, tolerance).run()
    return Verification(False, comparisons, culprit, "" if culprit else _NOT_REPRODUCED)


_TOLERANCE_BITS = {64: 1e-9, 32: 1e-4, 16: 3e-2, 8: 3e-1, 4: 5e-1}
"""Bits of the narrowest float type that a program computes in -> relative tolerance."""


class Comparison(NamedTuple):
    """Holds how far a value of the partitioned program is from the whole program's."""

    name: str
    type: TensorType
    max_abs: float  # the largest difference
    max_rel: float  # the same over the expected result's largest magnitude
    at: tuple[int, ...]  # index of the element that exceeds its tolerance most
    got: Any  # that element in the partitioned program
    wanted: Any  # that element in the whole program
    ok: bool  # every element agrees within the tolerance; integers and predicates exactly

    def __str__(self) -> str:
        sign = "ok" if self.ok else "DIFFERS"
        text = f"{sign:<8}{self.name}: {self.type}, largest difference {self.max_abs:.3g}"
        if self.max_abs:
            text += f" (relative {self.max_rel:.3g})"
        if not self.ok:
            text += f", at {list(self.at)} it is {self.got} instead of {self.wanted}"
        return text


class Tolerance(NamedTuple):
    """Says when two floats agree: if they differ by at most `atol + rtol * |wanted|`.

    If left out, `atol` is `rtol` times the largest magnitude of the result: the rounding error of a
    sum depends on its terms, which may be large where the sum itself is nearly 0. With `rtol=1e-4`
    and magnitudes up to 100, elements near 0 may differ by 0.01.
    """

    rtol: float
    atol: float | None = None


def default_rtol(types: Iterable[TensorType]) -> float:
    """Returns a relative tolerance for the narrowest float of these types; 1e-4 without floats."""
    bits = [_float_bits(type_.dtype) for type_ in types]
    return _TOLERANCE_BITS[min((b for b in bits if b), default=32)]


def _float_bits(dtype: str) -> int:
    kind = numpy_dtype(dtype)
    return int(jnp.finfo(kind).bits) if jnp.issubdtype(kind, jnp.inexact) else 0


def compare(
    name: str, type_: TensorType, got: Any, wanted: Any, tolerance: Tolerance
) -> Comparison:
    """Compares two arrays, non-floats exactly; NaN equals NaN, an infinity only an equal one."""
    x, y = _wide(got), _wide(wanted)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (x == y) | ((x != x) & (y != y))
        off = np.where(same, 0.0, np.abs(x - y).astype(np.float64))
    off = np.where(np.isnan(off), np.inf, off)
    if not off.size:
        return Comparison(name, type_, 0.0, 0.0, (), None, None, True)
    # `at` is where the tolerance is exceeded most, not where the difference is largest: with `rtol`
    # large elements may be off by more.
    size = np.where(np.isfinite(y), np.abs(y), 0.0)
    allowed = np.zeros(())
    if _float_bits(type_.dtype):
        atol = tolerance.rtol * size.max() if tolerance.atol is None else tolerance.atol
        allowed = atol + tolerance.rtol * size
    excess = np.where(off > 0, off - allowed, -np.inf)
    at = np.unravel_index(int(excess.argmax()), off.shape)
    worst = float(off.max())
    relative = worst / float(size.max()) if size.max() else worst
    elements = np.asarray(got)[at], np.asarray(wanted)[at]
    is_ok = not bool((off > allowed).any())
    return Comparison(name, type_, worst, relative, tuple(map(int, at)), *elements, is_ok)


def compare_results(
    program: Program, got: Iterable[Any], wanted: Iterable[Any], tolerance: Tolerance
) -> tuple[Comparison, ...]:
    """Returns a `Comparison` for each result of a program, given the results of two runs."""
    values = program.body.results
    return tuple(
        compare(name, program.types[v], a, b, tolerance)
        for name, v, a, b in zip(program.result_names, values, got, wanted, strict=True)
    )


def _wide(array: Any) -> Any:
    """Converts an array to a dtype of at least 64 bits, in which differences are exact enough."""
    elements = np.asarray(array)
    if elements.dtype.kind == "c":
        return elements.astype(np.complex128)
    if elements.dtype.kind in "iu" and elements.dtype.itemsize == 8:
        return elements.astype(np.longdouble)
    return elements.astype(np.float64)


def whole_run(program: Program, mesh: Mesh) -> Run:
    """Compiles a program without marks for one device; returns a function: arguments -> results."""
    bare = edit_ops(
        program, lambda _, op, __: op.operands if op.is_mark or op.name == INSPECT else None
    )
    return _text_run(emit(bare, mesh), program, _first(mesh))


def _text_run(text: str, program: Program, mesh: Mesh) -> Run:
    types = tuple(program.types[v] for v in program.body.results)
    run = executable_on(text, types, mesh, program.callbacks)
    return lambda arguments: host_arrays(run(*arguments))


def _first(mesh: Mesh) -> Mesh:
    return Mesh(mesh.device_ids[:1], (1,), ("one",))


def host_arrays(arrays: Sequence[Any]) -> Arrays:
    """Returns arrays as numpy arrays on the host."""
    return [np.asarray(array) for array in arrays]


class _Search(NamedTuple):
    """Searches a program, or a loop's body, for the first op whose value partitioning changes."""

    plan: Plan
    arguments: Arrays  # for each argument of the block a host array
    lower: Lower  # how a plan becomes a program to run
    tolerance: Tolerance  # the largest difference that still counts as equal
    inside: tuple[str, ...] = ()

    def run(self) -> Culprit | None:
        """Finds the first op with a wrong value, or a wrong reshard; None if all results agree."""
        # Cut n is behind n ops; one more cut has the results in the shardings
        # that are returned. Of 4 ops the third is wrong: cut 2 agrees, cut 3 differs.
        # Values that no later op reads are not compared, so a difference may be gone again later.
        # The search still ends at an op behind which something differs, and before it nothing.
        ops = self.plan.program.body.ops
        wrong_at = cache(self.wrong_at)
        if not wrong_at(len(ops) + 1):
            return None
        equal = bisect_left(range(1, len(ops) + 1), True, key=lambda cut: bool(wrong_at(cut)))
        wrong = wrong_at(equal + 1)
        if equal == len(ops):
            return Culprit(None, "only the reshard of a result differs", self.inside, wrong)
        op = ops[equal]
        inner = self.descend_loop(equal, op) if op.is_loop else None
        return inner or self.culprit(op, wrong)

    def culprit(self, op: Op, wrong: tuple[Comparison, ...]) -> Culprit:
        plan = self.plan
        lines = [format_op(op, plan.mesh), f"  at: {_line(op)}"]
        choice = plan.choices.get(op.results[0])
        for i, value in enumerate(op.operands):
            state = plan.states[value]
            have = spec_text(state, plan.mesh) if state else "made for each use"
            needed = f", needed {spec_text(choice.operands[i], plan.mesh)}" if choice else ""
            lines.append(f"  operand {i}: %{value} is {have}{needed}")
        for i, value in enumerate(op.results):
            state = plan.states[value] or probe_sharding(plan, value)
            lines.append(f"  result {i}: %{value} is {spec_text(state, plan.mesh)}")
        return Culprit(op, "\n".join(lines), self.inside, wrong)

    def wrong_at(self, cut: int) -> tuple[Comparison, ...]:
        """Compares values of the first `cut` ops that are read later; returns those that differ.

        If `cut` exceeds the number of ops, the results are compared, in their final shardings.
        """
        plan, program = self.plan, self.plan.program
        if cut > len(program.body.ops):  # constants are passed as other arguments are
            passed = _with_program(plan, program._replace(constants=()))
            plan = passed._replace(results=plan.results)
        else:  # what is needed behind the cut becomes the results
            args, ops, results = program.body
            known = {v for op in ops[:cut] for v in op.results}
            behind = [v for v in free_values(Region((), ops[cut:], results)) if v in known]
            needed = tuple(v for v in behind if program.types[v].dtype != "token")
            plan = _with_program(plan, _with_body(program, Region(args, ops[:cut], needed)))
        return self.differing(plan)(self.arguments) if plan.results else ()

    def differing(self, plan: Plan) -> Callable[[Arrays], tuple[Comparison, ...]]:
        """Returns a function that runs a plan's program split and whole, and tells what differs."""
        emitted = self.lower(plan)
        partitioned, whole = executable(emitted), whole_run(plan.program, plan.mesh)

        def differing_values(arguments: Arrays) -> tuple[Comparison, ...]:
            with on_own_mesh(emitted.boundary_mesh):
                got = host_arrays(partitioned(*arguments))
            compared = compare_results(plan.program, got, whole(arguments), self.tolerance)
            return tuple(each for each in compared if not each.ok)

        return differing_values

    def values_before(self, index: int, values: Sequence[Value]) -> Arrays:
        body = self.plan.program.body
        program = _with_body(self.plan.program, Region(body.args, body.ops[:index], tuple(values)))
        return whole_run(program, self.plan.mesh)(self.arguments)

    def descend_loop(self, index: int, op: Op) -> Culprit | None:
        """Finds the first wrong op of the first wrong iteration of `op`; None if none is found."""
        # The whole program makes the carries of every iteration, so that an error in one does not
        # reach the next: the body is always compared on equal inputs.
        condition, body = (_region_program(self.plan, region) for region in op.regions)
        states = [self.plan.states[v] for v in body.body.args]
        if any(state is not None and state.partial for state in states):
            return None
        arguments = tuple(probe_sharding(self.plan, v) for v in body.body.args)
        plan = _with_program(self.plan, body)._replace(arguments=arguments)
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
                place = f"iteration {iteration} of {op.name} at {_line(op)}"
                return self._replace(plan=plan, arguments=given, inside=(*self.inside, place)).run()
            carries = step(given)
        return None


def _with_body(program: Program, body: Region) -> Program:
    args, results = (tuple(f"%{v}" for v in end) for end in (body.args, body.results))
    return program._replace(body=body, arg_names=args, result_names=results, constants=())


def _with_program(plan: Plan, program: Program) -> Plan:
    """Returns the plan for a part of its program, with results sharded as by `probe_sharding`."""
    results = tuple(probe_sharding(plan, v) for v in program.body.results)
    problem = replace(plan.problem, propagated=replace(plan.propagated, program=program))
    return plan._replace(problem=problem, results=results)


def _region_program(plan: Plan, region: Region) -> Program:
    """Returns a region as a program; outside values become arguments, cheap ones are recomputed."""
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
    """Returns the sharding to compare a value in: as planned, but of whole axes and not partial.

    Atoms that do not divide a dim are left out. A value that each use makes anew is replicated.
    """
    shape, state = plan.program.types[value].shape, plan.states[value]
    return Sharding(whole_axes(state.dims if state else ((),) * len(shape), shape, plan.mesh))


def _line(op: Op) -> str:
    return op.loc.source or "an unknown place"
