"""Arguments and results in the host's memory: moved to the devices and back inside the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import spmd

WIDE = 1 << 12


def step(params, moments, grads):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(jnp.subtract, params, moments), moments


def test_a_state_in_the_hosts_memory(devices8):
    """Split as what it mirrors; it takes no memory of the devices, and its moves take time."""
    mesh = spmd.make_mesh(devices=devices8, x=8)
    params = {"w": jnp.ones((8, WIDE)), "b": jnp.ones(8)}
    open_ = PartitionSpec.UNCONSTRAINED
    hosted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(
                mesh, PartitionSpec(*[open_] * x.ndim), memory_kind="pinned_host"
            ),
        ),
        params,
    )
    specs = ({"w": ("x", None), "b": None}, None, None)
    jitted = spmd.jit(step, mesh=mesh, in_specs=specs, donate_argnums=(0, 1))
    plain, compiled = (jitted.compile(params, m, params) for m in (params, hosted))
    assert compiled.in_shardings[1]["w"].memory_kind == "pinned_host"
    assert compiled.in_shardings[1]["w"].spec == plain.in_shardings[1]["w"].spec
    size = 8 * WIDE * 4 // 8
    saved = plain.predicted_memory.arguments - compiled.predicted_memory.arguments
    assert size <= saved < 1.1 * size
    assert compiled.timeline.seconds > plain.timeline.seconds
    zeros = jax.tree.map(jnp.zeros_like, params)
    want, state = (
        (params, zeros),
        compiled.init(1, lambda p: jax.tree.map(jnp.zeros_like, p), params),
    )
    for _ in range(3):
        got = compiled(want[0], state, params)
        want = jax.jit(step)(*want, params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)
        state = got[1]
        assert state["w"].sharding.memory_kind == "pinned_host"


def test_of_a_function_inside_of_another_one_it_is_refused(devices8):
    mesh = spmd.make_mesh(devices=devices8, x=8)
    host = NamedSharding(mesh, PartitionSpec("x"), memory_kind="pinned_host")
    inner = spmd.jit(jnp.sin, mesh=mesh, in_specs=(host,))
    with pytest.raises(spmd.SpecError, match="inside of another one"):
        spmd.jit(lambda x: inner(x), mesh=mesh)(jnp.ones(8))
    np.testing.assert_allclose(inner(jax.device_put(jnp.ones(8), host)), jnp.sin(jnp.ones(8)))
