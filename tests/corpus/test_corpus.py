"""Programs that nobody wrote for this compiler: partitioned equals `jax.jit`."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import pytest

import spmd
from benchmarks.corpus.program import MESHES, QUICK_MESH, Made, Program, mark
from benchmarks.corpus.programs import PROGRAMS
from spmd.compiler import timed
from spmd.planning.greedy import plan_greedily
from tests.close import assert_same_trees
from tests.programs import assert_marks_hold


@lru_cache(maxsize=2)
def reference(program: Program, mesh_name: str) -> tuple[Made, Any]:
    """The program, and what plain `jax.jit` makes of it."""
    made = program.made(spmd.make_mesh(**MESHES[mesh_name]))
    return made, jax.jit(made.fn)(*made.args)


def parameters() -> Iterator[Any]:
    """Every program on every mesh; the quick ones on one mesh are not marked heavy."""
    for program in PROGRAMS:
        for mesh in MESHES:
            heavy = program.heavy or mesh != QUICK_MESH
            marks = [pytest.mark.heavy] if heavy else []
            yield pytest.param(program, mesh, id=f"{program.name}-{mesh}", marks=marks)


@pytest.mark.thorough
@pytest.mark.parametrize(("program", "mesh_name"), list(parameters()))
def test_partitioned_equals_unpartitioned(program: Program, mesh_name: str) -> None:
    made, want = reference(program, mesh_name if program.on_mesh else QUICK_MESH)
    mesh = spmd.make_mesh(**MESHES[mesh_name])
    args = [mark(arg, word, mesh) for arg, word in zip(made.args, made.specs, strict=True)]
    compiled = spmd.jit(made.fn, mesh=mesh, options=spmd.Options(check=True)).compile(*args)
    assert_same_trees(compiled(*args), want)
    # One metric, in which nothing is better than the bound, and no greedy plan than this one.
    facts = compiled._facts()
    assert_marks_hold(facts.plan)
    greedy = timed(plan_greedily(facts.plan.problem), spmd.Options(check=True))
    assert facts.least_seconds <= compiled.cost <= greedy.run_seconds
