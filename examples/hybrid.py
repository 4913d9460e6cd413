"""A hybrid as Qwen3-Next is one: three layers of gated delta nets, then one of gated attention."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd

# B batch, S sequence, H width, N heads, D head, M inside the MLP, V tokens, C taps of convolutions
B, S, H, N, D, M, V, C = 8, 64, 64, 4, 16, 128, 128, 4
optimizer = optax.adam(3e-3)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def delta_net(w, qkv, x_BSH):
    padded = jnp.pad(qkv, ((0, 0), (0, 0), (C - 1, 0), (0, 0), (0, 0)))
    taps = (w["conv"][:, None, None, c] * padded[:, :, c : c + S] for c in range(C))
    q, k, v = jax.nn.silu(sum(taps))  # a short causal convolution of each channel
    q, k = (norm(x) / D**0.5 for x in (q, k))  # of length 1
    decay_BSN = -jnp.exp(w["a_log"]) * jax.nn.softplus(x_BSH @ w["a"])
    beta_BSN = jax.nn.sigmoid(x_BSH @ w["b"])
    return norm(spmd.ops.linear_attention(q, k, v, decay_BSN, beta_BSN, chunk=16)[0])


def attention(w, qkv, x_BSH):
    return spmd.ops.attention(norm(qkv[0]), norm(qkv[1]), qkv[2])


def loss_fn(params, tokens_BS):
    x_BSH = params["embed"][tokens_BS[:, :-1]]
    for i, w in enumerate(params["layers"]):
        normed_BSH, mix = norm(x_BSH), attention if i % 4 == 3 else delta_net
        *qkv, gate = jnp.einsum("bsh,xhnd->xbsnd", normed_BSH, w["qkvz"])
        mixed_BSND = mix(w, jnp.stack(qkv), normed_BSH) * jax.nn.silu(gate)
        x_BSH += jnp.einsum("bsnd,ndh->bsh", mixed_BSND, w["o"])
        gate_BSM, up_BSM = jnp.einsum("bsh,xhm->xbsm", norm(x_BSH), w["gate_up"])
        x_BSH += (jax.nn.silu(gate_BSM) * up_BSM) @ w["down"]
    logits_BSV = norm(x_BSH) @ params["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BSV, tokens_BS[:, 1:]))


def train_step(params, state, tokens_BS):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens_BS)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


random = np.random.default_rng(0)
sizes = {"qkvz": (4, H, N, D), "o": (N, D, H), "gate_up": (2, H, M), "down": (M, H)}
sizes |= {"a": (H, N), "b": (H, N), "a_log": (N,), "conv": (3, C, N, D)}
layers = [{n: random.normal(0, 0.2, s).astype("f") for n, s in sizes.items()} for _ in range(4)]
params = {"embed": random.normal(0, 0.1, (V, H)).astype("f"), "layers": layers}
text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype("i")  # it learns itself
tokens = text[random.integers(0, len(text) - S, (100, B, 1)) + np.arange(S + 1)]

mesh = spmd.make_mesh(data=2, model=4)
heads = {"qkvz": (None, None, "model"), "conv": (None, None, "model"), "o": ("model",)}
specs = heads | {"gate_up": (None, None, "model"), "down": ("model",)}
marked = spmd.mark_tree(params, mesh, {f"layers/*/{name}": spec for name, spec in specs.items()})
step = spmd.jit(train_step, mesh=mesh, in_specs=(None, None, ("data",)))
state, losses = optimizer.init(params), []
for tokens_BS in tokens:
    marked, state, loss = step(marked, state, tokens_BS)
    losses.append(float(loss))
np.testing.assert_allclose(losses[0], jax.jit(loss_fn)(params, tokens[0]), rtol=1e-5)
print(f"loss {losses[0]:.2f} at first, as jax.jit computes it, {losses[-1]:.0f} after 100 steps")
