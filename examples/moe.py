"""A mixture of experts over a mesh axis of their own: no token is dropped, whatever they choose."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd

# B texts, S tokens of a text, V vocabulary, H width, E experts, C choices of a token,
# M width inside an expert
B, S, V, H, E, C, M = 32, 32, 256, 128, 8, 2, 512


def mixture(params, x_BSH):
    shares_BSE = jax.nn.softmax(x_BSH @ params["router"])
    gates_BSC, chosen_BSC = jax.lax.top_k(shares_BSE, C)
    gates_BSC /= gates_BSC.sum(-1, keepdims=True)
    weights = params["gate"], params["up"], params["down"]
    out_BSH = spmd.ops.experts(x_BSH, gates_BSC, chosen_BSC, *weights)
    taken_E = jax.nn.one_hot(chosen_BSC, E).sum(2).mean((0, 1))
    return out_BSH, E / C * jnp.sum(taken_E * shares_BSE.mean((0, 1)))  # 1 where all are alike


def loss_fn(params, text):
    x_BSH = params["embed"][text[:, :-1]]
    out_BSH, balance = mixture(params, x_BSH)
    logits_BSV = (x_BSH + out_BSH) @ params["embed"].T
    loss = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, text[:, 1:]).mean()
    return loss + 0.01 * balance, (loss, balance)


def train_step(params, text):
    grads, (loss, balance) = jax.grad(loss_fn, has_aux=True)(params, text)
    return jax.tree.map(lambda p, g: p - 4 * g, params, grads), loss, balance


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / shape[-1] ** 0.5


params = {"embed": normal(0, V, H), "router": normal(1, H, E)}
params |= {"gate": normal(2, E, M, H), "up": normal(3, E, M, H), "down": normal(4, E, H, M)}
# Each token is 1 to 3 more than the one before: no loss gets below log(3), 1.10.
text = np.cumsum(np.random.default_rng(5).integers(1, 4, (B, S + 1), np.int32), 1) % V

mesh = spmd.make_mesh(data=2, expert=4)
split, whole = ("expert", None, None), (None, None)
rules = {"gate": split, "up": split, "down": split, "embed": whole, "router": whole}
params = spmd.mark_tree(params, mesh, rules)
text = spmd.mark_sharding(text, mesh, (("data", "expert"), None))
compiled = spmd.jit(train_step, mesh=mesh, donate_argnums=0).compile(params, text)
assert compiled.verify(params, text)  # runs it unpartitioned too, and compares every result
print("verified")
for step in range(31):
    params, loss, balance = compiled(params, text)
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.2f}, balance {balance:.2f}")
for c in compiled.collectives:
    print(f"{c.kind} over {', '.join(c.axes)}: {c.bytes:,} bytes\n    {c.reason}")
