"""A hybrid as Qwen3-Next is one: three layers of gated delta nets, then one of gated attention."""

import os
from collections import Counter
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
ATTENTION_EVERY, LAYERS, STEPS = 4, 4, 100
optimizer = optax.adam(3e-3)


def norm(x, weight=1.0):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * weight


def heads(x_BSH, weight_HND):
    return jnp.einsum("bsh,hnd->bsnd", x_BSH, weight_HND)


def delta_net(w, x_BSH):
    mixed = jnp.stack([heads(x_BSH, w[name]) for name in "qkv"])
    padded = jnp.pad(mixed, ((0, 0), (0, 0), (C - 1, 0), (0, 0), (0, 0)))
    taps = (w["conv"][:, None, None, c] * padded[:, :, c : c + S] for c in range(C))
    q, k, v = jax.nn.silu(sum(taps))  # a short causal convolution of each channel
    q, k = (norm(x) / D**0.5 for x in (q, k))  # of length 1
    decay_BSN = -jnp.exp(w["a_log"]) * jax.nn.softplus(x_BSH @ w["a"] + w["dt_bias"])
    beta_BSN = jax.nn.sigmoid(x_BSH @ w["b"])
    out_BSND, _ = spmd.ops.linear_attention(q, k, v, decay_BSN, beta_BSN, chunk=16)
    return norm(out_BSND, w["norm"]) * jax.nn.silu(heads(x_BSH, w["z"]))


def attention(w, x_BSH):
    q, k, v = (heads(x_BSH, w[name]) for name in "qkv")
    out_BSND = spmd.ops.attention(norm(q, w["q_norm"]), norm(k, w["k_norm"]), v)
    return out_BSND * jax.nn.sigmoid(heads(x_BSH, w["z"]))


def loss_fn(params, tokens_BS):
    x_BSH = params["embed"][tokens_BS[:, :-1]]
    for i, w in enumerate(params["layers"]):
        mixer = delta_net if (i + 1) % ATTENTION_EVERY else attention
        x_BSH += jnp.einsum("bsnd,ndh->bsh", mixer(w, norm(x_BSH)), w["o"])
        gate, up = jnp.split(norm(x_BSH) @ w["gate_up"], 2, axis=-1)
        x_BSH += (jax.nn.silu(gate) * up) @ w["down"]
    logits_BSV = norm(x_BSH) @ params["embed"].T
    targets_BS = tokens_BS[:, 1:]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS))


def train_step(params, state, tokens_BS):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens_BS)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


random = np.random.default_rng(0)


def normal(*shape, scale=H**-0.5):
    return scale * random.standard_normal(shape, np.float32)


def layer(number):
    w = {name: normal(H, N, D) for name in "qkvz"} | {"o": normal(N, D, H)}
    w |= {"gate_up": normal(H, 2 * M), "down": normal(M, H, scale=M**-0.5)}
    if (number + 1) % ATTENTION_EVERY == 0:
        return w | {"q_norm": np.ones(D, np.float32), "k_norm": np.ones(D, np.float32)}
    w |= {"a": normal(H, N), "b": normal(H, N), "a_log": np.log(np.arange(1, N + 1, dtype="f"))}
    w |= {"dt_bias": np.full(N, -3.0, np.float32), "norm": np.ones(D, np.float32)}
    return w | {"conv": normal(3, C, N, D, scale=C**-0.5)}


def batch():
    places = random.integers(0, len(text) - S, (B, 1)) + np.arange(S + 1)
    return spmd.mark_sharding(text[places], mesh, ("data",))


mesh = spmd.make_mesh(data=2, model=4)
text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)  # it learns itself
params = {"embed": normal(V, H), "layers": [layer(i) for i in range(LAYERS)]}
split = {"[qkvz]": (None, "model"), "o": ("model",), "gate_up": (None, "model"), "down": ("model",)}
marked = spmd.mark_tree(params, mesh, {f"layers/*/{name}": spec for name, spec in split.items()})
tokens, state = batch(), optimizer.init(params)
compiled = spmd.jit(train_step, mesh=mesh).compile(marked, state, tokens)
expected = jax.jit(loss_fn)(params, tokens)
for step in range(STEPS):
    marked, state, loss = compiled(marked, state, tokens)
    if step == 0:
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    tokens = batch()
print(f"loss {expected:.2f} at first, {loss:.2f} after {STEPS} steps")
kinds = Counter(c.kind for c in compiled.collectives)
print("collectives of a step:", ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))
