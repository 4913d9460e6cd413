"""A run whose numbers go to Weights & Biases, here without its server."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import tempfile

import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.models.training.trainer import Hooks, Trainer, TrainerOptions

try:
    import wandb
except ImportError:
    raise SystemExit("this example needs wandb: pip install wandb") from None
OPTIONS = TrainerOptions(steps=20, eval_every=5)
X = np.random.default_rng(0).standard_normal((64, 64), np.float32)


def loss(w, batch):  # what comes behind the loss is a metric of its own
    return jnp.mean((batch["x"] @ w - 1) ** 2), {"largest": jnp.abs(w).max()}


os.environ["WANDB_SILENT"] = "true"
with tempfile.TemporaryDirectory() as here, wandb.init(mode="offline", dir=here) as run:

    def log(record, params=None):
        run.log(record, step=record["step"])

    trainer = Trainer(lambda key: jnp.zeros(64), loss, {}, lambda step: {"x": X},
                      mesh=spmd.make_mesh(rows=8), batch_marks={"x": ("rows",)},
                      optimizer=optax.sgd(0.1), hooks=Hooks(after_step=log, after_eval=log),
                      held_out=lambda step: {"x": X}, options=OPTIONS)  # fmt: skip
    trainer.console.quiet = True
    print(f"held out {trainer.run().eval_loss:.2f}")
