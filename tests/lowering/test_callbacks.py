"""Callbacks in one device's program: on which device, linked in which order, kept by rewrites."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import spmd
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK
from spmd.ir.legality import check_program
from spmd.ir.program import Op, Region, has_effect
from spmd.lowering.expand import LINKED, expand, in_order
from tests.two_processes import run_both

X = np.ones((8, 4), np.float32)
SAME = jax.ShapeDtypeStruct(X.shape, X.dtype)


def lowered(fn: Any) -> spmd.Lowered:
    return spmd.jit(fn, mesh=spmd.make_mesh(data=4, model=2), in_specs=(("data", None),)).lower(X)


def in_a_loop_and_a_branch(x: Any) -> Any:
    def call(x: Any) -> Any:
        return io_callback(np.sin, SAME, x, ordered=True)

    def step(x: Any, i: Any) -> Any:
        return jax.lax.cond(i > 1, call, lambda x: x, call(x)), None

    return call(jax.lax.scan(step, call(x), jnp.arange(3))[0])


def calls(region: Region) -> list[Op]:
    found = []
    for op in region.ops:
        found += [call for inner in op.regions for call in calls(inner)]
        found += [op] if op.name == CALLBACK else []
    return found


def test_ordered_callbacks_are_one_chain() -> None:
    program = in_order(lowered(in_a_loop_and_a_branch).stages.optimized.program)
    check_program(program, "optimized")
    found = calls(program.body)
    assert len(found) == 4
    assert all(op.kind.attrs[LINKED] for op in found)
    (loop,) = [op for op in program.body.ops if op.is_loop]
    first, last = [op for op in program.body.ops if op.name == CALLBACK]
    assert loop.operands[-1] == first.results[-1]
    assert last.operands[-1] == loop.results[-1]
    body = loop.regions[1]
    (inside,) = [op for op in body.ops if op.name == CALLBACK]
    (branch,) = [op for op in body.ops if op.regions and calls(op.regions[1])]
    assert inside.operands[-1] == body.args[-1]
    assert [region.results[-1] for region in branch.regions] == [
        inside.results[-1],
        calls(branch.regions[1])[0].results[-1],
    ]
    assert body.results[-1] == branch.results[-1]


def test_programs_without_ordered_callbacks_are_returned_as_they_are() -> None:
    program = lowered(lambda x: (jax.debug.print("{}", x), x * 2)[1]).stages.optimized.program
    assert in_order(program) is program


def test_one_device_calls_and_the_check_is_made_where_it_failed() -> None:
    optimized = lowered(lambda x: io_callback(np.sin, SAME, x)).stages.optimized
    program = expand(optimized.program, optimized.mesh)
    check_program(program, "expanded")
    guarded = [op for op in program.body.ops if op.kind.about.region == "branches"]
    assert [op.regions[0].ops[-1].name for op in guarded] == [CALLBACK, CHECK_CALLBACK]
    assert not any(has_effect(inner) for op in guarded for inner in op.regions[1].ops)
    assert CALLBACK not in [op.name for op in program.body.ops]


def test_one_of_two_processes_is_called() -> None:
    script = Path(__file__).parents[1] / "launch/programs/calls_python.py"
    first, other = run_both(script)
    assert first["called"] == [32, 64, 128] * 2
    assert other["called"] == []
    assert first["results"] == other["results"] == [256, 256]
    assert "ValueError: this is what went wrong" in first["raised"]
    assert "raised in another process" in other["raised"]
