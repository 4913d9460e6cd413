"""Barriers of several values: planned apart, run as written."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import spmd
from benchmarks.programs.conditions import small_machine
from benchmarks.programs.remat import CHECKPOINTS, gradient
from spmd.frontend.normalize import separate
from spmd.ir.legality import check_program
from spmd.ir.program import Op, Program
from tests.ir.examples import program_of

X = np.random.default_rng(0).random((8, 16), np.float32)


def separated(fn: Any, *args: Any) -> tuple[Program, Program]:
    """The program as it is imported, and with its ops apart."""
    before = program_of(fn, *args)
    after = separate(before)
    check_program(after)
    return before, after


def named(program: Program, name: str) -> list[Op]:
    return [op for op in program.walk() if op.name == f"stablehlo.{name}"]


def test_a_barrier_becomes_one_for_each_operand() -> None:
    before, after = separated(lambda *xs: lax.optimization_barrier(xs), X, X.T, X[0])
    assert [len(op.results) for op in named(before, "optimization_barrier")] == [3]
    assert [len(op.results) for op in named(after, "optimization_barrier")] == [1, 1, 1]
    assert separate(after) is after


@pytest.mark.usefixtures("devices8")
def test_each_operand_of_a_barrier_may_have_the_axis() -> None:
    def fn(x: Any, y: Any) -> Any:
        return lax.optimization_barrier((x * 2, y * 3))

    mesh = spmd.make_mesh(data=8)
    specs = (("data", None), (None, "data"))
    jitted = spmd.jit(fn, mesh=mesh, in_specs=specs, options=spmd.Options(check=True))
    compiled = jitted.compile(X, X.T.copy())
    assert not compiled.collectives
    local = compiled.stages.partitioned.program
    assert [len(op.results) for op in named(local, "optimization_barrier")] == [2]
    for got, want in zip(compiled(X, X.T.copy()), fn(X, X.T), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("stack", "policy"),
    [("scan", "nothing_saveable"), ("scan", "everything_saveable"), ("unrolled", "dots_saveable")],
)
def test_recomputation_sends_what_it_would_without_a_barrier(stack: str, policy: str) -> None:
    mesh = spmd.make_mesh(data=4, model=2)
    rule = getattr(jax.checkpoint_policies, policy)
    sent = []
    for prevent_cse in (True, False):
        CHECKPOINTS["tested"] = partial(jax.checkpoint, prevent_cse=prevent_cse, policy=rule)
        built = gradient(mesh, "mlp", "tested", stack)
        planner: Any = "greedy" if stack == "scan" else "exact"
        options = spmd.Options(topology=small_machine(), planner=planner)
        lowered = spmd.jit(built.fn, mesh=mesh, options=options).lower(*built.args)
        sent.append(sum(c.bytes * c.count for c in lowered.collectives))
    assert sent[0] == pytest.approx(sent[1], rel=0.02)
