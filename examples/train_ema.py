"""A mean of the parameters over steps: what is evaluated and exported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.models.training.trainer import Hooks, Trainer, TrainerOptions


def data(step, noise=1):
    random = np.random.default_rng(step)
    x, e = random.standard_normal((64, 8), np.float32), random.standard_normal(64, np.float32)
    return {"x": x, "y": x.sum(1) + noise * e}


def loss(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def mean_of_params(decay):  # beside the optimizer's state, divided and saved as that is
    def update(updates, mean, params):
        return updates, optax.incremental_update(params + updates, mean, 1 - decay)

    return optax.GradientTransformation(jnp.copy, update)


for name, rule in {"last": None, "mean": lambda params, opt_state: opt_state[-1]}.items():
    trainer = Trainer(lambda key: jnp.zeros(8), loss, {}, data, mesh=spmd.make_mesh(rows=8),
                      batch_marks={"*": ("rows",)}, hooks=Hooks(eval_params=rule),
                      optimizer=optax.chain(optax.adam(0.1), mean_of_params(0.95)),
                      held_out=lambda step: data(step, noise=0),
                      options=TrainerOptions(steps=200))  # fmt: skip
    trainer.console.quiet = True
    print(f"{name}: held out {trainer.run().eval_loss:.3f}")
