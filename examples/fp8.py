"""A flax model whose matrix products are of 8-bit floats, scaled by what earlier steps saw."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import spmd
from spmd.ops import fp8_dot, fp8_state


class Fp8(nn.Module):
    @nn.compact
    def __call__(self, x, kernel, dimension_numbers, *_, **__):
        state = self.variable("fp8", "state", fp8_state, kernel)
        return fp8_dot(x, kernel, state.value, dimension_numbers=dimension_numbers)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(1024, dtype=jnp.bfloat16, dot_general_cls=Fp8, name="up")(x))
        return nn.Dense(256, dtype=jnp.bfloat16, dot_general_cls=Fp8, name="down")(x)


model, optimizer = Model(), optax.adam(1e-3)


def train_step(params, states, opt_state, x, y):
    def loss_fn(params, states):
        out = model.apply({"params": params, "fp8": states}, x)
        return jnp.mean(jnp.square(jnp.asarray(out, jnp.float32) - y))

    loss, (grads, states) = jax.value_and_grad(loss_fn, (0, 1))(params, states)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), states, opt_state, loss


mesh = spmd.make_mesh(data=8)
random = np.random.default_rng(0)
x, y = (random.standard_normal((4096, 256), np.float32) for _ in range(2))
variables = model.init(jax.random.key(0), x)
args = variables["params"], variables["fp8"], optimizer.init(variables["params"]), x, y
expected = [jax.jit(train_step)(*args)[3]]
params = spmd.mark_tree(variables["params"], mesh, {"*/kernel": (None, "data")})
x = spmd.mark_sharding(x, mesh, ("data", None))

step = spmd.jit(train_step, mesh=mesh, donate_argnums=(0, 1, 2))
compiled = step.compile(params, variables["fp8"], jax.eval_shape(optimizer.init, params), x, y)
opt_state = compiled.init(2, optimizer.init, params)
states = variables["fp8"]
losses = []
for _ in range(3):
    params, states, opt_state, loss = step(params, states, opt_state, x, y)
    losses.append(loss)

np.testing.assert_allclose(losses[:1], expected, rtol=1e-3)
print("losses", *(f"{loss:.3f}" for loss in losses))
for c in compiled.collectives:
    print(f"{c.kind:14} {c.bytes:>7,} bytes  {c.reason}")
