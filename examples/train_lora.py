"""Low-rank adapters of a model of one's own, which is loaded and stays as it is."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.models.training.trainer import Hooks, Trainer, TrainerOptions

BASE, X = np.random.default_rng(0).standard_normal((2, 256, 256), np.float32) / 16


def init(key, base=0.0):
    return {"base": jnp.full_like(X, base), "a": jnp.array(X[:, :4]), "b": jnp.zeros((4, 256))}


def loss(params, x):  # that the model were BASE + 0.1
    y = x @ params["base"] + x @ params["a"] @ params["b"]
    return jnp.mean((y - x @ (BASE + 0.1)) ** 2)


with tempfile.TemporaryDirectory() as folder:
    for steps in (100, 200):  # the second run goes on; it loads BASE again
        trainer = Trainer(init, loss, {"base": ("rows", None)}, lambda step: X, frozen=("base",),
                          mesh=spmd.make_mesh(rows=8), batch_marks={"*": ("rows",)},
                          hooks=Hooks(first_params=lambda program: init(None, BASE)),
                          optimizer=optax.adam(1e-3),
                          options=TrainerOptions(steps=steps, run_dir=folder))  # fmt: skip
        trainer.console.quiet = True
        print(f"step {steps}: loss {(trainer.run().last or {})['loss']:.4f}")
    print(*json.loads(Path(folder, "checkpoints/200/meta.json").read_text())["arrays"])
