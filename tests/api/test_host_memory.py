"""Arguments and results in the host's memory: moved to the devices and back inside the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmd

PARAMS = {"w": np.ones((8, 1 << 12), np.float32), "b": np.ones(8, np.float32)}


def in_host(mesh, *spec):
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind="pinned_host")


def step(params, moments, grads):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g * jnp.vdot(g, g), moments, grads)
    return jax.tree.map(jnp.subtract, params, moments), moments


def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


def test_a_state_in_the_hosts_memory(devices8):
    """Split as what it mirrors; it takes no memory of the devices, and its moves take time."""
    mesh = spmd.make_mesh(devices=devices8, x=8)
    params = jax.tree.map(jnp.asarray, PARAMS)  # given twice, and one of them is donated

    def hosted(x):
        where = in_host(mesh, *[PartitionSpec.UNCONSTRAINED] * x.ndim)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    specs = ({"w": ("x", None), "b": None}, None, None)
    jitted = spmd.jit(step, mesh=mesh, in_specs=specs, donate_argnums=(0, 1))
    moments = params, jax.tree.map(hosted, params)
    plain, compiled = (jitted.compile(params, m, params) for m in moments)
    assert compiled.in_shardings[1]["w"].is_equivalent_to(in_host(mesh, "x", None), 2)
    saved = plain.predicted_memory.arguments - compiled.predicted_memory.arguments
    assert saved >= PARAMS["w"].nbytes // 8
    assert compiled.timeline.seconds > plain.timeline.seconds
    want, got = (params, zeros(params)), (params, compiled.init(1, zeros, params))
    for _ in range(3):
        want, got = jax.jit(step)(*want, params), compiled(*got, params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)
        assert got[1]["w"].sharding.memory_kind == "pinned_host"


def test_ordered_callbacks_are_refused(devices8):
    mesh = spmd.make_mesh(devices=devices8, x=8)

    def told(x, m):
        jax.debug.callback(print, x[0], ordered=True)
        return x + m

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    m = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=in_host(mesh, None))
    with pytest.raises(spmd.UnsupportedOpError, match="ordered=False"):
        spmd.jit(told, mesh=mesh).lower(x, m)
