"""Optimizer state in the host's memory: moved to devices and back part by part, as on none."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from tests.accelerators.devices import COUNT, DEVICES

PARTS, BYTES = 24, 1 << 26


def test_a_state_is_never_whole_on_a_device() -> None:
    mesh = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT)
    keys = jax.random.split(jax.random.key(0), PARTS)
    params = [jax.random.normal(key, (BYTES >> 12, 1024)) for key in keys]
    split = PartitionSpec("x", None)

    def step(params: list[jax.Array], moments: list[jax.Array], square: jax.Array):
        moments = [0.9 * m + p @ square for p, m in zip(params, moments, strict=True)]
        return [p - m for p, m in zip(params, moments, strict=True)], moments

    def zeros(params: list[jax.Array]) -> list[jax.Array]:
        return [jnp.zeros_like(p) for p in params]

    host = NamedSharding(mesh, split, memory_kind="pinned_host")
    moments = [jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=host) for p in params]
    jitted = spmd.jit(
        step, mesh=mesh, in_specs=([split] * PARTS, None, None), donate_argnums=(0, 1)
    )
    square = jax.random.normal(jax.random.key(1), (1024, 1024)) / 64
    compiled = jitted.compile(params, moments, square)
    assert compiled.memory.temporary <= PARTS * BYTES // COUNT // 2
    want, got = (
        (params, zeros(params)),
        (jax.tree.map(jnp.copy, params), compiled.init(1, zeros, params)),
    )
    for _ in range(3):
        want, got = jax.jit(step)(*want, square), compiled(*got, square)
    assert got[1][0].sharding.memory_kind == "pinned_host"
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3), got, want)
