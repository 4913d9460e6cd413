"""A pipeline: stages are a dim like any other, and a shifted buffer hands on what they made."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import spmd

# P stages, M microbatches, B rows of a microbatch, H width
P, M, B, H = 4, 8, 32, 256


def stage(w, x_BH):
    return x_BH + jax.nn.relu(x_BH @ w["up"]) @ w["down"]


def pipelined(w, x_MBH):
    """All stages work at once, each on another microbatch (GSPMD, Xu et al. 2021, section 3.3)."""

    def tick(buffer_PBH, fresh_BH):
        moved_PBH = jax.lax.pad(buffer_PBH, 0.0, ((1, -1, 0), (0, 0, 0), (0, 0, 0)))  # shift by one
        buffer_PBH = jax.vmap(stage)(w, moved_PBH.at[0].set(fresh_BH))
        return buffer_PBH, buffer_PBH[-1]

    nothing = jnp.zeros((P - 1, B, H))
    out = jax.lax.scan(tick, jnp.zeros((P, B, H)), jnp.concatenate([x_MBH, nothing]))[1]
    return out[P - 1 :]


def sequential(w, x_MBH):
    return jax.lax.scan(lambda x, w: (stage(w, x), None), x_MBH, w)[0]


def train_step(forward, w, x_MBH, y_MBH):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((forward(w, x_MBH) - y_MBH) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


w = {"up": normal(0, P, H, 2 * H) / 32, "down": normal(1, P, 2 * H, H) / 32}
x, y = normal(2, M, B, H), normal(3, M, B, H)
expected_w, expected_loss = jax.jit(train_step, static_argnums=0)(sequential, w, x, y)

mesh = spmd.make_mesh(stage=4, data=2)
w = spmd.mark_tree(w, mesh, {"*": ("stage", None, None)})
x, y = spmd.mark_tree((x, y), mesh, {"*": (None, "data", None)})
compiled = spmd.jit(train_step, mesh=mesh, static_argnums=0).compile(pipelined, w, x, y)
w, loss = compiled(w, x, y)

np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), w, expected_w)
print(f"loss {loss:.4f}, as one stage after the other computes it")
for c in compiled.collectives:
    print(f"{c.kind} over {', '.join(c.axes)}: {c.count} x {c.bytes:,} bytes\n    {c.reason}")
