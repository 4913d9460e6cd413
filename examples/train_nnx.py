"""A whole run of a flax NNX model with batch norm and dropout, as nnx.Optimizer would train it."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import tempfile

import jax
import numpy as np
import optax
from flax import nnx

import spmd
from spmd.models.training.trainer import Stateful, Trainer, TrainerOptions

TEACHER = np.random.default_rng(0).standard_normal((2, 32, 8), np.float32)  # inputs, classes


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(256, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.norm(self.up(x)))))


def mean_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()


def data(step):  # a step has the same batch, whoever asks and when
    x = np.random.default_rng(step).standard_normal((256, 32), np.float32)
    return {"x": x, "label": np.argmax(x @ TEACHER[0] + (x @ TEACHER[1]) ** 2 / 4, axis=-1)}


graph = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))


def init(key):  # what is trained, and what is not: running means, dropout's key and its count
    return Stateful(*nnx.split(Model(nnx.Rngs(key)), nnx.Param, ...)[1:])


def loss(variables, batch):
    model = nnx.merge(graph, *variables)
    return mean_loss(model, batch), nnx.state(model, nnx.Not(nnx.Param))


def eval_loss(variables, batch):
    model = nnx.merge(graph, *variables)
    model.eval()  # takes the running means, and drops nothing
    return mean_loss(model, batch)


def train(folder, steps, mesh):
    trainer = Trainer(
        init,
        loss,
        {"params/up/kernel/*": ("rows", "columns")},
        data,
        mesh=mesh,
        batch_marks={"*": ("rows",)},
        optimizer=optax.adamw(3e-3),
        held_out=lambda step: data(10_000 + step),
        eval_loss=eval_loss,
        options=TrainerOptions(steps=steps, run_dir=folder, save_every=50, eval_batches=1),
    )
    trainer.console.quiet = True  # what it prints of each step differs from day to day
    return trainer.run()


with tempfile.TemporaryDirectory() as folder:
    for steps, sizes in ((100, {"rows": 4, "columns": 2}), (200, {"rows": 2, "columns": 4})):
        outcome = train(folder, steps, spmd.make_mesh(**sizes))
        print(f"{sizes}: steps {outcome.first['step']} to {outcome.state.step}")
        print(f"  loss {outcome.last['loss']:.2f}, held out {outcome.eval_loss:.2f}")
params = outcome.state.params.params
print(f"  up {params['up']['kernel'].sharding.spec}, down {params['down']['kernel'].sharding.spec}")
alone = Model(nnx.Rngs(jax.random.key(0)))
optimizer = nnx.Optimizer(alone, optax.adamw(3e-3), wrt=nnx.Param)
grads_of = nnx.jit(nnx.grad(mean_loss))
for step in range(200):
    optimizer.update(alone, grads_of(alone, data(step)))
expected = eval_loss(nnx.split(alone, nnx.Param, ...)[1:], data(10_000))
np.testing.assert_allclose(outcome.eval_loss, expected, rtol=1e-2)
print("held out as nnx.Optimizer has it on one device, without a break")
