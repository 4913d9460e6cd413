"""Long sequences: each device has an eighth of the positions, attention sees them all."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import spmd

# B batch, S sequence, H width, N heads, K heads of keys and values, D head
B, S, H, N, K, D = 1, 1024, 256, 8, 2, 32


def loss_fn(params, x_BSH, y_BSH):
    q_BSND = jnp.einsum("bsh,hnd->bsnd", x_BSH, params["q"])
    k_BSKD = jnp.einsum("bsh,hkd->bskd", x_BSH, params["k"])
    v_BSKD = jnp.einsum("bsh,hkd->bskd", x_BSH, params["v"])
    heads_BSND = spmd.ops.attention(q_BSND, k_BSKD, v_BSKD)  # causal; softmax over all S keys
    return jnp.mean((jnp.einsum("bsnd,ndh->bsh", heads_BSND, params["o"]) - y_BSH) ** 2)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


params = {
    "q": normal(0, H, N, D) / 16,
    "k": normal(1, H, K, D) / 16,
    "v": normal(2, H, K, D) / 16,
    "o": normal(3, N, D, H) / 16,
}
x, y = normal(4, B, S, H), normal(5, B, S, H)
grad = jax.value_and_grad(loss_fn)
expected_loss, expected_grads = jax.jit(grad)(params, x, y)

mesh = spmd.make_mesh(sequence=8)
x = spmd.mark_sharding(x, mesh, (None, "sequence", None))
compiled = spmd.jit(grad, mesh=mesh).compile(params, x, y)
loss, grads = compiled(params, x, y)

np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)
print(f"loss {loss:.4f}, as jax.jit computes it")
print(f"each device has positions {x.addressable_shards[0].data.shape} of {x.shape}")
for c in compiled.collectives:
    print(f"{c.kind} over {', '.join(c.axes)}: {c.bytes:,} bytes\n    {c.reason}")
