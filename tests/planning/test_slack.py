"""Slack: what a device computes between making a value and reading it."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import Op
from spmd.mesh.sharding import Axes
from spmd.planning.choices import Choices
from spmd.planning.network import slack_of
from spmd.planning.problem import Problem
from spmd.planning.units import units_of
from spmd.propagation.projection import unsplit

pytestmark = pytest.mark.usefixtures("devices8")

X = jax.ShapeDtypeStruct((64, 256), jnp.float32)
W = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def posed(fn: Callable[..., Any], *args: Any) -> Problem:
    mesh = spmd.make_mesh(data=8)
    first = spmd.mark_sharding(args[0], mesh, ("data",))
    return spmd.jit(fn, mesh=mesh).lower(first, *args[1:]).stages.plan.problem


def arithmetic(choices: Choices, op: Op) -> float:
    whole: tuple[Axes, ...] = unsplit(rule_of(op.kind))
    return choices.own_seconds(op, whole) / choices.mesh.size


def test_weights_have_the_layers_before_them_and_what_layers_hand_on_has_nothing() -> None:
    problem = posed(lambda x, a, b, c: x @ a @ b @ c, X, W, W, W)
    choices, units = Choices(problem), units_of(problem, radius=8)
    slack = slack_of(choices, units)
    x, *weights = problem.program.body.args
    products = [op for op in problem.program.body.ops if op.name == "stablehlo.dot_general"]
    assert len(products) == 3

    def between(value: int, op: Op) -> float:
        return slack[(*units.of[value], units.of[op.results[0]][0])]

    assert between(x, products[0]) == 0.0
    before = 0.0
    for weight, product in zip(weights, products, strict=True):
        assert between(weight, product) == pytest.approx(before)
        before += arithmetic(choices, product)
    for first, second in itertools.pairwise(products):
        assert between(first.results[0], second) == pytest.approx(0.0, abs=1e-12)


def test_what_is_handed_to_a_trip_is_there_when_it_begins() -> None:
    def fn(x: Any, w: Any, v: Any) -> Any:
        return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer) @ v, None), x, w, length=16)[0]

    problem = posed(fn, X, jax.ShapeDtypeStruct((16, 256, 256), jnp.float32), W)
    loops = [op for op in problem.program.walk() if op.is_loop]
    assert loops  # sixteen trips are not worth being written out
    choices, units = Choices(problem), units_of(problem, radius=8)
    slack = slack_of(choices, units)
    first, second = (op for op in problem.program.walk() if op.name == "stablehlo.dot_general")
    v = second.operands[1]
    found = slack[(*units.of[v], units.of[second.results[0]][0])]
    assert arithmetic(choices, first) <= found < 16 * arithmetic(choices, first)
