"""`verify`: the partitioned program against the whole one, on the same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from spmd.errors import ArgumentError
from spmd.lowering.execute import without_shardings
from spmd.planning.plan import Plan
from spmd.verify.bisect import Culprit, Lower, Run, Search, host_arrays, text_run, whole_run
from spmd.verify.compare import Comparison, Tolerance, compare_results, default_rtol

_READ_WRONGLY = "the module was read wrongly: as imported and not partitioned, it differs as well"
_NOT_REPRODUCED = "partitioned once more, without XLA's options and donation, the results agree"


class Verification(NamedTuple):
    """The outcome of `verify`; it prints as a report, and is true when all results agree.

    Attributes:
      ok: whether every result agrees.
      comparisons: one for each result.
      culprit: the first op whose value differs, where one was looked for and found.
      problem: what is wrong in words, where no op is to blame.
    """

    ok: bool
    comparisons: tuple[Comparison, ...]
    culprit: Culprit | None = None
    problem: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        wrong = sum(not c.ok for c in self.comparisons)
        head = f"{len(self.comparisons)} results agree with the unpartitioned program"
        if not self.ok:
            head = (
                f"{wrong} of {len(self.comparisons)} results differ from the unpartitioned program"
            )
        lines = [head, *(f"  {c}" for c in self.comparisons)]
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
    """Runs both programs, compares every result, and if one differs looks for the wrong op.

    The whole program runs on one device, which has to have room for it. One with manual regions
    runs on all of the mesh, partitioned by XLA, and every device has to have room for it.

    Args:
      run: the compiled program, from flat arguments to flat results.
      arguments: flat arguments; they are copied, so donation does not reach them.
      lower: the stages from a plan to an emitted module.
      rtol, atol: the tolerance of floats; by dtype when left out, see `Tolerance`.

    Raises:
      ArgumentError: an argument that this process does not hold whole.
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
    want = text_run(without_shardings(module), program, plan.mesh)(given)
    got = host_arrays(run([a.copy() for a in given]))
    comparisons = compare_results(program, got, want, tolerance)
    # The imported program, run whole, lies between the two: if it differs from the module already,
    # the importer is to blame, and no op of the partitioned program.
    if all(c.ok for c in comparisons):
        return Verification(True, comparisons)
    given += [constant.array() for constant in program.constants]
    imported = whole_run(program, plan.mesh)(given)
    if not all(c.ok for c in compare_results(program, imported, want, tolerance)):
        return Verification(False, comparisons, problem=_READ_WRONGLY)
    culprit = Search(plan, given, lower, tolerance).run()
    return Verification(False, comparisons, culprit, "" if culprit else _NOT_REPRODUCED)
