"""A run that ends when evaluations get no better, and keeps the best of them."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import tempfile

import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.models.training.trainer import Trainer, TrainerOptions


def data(step):  # so few samples that they are learned by heart
    random = np.random.default_rng(step % 2)
    x = random.standard_normal((16, 24), np.float32)
    return {"x": x, "y": x[:, 0] + random.standard_normal(16, np.float32)}


def loss(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


with tempfile.TemporaryDirectory() as folder:
    options = TrainerOptions(
        steps=10_000, run_dir=folder, eval_every=10, patience=5, keep_best=True, keep_last=1
    )
    for _ in range(2):  # the second one finds nothing to be done
        trainer = Trainer(lambda key: jnp.zeros(24), loss, {}, data, mesh=spmd.make_mesh(rows=8),
                          batch_marks={"*": ("rows",)}, optimizer=optax.adam(0.02),
                          held_out=lambda step: data(1), options=options)  # fmt: skip
        trainer.console.quiet = True
        outcome = trainer.run()
        kept = sorted(map(int, os.listdir(f"{folder}/checkpoints")))
        print(f"ended after step {outcome.state.step}, checkpoints {kept}")
