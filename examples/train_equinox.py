"""A whole run of an equinox transformer with dropout, as equinox and optax alone would train it."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import numpy as np
import optax

import spmd
from spmd.models.training.trainer import Stateful, Trainer, TrainerOptions

LENGTH, WIDTH = 16, 64
TEXT = np.frombuffer(" ".join(str(n * n) for n in range(5000)).encode(), np.uint8)


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    norms: list
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(128 + LENGTH, WIDTH, key=keys[0])  # characters, places
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(3)]
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[1])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, tokens, key):
        x = jax.vmap(self.embed)(tokens) + self.embed.weight[128:]
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jax.numpy.tri(LENGTH, dtype=bool))
        x = x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x)), key=key)
        return jax.vmap(self.norms[2])(x) @ self.embed.weight[:128].T / WIDTH**0.5


def mean_loss(model, text, key):
    logits = jax.vmap(model)(text[:, :-1], jax.random.split(key, len(text)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def data(step, text=TEXT[:30_000]):  # a step has the same batch, whoever asks and when
    starts = np.random.default_rng(step).integers(0, len(text) - LENGTH, 128)
    return text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


structs = eqx.filter_eval_shape(Model, jax.random.key(0))  # no array is made
static = eqx.filter(structs, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))


def init(key):  # what is trained, and what goes from step to step beside it: dropout's key
    return Stateful(eqx.filter(Model(key), eqx.is_array), key)


def loss(variables, text):
    key, now = jax.random.split(variables.state)
    return mean_loss(eqx.combine(variables.params, static), text, now), key


def eval_loss(variables, text):
    model = eqx.nn.inference_mode(eqx.combine(variables.params, static))  # drops nothing
    return mean_loss(model, text, variables.state)


def train():
    trainer = Trainer(
        init,
        loss,
        {"params/*_proj/weight": ("columns", "rows"), "*/mlp/layers/0/weight": ("columns", "rows")},
        data,
        mesh=spmd.make_mesh(rows=4, columns=2),
        batch_marks={"*": ("rows",)},
        optimizer=optax.adamw(3e-3),
        held_out=lambda step: data(step, TEXT[30_000:]),
        eval_loss=eval_loss,
        options=TrainerOptions(steps=100, eval_every=50, eval_batches=1),
    )
    trainer.console.quiet = True  # what it prints of each step differs from day to day
    return trainer.run()


outcome = train()
print(f"loss {outcome.last['loss']:.2f}, held out {outcome.eval_loss:.2f}")
model = eqx.combine(outcome.state.params.params, static)  # a model again, its arrays split
print(f"hidden units {model.mlp.layers[0].weight.sharding.spec}")

alone, optimizer, key = Model(jax.random.key(0)), optax.adamw(3e-3), jax.random.key(0)
state = optimizer.init(eqx.filter(alone, eqx.is_array))
grads_of, update = eqx.filter_jit(eqx.filter_grad(mean_loss)), eqx.filter_jit(optimizer.update)
for step in range(100):
    key, now = jax.random.split(key)
    updates, state = update(grads_of(alone, data(step), now), state, alone)
    alone = eqx.apply_updates(alone, updates)
expected = eqx.filter_jit(eval_loss)(Stateful(alone, key), data(0, TEXT[30_000:]))
np.testing.assert_allclose(outcome.eval_loss, expected, rtol=1e-2)
print("held out as equinox and optax alone have it on one device")
