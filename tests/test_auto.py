"""Specs that nobody gave: chosen, printed, pasted back, run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.mesh.spec import jax_mesh
from tests.lowering import manual_programs

pytestmark = pytest.mark.usefixtures("devices8")
OPTIMIZER = optax.adam(1e-2)
H200 = spmd.Topology("h200:8")


def step(params: Any, state: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        h = x
        for layer in p["layers"]:
            h = jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def structs(batch: int, size: int) -> Any:
    matrix = jax.ShapeDtypeStruct((size, size), jnp.float32)
    params = {"layers": [{"up": matrix, "down": matrix} for _ in range(3)]}
    state = jax.eval_shape(OPTIMIZER.init, params)
    return params, state, jax.ShapeDtypeStruct((batch, size), jnp.float32)


def test_a_large_batch_is_split_over_everything() -> None:
    mesh = spmd.make_mesh(data=4, model=2)
    found = spmd.auto(step, mesh, *structs(1 << 16, 1024), topology=H200, donate_argnums=(0, 1))
    assert found.specs["x"][0] == ("data", "model")
    again = found.jitted.lower(*found.mark(*structs(1 << 16, 1024)), topology=H200)
    assert again.cost <= found.seconds * 1.02
    text = str(found)
    assert "mesh = spmd.make_mesh(data=4, model=2)" in text
    assert "layers/*/up" in text
    assert "# state: inferred" in text


def test_a_memory_limit_splits_parameters() -> None:
    mesh = spmd.make_mesh(data=8)
    args = structs(1 << 14, 2048)
    free = spmd.auto(step, mesh, *args, topology=H200, donate_argnums=(0, 1))
    tight = spmd.auto(
        step, mesh, *args, topology=H200, memory_limit=250 << 20, donate_argnums=(0, 1)
    )
    assert tight.specs["params/layers/0/up"] != (None, None)
    assert tight.seconds >= free.seconds
    with pytest.raises(spmd.PlanError, match="auto found no plan"):
        spmd.auto(step, mesh, *args, topology=H200, memory_limit=1 << 20, donate_argnums=(0, 1))


def test_marks_are_kept_and_the_mesh_is_chosen() -> None:
    meshes = [spmd.make_mesh(data=8), spmd.make_mesh(data=2, model=4)]
    params, state, x = structs(64, 256)
    x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    found = spmd.auto(step, meshes, params, state, x, topology=H200, donate_argnums=(0, 1))
    assert len(found.considered) == 2
    assert found.seconds == min(entry.seconds for entry in found.considered if entry.seconds)
    marked = spmd.mark_sharding(x, meshes[0], (None, "data"))
    kept = spmd.auto(step, meshes[0], params, state, marked, topology=H200, donate_argnums=(0, 1))
    assert kept.specs["x"] == (None, "data")


@pytest.mark.parametrize("name", ["scan_inside", "nested"])
def test_manual_axes_are_left_alone(name: str) -> None:
    mesh = spmd.make_mesh(x=2, y=2, z=2)
    fn = next(p for p in manual_programs.PROGRAMS if p.name == name).make(jax_mesh(mesh))
    args = (manual_programs.X, manual_programs.W)
    found = spmd.auto(fn, mesh, *args, topology=H200)
    got = found.jitted(*found.mark(*args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_chosen_runs() -> None:
    mesh = spmd.make_mesh(data=4, model=2)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=s.shape) / 8, s.dtype), structs(32, 64)[0]
    )
    state, x = OPTIMIZER.init(params), jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)
    found = spmd.auto(step, mesh, params, state, x, topology=H200)
    partitioned = found.jitted(*found.mark(params, state, x))
    plain = jax.jit(step)(params, state, x)
    for a, b in zip(jax.tree.leaves(partitioned), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
