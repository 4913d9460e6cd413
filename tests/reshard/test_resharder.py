"""One object answers what reshards cost: equals, no way at all, and what manual regions hold."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.ir.program import Value
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import jax_mesh
from spmd.planning.plan import Plan
from spmd.reshard.paths import NO_WAY, Resharder, reshard
from tests.mesh.shardings import parse_sharding

MESH = spmd.Mesh(None, (4, 2), ("x", "y"), (1, 2))  # y crosses hosts: ways over x would be cheaper
TOPOLOGY = spmd.Topology("h200:8")


def sharding(text: str) -> Sharding:
    return parse_sharding(text, MESH)


ROWS, COLUMNS, WHOLE = (sharding(text) for text in ("[{y}, {}]", "[{}, {y}]", "[{}, {}]"))
STATES = (ROWS, COLUMNS, WHOLE)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Inside a manual region over x, rows over y become columns over y."""

    def body(a: Any) -> Any:
        a = spmd.mark_sharding(jnp.sin(a), MESH, ("y", None))
        return jnp.tanh(spmd.mark_sharding(jnp.cos(a), MESH, (None, "y")))

    over_x: Any = {"in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
    step = jax.shard_map(body, mesh=jax_mesh(MESH), **over_x, check_vma=False)
    struct = jax.ShapeDtypeStruct((16384, 4096), jnp.float32)
    return spmd.jit(step, mesh=MESH).lower(struct, topology=TOPOLOGY).stages.plan


@pytest.fixture(scope="module")
def resharder(plan: Plan) -> Resharder:
    return plan.problem.resharder


@pytest.fixture(scope="module")
def inside(plan: Plan) -> Value:
    return next(op for op in plan.program.walk() if op.name == "stablehlo.cosine").results[0]


def free_seconds(plan: Plan, value: Value, have: Sharding, wanted: Sharding) -> float:
    """What the same reshard takes where nothing is held."""
    return reshard(have, wanted, plan.program.types[value], MESH, TOPOLOGY).seconds


def test_equals_cost_nothing_and_what_cannot_be_is_infinite(
    resharder: Resharder, inside: Value
) -> None:
    product = sharding("[{}, {}] partial mul {y}")
    assert resharder.seconds(inside, ROWS, ROWS) == 0.0
    assert resharder.seconds(inside, WHOLE, product) == math.inf
    assert resharder.path(inside, WHOLE, product) is NO_WAY


def test_held_axes_help_no_value_inside(plan: Plan, resharder: Resharder, inside: Value) -> None:
    path = resharder.path(inside, ROWS, COLUMNS)
    held = set(MESH.axis_atoms["x"])
    assert all(held.isdisjoint(step.axes) for step in path.steps)
    assert path.seconds > free_seconds(plan, inside, ROWS, COLUMNS)
    (argument,) = plan.program.body.args
    assert resharder.seconds(argument, ROWS, COLUMNS) == free_seconds(plan, argument, ROWS, COLUMNS)


def test_a_plans_moves_are_the_programs_collectives(plan: Plan) -> None:
    (move,) = [move for move in plan.moves if move.bytes]
    assert (move.have, move.wanted) == (ROWS, COLUMNS)
    assert move.seconds == plan.problem.resharder.seconds(move.value, ROWS, COLUMNS)
    assert move.bytes == plan.program.types[move.value].bytes // 2 // 2  # half of each half


def test_tables_and_the_cheapest_copy_say_the_same(resharder: Resharder, inside: Value) -> None:
    table = resharder.table(inside, STATES, STATES[::-1])
    each = [[resharder.seconds(inside, s, n) for n in STATES[::-1]] for s in STATES]
    assert table.tolist() == each
    have, path = resharder.cheapest(inside, (COLUMNS, WHOLE), ROWS)
    assert (have, path.seconds) == (WHOLE, min(each[1][-1], each[2][-1]))
