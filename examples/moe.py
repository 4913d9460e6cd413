"""A mixture of experts over a mesh axis of their own: all-to-alls bring tokens to them."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np

import spmd

# G groups of tokens, S tokens of a group, H width, E experts, C places of an expert, F hidden width
G, S, H, E, C, F = 8, 64, 128, 8, 16, 512


def experts(params, x_GSH):
    gates_GSE = jax.nn.softmax(x_GSH @ params["gate"])
    chosen_GSE = jax.nn.one_hot(gates_GSE.argmax(-1), E, dtype=int)
    place_GSE = (jnp.cumsum(chosen_GSE, 1) - 1) * chosen_GSE  # a token's turn at its expert
    dispatch_GSEC = chosen_GSE[..., None] * jax.nn.one_hot(place_GSE, C)  # beyond C: dropped
    sent_EGCH = jnp.einsum("gsec,gsh->egch", dispatch_GSEC, x_GSH)
    hidden_EGCF = jax.nn.relu(jnp.einsum("egch,ehf->egcf", sent_EGCH, params["up"]))
    done_EGCH = jnp.einsum("egcf,efh->egch", hidden_EGCF, params["down"])
    combine_GSEC = dispatch_GSEC * gates_GSE[..., None]
    return x_GSH + jnp.einsum("gsec,egch->gsh", combine_GSEC, done_EGCH)


def train_step(params, x_GSH, y_GSH):
    def loss_fn(params):
        return jnp.mean((experts(params, x_GSH) - y_GSH) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


params = {"gate": normal(0, H, E), "up": normal(1, E, H, F) / 12, "down": normal(2, E, F, H) / 24}
x, y = normal(3, G, S, H), normal(4, G, S, H)

mesh = spmd.make_mesh(data=2, expert=4)
params = spmd.mark_tree(params, mesh, {name: ("expert", None, None) for name in ("up", "down")})
x, y = spmd.mark_tree((x, y), mesh, {"*": (("data", "expert"), None, None)})
compiled = spmd.jit(train_step, mesh=mesh).compile(params, x, y)
assert compiled.verify(params, x, y)  # runs it unpartitioned too, and compares every result

new_params, loss = compiled(params, x, y)
print(f"loss {loss:.4f}, verified")
for c in compiled.collectives:
    print(f"{c.kind} over {', '.join(c.axes)}: {c.bytes:,} bytes\n    {c.reason}")
