"""The whole program is indexed once, however many stages ask."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.ir.control_flow import UNKNOWN_TRIPS, Index
from tests.programs import mlp


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize("name", ["producers", "users", "held"])
def test_each_table_is_made_once_for_a_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []  # kept, as a program that is gone could share its id with a later one
    table = vars(Index)[name]
    make = table.func

    def counted(index: Index) -> Any:
        seen.append(index.program)
        return make(index)

    monkeypatch.setattr(table, "func", counted)
    plan = mlp(spmd.make_mesh(data=4, model=2)).lower().stages.plan
    assert [id(program) for program in seen].count(id(plan.program)) == 1


def test_loops_run_as_often_as_their_condition_says_or_as_is_guessed() -> None:
    def step(x: Any, n: Any) -> Any:
        x = jax.lax.fori_loop(0, 5, lambda _, x: jnp.sin(x), x)
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.cos(x), x)

    mesh = spmd.Mesh(None, (2,), ("x",))
    args = (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    plan = spmd.jit(step, mesh=mesh).lower(*args, topology=spmd.Topology("h200:8")).stages.plan
    found = plan.problem.index
    loops = [op for op in plan.program.walk() if op.name == "stablehlo.while"]
    assert [found.trips[op.results[0]] for op in loops] == [5, None]
    assert [found.runs(op) for op in loops] == [5, UNKNOWN_TRIPS]
    assert {found.runs(op) for op in plan.program.walk() if op not in loops} == {1}
