"""FSDP: each device keeps an eighth of the parameters, and of AdamW's state by inference."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd

ROWS, WIDTH, LAYERS = 8192, 256, 4
optimizer = optax.adamw(1e-3)


def train_step(params, opt_state, batch):
    def loss_fn(params):
        x = batch["x"]
        for w in params:
            x += jax.nn.relu(x @ w["up"]) @ w["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bytes_of_a_device(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


params = [
    {"up": normal(n, WIDTH, 4 * WIDTH) / 16, "down": normal(n, 4 * WIDTH, WIDTH) / 64}
    for n in range(LAYERS)
]
batch = {"x": normal(8, ROWS, WIDTH), "y": normal(9, ROWS, WIDTH)}
params = jax.device_put(params)
whole = params, optimizer.init(params)
expected = jax.jit(train_step)(*whole, batch)

mesh = spmd.make_mesh(data=8)
params = spmd.mark_tree(params, mesh, {"*": ("data", None)})
batch = spmd.mark_tree(batch, mesh, {"*": ("data", None)})
step = spmd.jit(train_step, mesh=mesh, donate_argnums=(0, 1))
compiled = step.compile(params, jax.eval_shape(optimizer.init, params), batch)
opt_state = compiled.init(1, optimizer.init, params)  # in its inferred sharding, never whole

print(f"on one device:  {bytes_of_a_device(whole):,} bytes of parameters and AdamW's state")
print(f"on each of 8:   {bytes_of_a_device((params, opt_state)):,} bytes")
print(f"mu of a weight: {opt_state[0].mu[0]['up'].sharding.spec}, which nobody marked")
params, opt_state, loss = step(params, opt_state, batch)
np.testing.assert_allclose(loss, expected[2], rtol=1e-5)
print(f"loss {loss:.4f}, as jax.jit computes it")
print(compiled.summary())
