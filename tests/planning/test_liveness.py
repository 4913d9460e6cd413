"""What no plan goes below in memory: found without a plan, and never above what one takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from benchmarks.programs.catalog import program_named
from spmd.planning.liveness import least_bytes

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))
BYTES = 4 * 64 * 32


def least(fn: Any, *args: Any, **given: Any) -> int:
    lowered = spmd.jit(fn, mesh=MESH, **given).lower(*args)
    found = least_bytes(lowered.stages.plan.problem)
    assert found <= lowered.predicted_memory.peak
    return found


def struct(spec: tuple[Any, ...] | None = None) -> jax.ShapeDtypeStruct:
    plain = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    return plain if spec is None else spmd.mark_sharding(plain, MESH, spec)


def test_marked_arguments_have_their_pieces_and_open_ones_the_smallest() -> None:
    assert least(jnp.sum, struct((None, "model"))) == BYTES // 2
    assert least(lambda x, y: jnp.sum(x + y), struct((None, "model")), struct()) == BYTES * 5 // 8


def test_results_count_where_they_are_more_than_the_arguments() -> None:
    row = spmd.mark_sharding(jax.ShapeDtypeStruct((32,), jnp.float32), MESH, (None,))
    outer = least(lambda x: x[:, None, None] * x[:, None] * x, row, out_specs=("data",))
    assert outer == 4 * 32**3 // 4


def test_constants_are_whole() -> None:
    table = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    assert least(lambda x: x + table, struct(("data", "model"))) == BYTES + BYTES // 8


@pytest.mark.parametrize("name", ("moe/forward@4x2", "recommender/rows@8x1"))
def test_no_plan_goes_below(name: str) -> None:
    mesh, built = program_named(name).make()
    jitted = spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate)
    lowered = jitted.lower(*built.args)
    assert 0 < least_bytes(lowered.stages.plan.problem) <= lowered.predicted_memory.peak
