"""Two marks on an MLP: the compiler infers how everything else is split."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import spmd


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["w_in"] + params["b_in"])
    return jnp.mean((hidden @ params["w_out"] + params["b_out"] - batch["y"]) ** 2)


def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


params = {
    "w_in": normal(0, 256, 1024) / 16,
    "b_in": np.zeros(1024, np.float32),
    "w_out": normal(1, 1024, 256) / 32,
    "b_out": np.zeros(256, np.float32),
}
batch = {"x": normal(2, 2048, 256), "y": normal(3, 2048, 256)}
expected_params, expected_loss = jax.jit(train_step)(params, batch)

mesh = spmd.make_mesh(data=4, model=2)
batch["x"] = spmd.mark_sharding(batch["x"], mesh, ("data", None))  # rows over data
params["w_in"] = spmd.mark_sharding(params["w_in"], mesh, (None, "model"))  # columns over model

step = spmd.jit(train_step, mesh=mesh)
compiled = step.compile(params, batch)
params, loss = step(params, batch)

np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, expected_params)

print(f"loss {loss:.4f}, as jax.jit computes it")
for path, sharding in jax.tree.leaves_with_path(compiled.in_shardings):
    print(f"{jax.tree_util.keystr(path[1:], simple=True):6} {sharding.spec}")
for c in compiled.collectives:
    print(f"{c.kind} over {', '.join(c.axes)}: {c.bytes:,} bytes")
print(compiled.explain("batch/y", prices=False))
