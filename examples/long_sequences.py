"""Long sequences: each device has an eighth of the positions, attention sees them all."""

import os
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools

import jax
import jax.numpy as jnp
import numpy as np

import spmd

# B batch, S sequence, H width, N heads, K heads of keys and values, D head
B, S, H, N, K, D = 1, 1024, 256, 8, 2, 32


def loss_fn(params, x_BSH, y_BSH, parts=1):
    q_BSND = jnp.einsum("bsh,hnd->bsnd", x_BSH, params["q"])
    k_BSKD = jnp.einsum("bsh,hkd->bskd", x_BSH, params["k"])
    v_BSKD = jnp.einsum("bsh,hkd->bskd", x_BSH, params["v"])
    heads_BSND = spmd.ops.attention(q_BSND, k_BSKD, v_BSKD, zigzag=parts)  # causal
    out_BSH = jnp.einsum("bsnd,ndh->bsh", heads_BSND, params["o"])
    return jnp.mean((out_BSH - y_BSH).astype(jnp.float32) ** 2)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bf16(x, *shape):
    where = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(shape or x.shape, jnp.bfloat16, sharding=where)


def sent_in(program):
    counts = Counter((c.kind, c.bytes) for c in program.collectives)
    return "\n".join(f"  {n} x {kind} of {bytes_:,} bytes" for (kind, bytes_), n in counts.items())


params = {
    "q": normal(0, H, N, D) / 16,
    "k": normal(1, H, K, D) / 16,
    "v": normal(2, H, K, D) / 16,
    "o": normal(3, N, D, H) / 16,
}
x, y = normal(4, B, S, H), normal(5, B, S, H)
expected_loss, expected_grads = jax.jit(jax.value_and_grad(loss_fn))(params, x, y)

mesh = spmd.make_mesh(seq=8)
# Early and late positions side by side: so every device sees as many keys as any other.
x, y = (spmd.mark_sharding(spmd.ops.zigzag(a, 8), mesh, (None, "seq", None)) for a in (x, y))
step = spmd.jit(jax.value_and_grad(functools.partial(loss_fn, parts=8)), mesh=mesh)
compiled = step.compile(params, x, y)
loss, grads = compiled(params, x, y)

np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected_grads)
print(f"loss {loss:.4f}, as jax.jit computes it")
print(f"each device has positions {x.addressable_shards[0].data.shape} of {x.shape}")
print(sent_in(compiled))

# The same for eight H200s that are not here, and a sequence as long as Llama 3.1's.
far = jax.tree.map(bf16, params), bf16(x, B, 131_072, H), bf16(y, B, 131_072, H)
lowered = step.lower(*far, topology=spmd.Topology("h200:8"))
print(f"131,072 positions: {lowered.timeline.seconds * 1e3:.1f} ms predicted, of which "
      f"{lowered.timeline.exposed_seconds * 1e6:.0f} us wait")  # fmt: skip
print(sent_in(lowered))
