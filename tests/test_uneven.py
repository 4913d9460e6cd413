"""Dims that their axes don't divide, inside a program: padded, masked, and never seen."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd

CPU = spmd.Topology("cpu:8").chip
SLOW = dataclasses.replace(CPU, hbm_bandwidth=1e6, flops=tuple((d, 1e6) for d, _ in CPU.flops))
"""Small programs are split as large ones are: what is not split takes longer than any exchange."""


def values(*shape: int, seed: int = 0) -> Any:
    return np.random.RandomState(seed).uniform(0.5, 1.5, shape).astype(np.float32)


def check(fn: Any, *args: Any, mesh: spmd.Mesh, gradient: bool = True) -> None:
    topology = spmd.Topology(f"cpu:{mesh.size}", SLOW)
    options = spmd.Options(check=True, planner="greedy", topology=topology)
    got = spmd.jit(fn, mesh=mesh, options=options)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), got, jax.jit(fn)(*args))
    if gradient:
        scalar = lambda *xs: jnp.sum(jnp.sin(fn(*xs)))  # noqa: E731
        grad = jax.grad(scalar, tuple(i for i, a in enumerate(args) if a.dtype == np.float32))
        got = spmd.jit(grad, mesh=mesh, options=options)(*args)
        want = jax.jit(grad)(*args)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.fixture(params=[(4, 2), pytest.param((2, 3), marks=pytest.mark.heavy)], ids=str)
def mesh(request: Any) -> spmd.Mesh:
    return spmd.make_mesh(data=request.param[0], model=request.param[1])


SPECS = [("data", None), (("data", "model"), None), ("model", "data"), (None, ("model", "data"))]


@pytest.mark.parametrize(
    ("size", "spec"), [*((5, spec) for spec in SPECS), (1, SPECS[0]), (10, SPECS[1])], ids=str
)
def test_a_mark_that_does_not_divide(size: int, spec: Any, mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return spmd.mark_sharding(jnp.exp(x), mesh, spec) * 2

    check(fn, values(size, 7), mesh=mesh, gradient=size == 5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sums_and_products_never_see_padding(spec: Any, mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        h = jnp.log(spmd.mark_sharding(x, mesh, spec))  # the padding becomes -inf or NaN
        return (h @ w).sum() + h.sum(0).max() + h.max() + jnp.prod(h, axis=1).min()

    check(fn, values(5, 6), values(6, 3, seed=1), mesh=mesh)


def test_from_one_uneven_sharding_to_another(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array) -> Any:
        for spec in (*SPECS, *reversed(SPECS)):
            x = spmd.mark_sharding(x + 1, mesh, spec)
        return x

    check(fn, values(5, 7), mesh=mesh)


def test_looking_up_and_scattering_in_a_padded_table(mesh: spmd.Mesh) -> None:
    index = np.asarray([0, 4, 2, 9, 9, 6, 3], np.int32)

    def fn(table: jax.Array, update: jax.Array) -> Any:
        table = spmd.mark_sharding(table, mesh, (("data", "model"), None))
        rows = spmd.mark_sharding(jnp.take(table, index, axis=0), mesh, ("data", None))
        return spmd.mark_sharding(table.at[index].add(rows * update), mesh, ("model", None))

    check(fn, values(10, 3), values(7, 3, seed=1), mesh=mesh)


def test_constants_and_counters_of_padded_dims(mesh: spmd.Mesh) -> None:
    numbers = values(10, 3, seed=3)

    def fn(x: jax.Array) -> Any:
        x = spmd.mark_sharding(x, mesh, (("model", "data"), None))
        return x * numbers + jax.lax.broadcasted_iota(jnp.float32, (10, 3), 0)

    check(fn, values(10, 3), mesh=mesh)


def test_loops_carry_padded_values(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        def body(c: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            c = spmd.mark_sharding(jnp.tanh(c @ w), mesh, ("data", "model"))
            return c, c.sum()

        return jax.lax.scan(body, x, w)[0]

    check(fn, values(5, 3), values(4, 3, 3, seed=2), mesh=mesh)


def test_it_runs_under_plain_jit_and_vmap(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return spmd.mark_sharding(x * 2, mesh, ("data",))

    x = values(4, 5)
    np.testing.assert_allclose(jax.jit(jax.vmap(fn))(x), x * 2)
    np.testing.assert_allclose(jax.grad(lambda x: fn(x).sum())(x[0]), np.full(5, 2.0))
