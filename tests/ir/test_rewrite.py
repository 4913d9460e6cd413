"""Transposes of transposes are one, and none where they undo each other."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd

pytestmark = pytest.mark.usefixtures("devices8")

X = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
ORDERS = list(itertools.permutations(range(3)))


def transposes(lowered: spmd.Lowered) -> int:
    return sum(op.name == "stablehlo.transpose" for op in lowered.stages.program.walk())


@given(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=4))
def test_a_chain_of_transposes_is_at_most_one(orders: list[tuple[int, ...]]) -> None:
    def turned(x: Any) -> Any:
        for order in orders:
            x = jnp.transpose(x, order)
        return x

    mesh = spmd.make_mesh(data=2)
    fn = spmd.jit(turned, mesh=mesh, options=spmd.Options(check=True, planner="greedy"))
    lowered = fn.lower(jax.ShapeDtypeStruct(X.shape, X.dtype))
    expected = turned(X)
    is_as_before = expected.shape == X.shape and bool(np.array_equal(expected, X))
    assert transposes(lowered) == (0 if is_as_before else 1)


def test_what_is_read_in_between_stays() -> None:
    def fn(x: Any) -> Any:
        once = jnp.transpose(x, (1, 0, 2))
        return jnp.tanh(once), jnp.transpose(once, (1, 0, 2)) * 2

    mesh = spmd.make_mesh(data=2)
    compiled = spmd.jit(fn, mesh=mesh, options=spmd.Options(check=True))
    for found, expected in zip(compiled(X), fn(X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert transposes(compiled.lower(jax.ShapeDtypeStruct(X.shape, X.dtype))) == 1
