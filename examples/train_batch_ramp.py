"""Batches that grow during a run: the step is compiled for each size, and the state stays."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.models.training.trainer import Hooks, Trainer, TrainerOptions

SIZES = {0: 32, 40: 64, 60: 256}  # from this step on, so many rows


def data(step):
    rows = [rows for start, rows in SIZES.items() if start <= step][-1]
    random = np.random.default_rng(step)
    x = random.standard_normal((rows, 8), np.float32)
    return {"x": x, "y": x.sum(1) + random.standard_normal(rows, np.float32)}


def loss(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def tell(record):
    if record["step"] % 20 == 0:
        print(f"step {record['step']}: {record['samples']} samples, loss {record['loss']:.3f}")


trainer = Trainer(lambda key: jnp.zeros(8), loss, {}, data, mesh=spmd.make_mesh(rows=8),
                  batch_marks={"*": ("rows",)}, optimizer=optax.adam(0.1),
                  hooks=Hooks(after_step=tell), options=TrainerOptions(steps=80))  # fmt: skip
trainer.console.quiet = True
trainer.run()
