"""A run of one's own model: evaluated, saved, and gone on with on another mesh."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import tempfile

import jax
import numpy as np
import optax

import spmd
from spmd.models.training.trainer import Trainer, TrainerOptions

WINDOW, WIDTH, ROWS = 16, 64, 256
TEXT = np.frombuffer(" ".join(str(n * n) for n in range(5000)).encode(), np.uint8)


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (128, WIDTH)),
        "up": jax.random.normal(keys[1], (WINDOW * WIDTH, 8 * WIDTH)) / 32,
        "down": jax.random.normal(keys[2], (8 * WIDTH, 128)) / 64,
    }


def loss(params, batch):
    x = params["embed"][batch["context"]].reshape(-1, WINDOW * WIDTH)
    logits = jax.nn.relu(x @ params["up"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


def data(step, text=TEXT[:30_000]):  # a step has the same batch, whoever asks and when
    starts = np.random.default_rng(step).integers(0, len(text) - WINDOW, ROWS)
    windows = text[starts[:, None] + np.arange(WINDOW + 1)].astype(np.int32)
    return {"context": windows[:, :-1], "next": windows[:, -1]}


def train(folder, steps, mesh):
    trainer = Trainer(
        init,
        loss,
        {"up": ("rows", "columns"), "down": ("columns", "rows")},
        data,
        mesh=mesh,
        batch_marks={"*": ("rows",)},
        optimizer=optax.adamw(1e-3),
        held_out=lambda step: data(step, TEXT[30_000:]),
        options=TrainerOptions(steps=steps, run_dir=folder, save_every=50, eval_every=50),
    )
    trainer.console.quiet = True  # what it prints of each step differs from day to day
    return trainer.run()


def train_on_one_device(steps):
    params, optimizer = init(jax.random.key(0)), optax.adamw(1e-3)
    state = optimizer.init(params)
    grads_of = jax.jit(jax.grad(loss))
    for step in range(steps):
        updates, state = optimizer.update(grads_of(params, data(step)), state, params)
        params = optax.apply_updates(params, updates)
    return params


spmd.initialize()  # joins the other processes, where there are some
with tempfile.TemporaryDirectory() as folder:
    for steps, sizes in ((100, {"rows": 4, "columns": 2}), (200, {"rows": 2, "columns": 4})):
        outcome = train(folder, steps, spmd.make_mesh(**sizes))
        print(f"{sizes}: steps {outcome.first['step']} to {outcome.state.step}")
        print(f"  loss {outcome.first['loss']:.2f} to {outcome.last['loss']:.2f}")
        print(f"  held out {outcome.eval_loss:.2f}, up {outcome.state.params['up'].sharding.spec}")
alone = train_on_one_device(200)
batch = data(1000)
ours = loss(jax.device_get(outcome.state.params), batch)
np.testing.assert_allclose(ours, loss(alone, batch), rtol=1e-2)
print(f"loss of another batch: {ours:.2f}, as one device's jax.jit without a break has it")
