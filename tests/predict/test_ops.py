"""One judge: what an op takes is the same for all who weigh it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import spmd
from spmd.compiler import Trial, plan_problem, problem_for
from spmd.explain.costs import spent
from spmd.ir.description import CONSTANT
from spmd.ir.program import OpKind, Program, Region
from spmd.lowering.recompute import Costs
from spmd.lowering.rewrites.schedule import Clock
from spmd.mesh.sharding import Mark
from spmd.mesh.topology import Topology
from spmd.options import Options
from spmd.planning.choices import Choices
from spmd.planning.plan import Choice
from spmd.planning.problem import posed
from spmd.predict.ops import Transfer
from tests.ir.dialect.cases import CASES, MESH

H200S = Topology("h200:8")
OPTIONS = Options(memory_limit=1 << 50, cache_dir="none")


def ops_of_corpus() -> Iterator[Program]:
    """Ops of the programs of the rules' tests, two kinds of each, alone, arguments to results."""
    seen: dict[str, set[OpKind]] = {}
    for case in CASES:
        program = problem_for(spmd.jit(case.fn, mesh=MESH).request(*case.args)).program
        for op in program.walk():
            kind, count = op.kind, len(op.operands)
            kinds = seen.setdefault(kind.name, set())
            if op.regions or not op.results or not count or kind in kinds or len(kinds) == 2:
                continue
            kinds.add(kind)
            values = tuple(range(count + len(op.results)))
            args, results = values[:count], values[count:]
            yield program._replace(
                body=Region(args, (op._replace(operands=args, results=results),), results),
                types=(*kind.operands, *kind.results),
                arg_names=tuple(map(str, args)),
                result_names=tuple(map(str, results)),
            )


def planned(program: Program, choice: Choice | None = None) -> Trial:
    """The plan of one op whose operands and results lie as one choice wants them, or whole."""
    args = program.body.args
    dims: list[Any] = [((),) * program.types[v].rank for v in args]
    if choice is not None:
        dims = [state.dims for state in choice.operands]
    marks = {v: Mark(own, (False,) * len(own), "") for v, own in zip(args, dims, strict=True)}
    results: Any = [None] * len(program.body.results)
    if choice is not None:
        results = [state.full() for state in choice.results]
    return plan_problem(posed(program, MESH, marks, H200S, results, ()), OPTIONS)


@pytest.mark.thorough
def test_all_judges_say_the_same_of_an_op() -> None:
    """The plan's sum, the timeline, recomputation and the report; its bytes; its memory.

    Of an op whose share is one op of the local program: others are what rewrites made of them.
    """
    axes = [atoms for atoms in MESH.axis_atoms.values() if atoms]
    kinds, compared = 0, 0
    for program in ops_of_corpus():
        (op,) = program.body.ops
        whole = planned(program)
        choices = Choices(whole.plan.problem).placed(op, axes, None, ())
        kinds += 1
        split = choices[1 + 3 * (kinds % 2) :][:1]
        for trial in (whole, *(planned(program, choice) for choice in split)):
            local, plan, line = trial.optimized.program, trial.plan, trial.timeline
            parts = [part for part in local.walk() if part.name != CONSTANT]
            # Those made where they are read, and those whose piece has fewer dims to move.
            if len(parts) != 1 or op.results[0] in plan.problem.propagated.cheap:
                continue
            if parts[0].kind.is_renaming != op.kind.is_renaming:
                continue
            if plan.choice(op).operands != plan.arguments:  # of zeros' operands, pieces are cut
                continue
            compared += 1
            seconds = line.compute_seconds + line.comm_seconds
            reported = sum(part.seconds + part.hidden for part in spent(line, H200S))
            again = Costs(Clock(local, MESH, H200S), 0.0).again(parts[0])
            judged = [plan.seconds, reported, *([again] if np.isfinite(again) else [])]
            assert judged == pytest.approx([seconds] * len(judged), rel=0.01, abs=1e-12), op.kind
            transfer = Transfer.of(parts[0], MESH)
            sent = transfer.sent_bytes(MESH, H200S) if transfer else 0
            assert sum(move.bytes for move in plan.moves) == sent, op.kind
    assert compared > 0.8 * kinds > 100


def test_gathers_take_what_is_planned_for_them() -> None:
    """A product that wants its operand whole: the copy's seconds and bytes, in all books."""
    mesh = spmd.Mesh(None, (8,), ("data",))
    args = [np.ones((512, 512), np.float32)] * 2
    specs: Any = ((None, "data"), (None, None))
    jitted = spmd.jit(
        lambda x, y: x @ y, mesh=mesh, in_specs=specs, out_specs=(None, None), options=OPTIONS
    )
    lowered = jitted.lower(*args, topology=H200S)
    plan, line = lowered.stages.plan, lowered.timeline
    assert plan.seconds == pytest.approx(line.compute_seconds + line.comm_seconds, rel=0.01)
    assert sum(move.bytes for move in plan.moves) == sum(c.bytes for c in lowered.collectives)
    assert sum(move.seconds for move in plan.moves) == pytest.approx(line.comm_seconds)
