"""`spmd.jit` as a user meets it: static arguments, caches, donation, where the mesh comes from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd


def test_one_compilation_serves_arrays_where_it_put_them(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda w, s: (w * 2, s + w), mesh=mesh)
    w = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data", "model"))
    compiled = step.compile(w, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert compiled.in_shardings[1].spec == P("data", "model")
    state = compiled.init(1, lambda: jnp.zeros((8, 8)))
    for _ in range(3):
        w, state = step(w, state)
    assert sum(map(len, step._cache.values())) == 1
    np.testing.assert_allclose(state, np.full((8, 8), 7.0))


def test_other_shardings_compile_anew(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x: x * 2, mesh=mesh)
    step(spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",)))
    out = step(spmd.mark_sharding(jnp.ones((8, 8)), mesh, (None, "model")))
    assert out.sharding.spec == P(None, "model")
    assert sum(map(len, step._cache.values())) == 2


def test_static_arguments(mesh: spmd.Mesh) -> None:
    def fn(x: jax.Array, power: int, *, mode: str = "a") -> jax.Array:
        return x**power if mode == "a" else -(x**power)

    step = spmd.jit(fn, mesh=mesh, static_argnums=1, static_argnames="mode")
    x = jnp.full((8,), 3.0)
    np.testing.assert_allclose(step(x, 2), np.full(8, 9.0))
    np.testing.assert_allclose(step(x, 3, mode="b"), np.full(8, -27.0))


def test_keyword_arguments_and_scalars(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x, *, scale: x * scale, mesh=mesh)
    np.testing.assert_allclose(step(jnp.ones(8), scale=2.0), np.full(8, 2.0))


def test_donated_arguments_are_gone(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
    x = spmd.mark_sharding(jnp.zeros((8, 8)), mesh, ("data", "model"))
    y = step(x)
    assert x.is_deleted()
    assert y.sharding == NamedSharding(y.sharding.mesh, P("data", "model"))


def test_mesh_is_taken_from_arguments_or_marks(mesh: spmd.Mesh) -> None:
    x = spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data",))
    assert spmd.jit(lambda x: x * 2)(x).sharding.spec == P("data", None)

    def fn(x: Any) -> Any:
        return spmd.mark_sharding(x * 2, mesh, (None, "model"))

    assert spmd.jit(fn)(np.ones((8, 8), np.float32)).sharding.spec == P(None, "model")


def test_arguments_may_be_counted_from_the_end(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x, y, n: (x + y) * n, mesh=mesh, static_argnums=-1, donate_argnums=-2)
    x, y = (spmd.mark_sharding(jnp.ones((8, 8)), mesh, ("data", "model")) for _ in range(2))
    np.testing.assert_allclose(step(x, y, 3), np.full((8, 8), 6.0))
    assert y.is_deleted()
    assert not x.is_deleted()
