"""A pipeline: layers over stages, microbatch after microbatch, in the schedule that is fastest."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import spmd

# L layers, B rows, H width
L, B, H = 8, 512, 256


def layer(w, x_BH):
    return x_BH + jax.nn.relu(x_BH @ w["up"]) @ w["down"]


def sequential(w, x_BH):
    return jax.lax.scan(lambda x_BH, w: (layer(w, x_BH), None), x_BH, w)[0]


def pipelined(w, x_BH):
    return spmd.pipeline(layer, w, x_BH, stages=4, microbatches=8)


def train_step(forward, w, x_BH, y_BH):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((forward(w, x_BH) - y_BH) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


w = {"up": normal(0, L, H, 2 * H) / 32, "down": normal(1, L, 2 * H, H) / 32}
x, y = normal(2, B, H), normal(3, B, H)
expected_w, expected_loss = jax.jit(train_step, static_argnums=0)(sequential, w, x, y)

mesh = spmd.make_mesh(stage=4, data=2)
w = spmd.mark_tree(w, mesh, {"*": ("stage", None, None)})
x, y = spmd.mark_tree((x, y), mesh, {"*": ("data", None)})
compiled = spmd.jit(train_step, mesh=mesh, static_argnums=0).compile(pipelined, w, x, y)
w, loss = compiled(w, x, y)

np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), w, expected_w)
print(f"loss {loss:.4f}, as one layer after the other computes it")
lines = compiled.explain().splitlines()
for title in ("pipelines", "forms"):
    print(*lines[lines.index(title) : lines.index("", lines.index(title))], sep="\n")
for c in compiled.collectives:
    print(f"{c.kind} over {', '.join(c.axes)}: {c.count} x {c.bytes:,} bytes")
