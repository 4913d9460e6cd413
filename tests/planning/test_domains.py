"""What ops choose from: sums flow only where they arrive, and scalars are paid for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.compiler import compile_module
from spmd.planning.choices import Choices
from spmd.planning.units import OP, domains_of, units_of

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))
H200 = spmd.Topology("h200:8")


def planned(fn: Callable[..., Any], *shapes: tuple[int, ...], specs: Any = None) -> Any:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jitted = spmd.jit(fn, mesh=MESH, in_specs=specs)
    return compile_module(jitted.request(*args, topology=H200), spmd.Options(progress=False)).plan


def test_sums_flow_only_where_they_arrive() -> None:
    problem = planned(lambda x, w, b: jnp.tanh(x @ w * b) * b, (64, 64), (64, 64), (64, 64)).problem
    units, choices = units_of(problem), Choices(problem)
    axes = [atoms for atoms in problem.mesh.axis_atoms.values() if atoms]
    domains = domains_of(problem, units, choices, axes)
    leave = {
        unit.op.label + str(number): any(c.results[0].partial for c in made)
        for number, (unit, made) in enumerate(zip(units.units, domains.choices, strict=True))
        if unit.role == OP and unit.op is not None
    }
    product, scaled, tanh, again = leave.values()
    assert product and scaled, "a product over a split dim leaves a sum, which may be scaled"
    assert not tanh and not again, "behind tanh there is none, and none begins anew"


@pytest.mark.parametrize("fn", [lambda x: x - x.max(), jax.nn.softmax], ids=["max", "softmax"])
def test_scalars_that_only_broadcasts_read_are_paid_for(fn: Callable[..., Any]) -> None:
    plan = planned(fn, (4096,), specs=((("data", "model"),),))
    assert sum(move.seconds for move in plan.moves) > 1e-5
    assert plan.seconds == pytest.approx(plan.run_seconds, rel=0.05)
