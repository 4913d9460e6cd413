"""A model of one's own, of tuples and dicts, over axes of its own; two processes train it."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.models.training.trainer import Hooks, Trainer, TrainerOptions

ROWS, WIDTH = 16, 8


def init(key):
    keys = jax.random.split(key, 3)
    layers = tuple({"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4} for k in keys[:2])
    return {"layers": layers, "out": (jax.random.normal(keys[2], (WIDTH, 1)), jnp.zeros(1))}


def loss(params, batch):
    x, y = batch
    for layer in params["layers"]:
        x = jax.nn.tanh(x @ layer["w"])
    w, b = params["out"]
    return jnp.mean((x @ w + b - y) ** 2)


def data(step):
    x = np.random.default_rng(step).standard_normal((ROWS, WIDTH), np.float32)
    return x, x[:, :1] * x[:, 1:2]


def make_trainer(mesh, data=data, optimizer=None, hooks=None, frozen=(), **options):
    trainer = Trainer(
        init, loss, {"layers/*/w": ("up", None)}, data, mesh=mesh, batch_marks={"*": ("across",)},
        optimizer=optimizer or optax.adam(1e-2), held_out=lambda step: data(10_000 + step),
        hooks=hooks, frozen=frozen, options=TrainerOptions(**options),
    )  # fmt: skip
    trainer.console.quiet = True
    return trainer


def main() -> None:
    """Half of a run, the rest of it, and a run whose processes have other data."""
    port, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    spmd.initialize(f"localhost:{port}", 2, rank)
    mesh = spmd.make_mesh(across=2, up=2)
    told = {}
    for steps in (3, 6):
        options = {"eval_batches": 2, "audit_every": 1, "audit_steps": True}
        options["offload_optimizer"] = True
        outcome = make_trainer(mesh, steps=steps, run_dir=folder, **options).run()
        assert outcome.last is not None
        told[f"loss {steps}"] = outcome.last["loss"]
        told[f"held out {steps}"] = outcome.eval_loss
    asked = Hooks(after_eval=lambda record, params: rank == 0 and record["step"] == 2)
    again = {"steps": 9, "eval_every": 1, "run_dir": folder / "frozen", "frozen": ["out/*"]}
    told["ended"] = make_trainer(mesh, hooks=asked, **again).run().state.step
    told["went on"] = make_trainer(mesh, **again).run().state.step
    try:
        make_trainer(mesh, data=lambda step: data(step + rank), steps=3).run()
    except spmd.LaunchError as error:
        told["other data"] = str(error)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
