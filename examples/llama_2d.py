"""A Llama's training step in 2D: weights over `data` and `model`, sequences over `data`."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import spmd

# B batch, S sequence, H width, N heads, D head, F hidden width, V vocabulary, L layers
B, S, H, N, D, F, V, L = 32, 64, 256, 8, 32, 512, 256, 2


def norm(x_BSH, scale_H):
    return x_BSH * jax.lax.rsqrt(jnp.mean(x_BSH**2, -1, keepdims=True) + 1e-5) * scale_H


def rotate(x_BSND):
    angles = jnp.arange(S)[:, None] / 10_000 ** (jnp.arange(0, D, 2) / D)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x_BSND, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(x_BSH, w):
    h_BSH = norm(x_BSH, w["norm_1"])
    q, k, v = (jnp.einsum("bsh,hnd->bsnd", h_BSH, w[name]) for name in "qkv")
    x_BSH += jnp.einsum("bsnd,ndh->bsh", spmd.ops.attention(rotate(q), rotate(k), v), w["o"])
    h_BSH = norm(x_BSH, w["norm_2"])
    return x_BSH + (jax.nn.silu(h_BSH @ w["gate"]) * (h_BSH @ w["up"])) @ w["down"], None


def loss_fn(params, text):
    tokens, targets = text[:, :-1], text[:, 1:]
    x_BSH, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    scores_BSV = jax.nn.log_softmax(norm(x_BSH, params["norm"]) @ params["head"])
    return -jnp.mean(jnp.take_along_axis(scores_BSV, targets[..., None], -1))


def train_step(params, text):
    loss, grads = jax.value_and_grad(loss_fn)(params, text)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss


def normal(seed, *shape):
    return 0.02 * np.random.default_rng(seed).standard_normal(shape, np.float32)


layers = {name: normal(seed, L, H, N, D) for seed, name in enumerate("qkv")}
layers |= {"o": normal(3, L, N, D, H), "norm_1": np.ones((L, H)), "norm_2": np.ones((L, H))}
layers |= {"gate": normal(4, L, H, F), "up": normal(5, L, H, F), "down": normal(6, L, F, H)}
ends = {"embed": normal(7, V, H), "head": normal(8, H, V), "norm": np.ones(H)}
params = jax.tree.map(np.float32, {"layers": layers, **ends})
text = np.random.default_rng(9).integers(0, V, (B, S + 1), np.int32)
expected = jax.jit(train_step)(params, text)[1]

mesh = spmd.make_mesh(data=4, model=2)
rules = {
    "layers/[qkv]": (None, "data", "model", None),  # layers, width, heads, width of a head
    "layers/o": (None, "model", None, "data"),
    "layers/gate": (None, "data", "model"),
    "layers/up": (None, "data", "model"),
    "layers/down": (None, "model", "data"),
    "embed": ("model", "data"),
    "head": ("data", "model"),
}
params = spmd.mark_tree(params, mesh, rules)
text = spmd.mark_sharding(text, mesh, ("data", None))
step = spmd.jit(train_step, mesh=mesh, donate_argnums=0)
compiled = step.compile(params, text)
params, loss = step(params, text)

np.testing.assert_allclose(loss, expected, rtol=1e-5)
print(f"loss {loss:.4f}, as jax.jit computes it")
print(compiled.summary())
