"""A flax NNX model in a training step, its parameters marked by patterns of their paths."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx

import spmd

VOCABULARY, LENGTH, WIDTH = 256, 32, 128


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.block = Block(rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.block(self.embed(tokens), nnx.make_causal_mask(tokens)))


optimizer = optax.adam(1e-3)
graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)


def train_step(params, opt_state, text):
    def loss_fn(params):
        logits = nnx.merge(graph, params)(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


text = np.random.default_rng(0).integers(0, VOCABULARY, (32, LENGTH + 1), np.int32)
expected = jax.jit(train_step)(params, optimizer.init(params), text)

mesh = spmd.make_mesh(data=4, model=2)
rules = {
    "*/attention/out/kernel/*": ("model", None, "data"),  # heads, their width, the model's width
    "*/attention/*/kernel/*": ("data", "model", None),  # the model's width, heads, their width
    "*/up/kernel/*": ("data", "model"),
    "*/down/kernel/*": ("model", "data"),
    "embed/*": ("model", "data"),
}
params = spmd.mark_tree(params, mesh, rules)
text = spmd.mark_sharding(text, mesh, ("data", None))
step = spmd.jit(train_step, mesh=mesh, donate_argnums=(0, 1))
compiled = step.compile(params, jax.eval_shape(optimizer.init, params), text)
opt_state = compiled.init(1, optimizer.init, params)
params, opt_state, loss = step(params, opt_state, text)

np.testing.assert_allclose(loss, expected[2], rtol=1e-5)
print(f"loss {loss:.4f}, as jax.jit computes it")
for path, leaf in jax.tree.leaves_with_path(params):
    print(f"{jax.tree_util.keystr(path, simple=True, separator='/'):37} {leaf.sharding.spec}")
model = nnx.merge(graph, params)  # a model again, its parameters split
print(compiled.summary())
