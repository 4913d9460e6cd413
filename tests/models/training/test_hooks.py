"""What a program adds to a run: on eight devices it is what plain jax does on one."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.models.training.errors import DataError
from spmd.models.training.trainer import Hooks, Stateful, Trainer, TrainerOptions, exit_code
from tests.models.llama.made import assert_close

WIDTH, DECAY = 8, 0.5


def init(key):
    return {"base": jax.random.normal(key, (WIDTH, WIDTH)) / 2, "a": jnp.ones(WIDTH)}


def loss(params, batch):
    found = jnp.tanh(batch["x"] @ params["base"]) * params["a"]
    errors = jnp.mean(jnp.square(found - batch["y"]), axis=1)
    weights = batch["weights"]
    return jnp.sum(errors * weights) / jnp.sum(weights), {
        "worst": jnp.sum(jnp.abs(found).max(1) * weights) / jnp.sum(weights)
    }


def data(step):
    random, rows = np.random.default_rng(step), 16 if step < 3 else 40
    x = random.standard_normal((rows, WIDTH), np.float32)
    return {"x": x, "y": np.roll(x, 1, 1), "weights": random.random(rows, np.float32)}


def with_mean():
    def update(updates, mean, params):
        new = optax.apply_updates(params, updates)
        return updates, optax.incremental_update(new, mean, 1 - DECAY)

    return optax.chain(
        optax.adam(1e-1), optax.GradientTransformation(lambda p: jax.tree.map(jnp.copy, p), update)
    )


def make_trainer(init=init, loss=loss, data=data, mesh=None, **given):
    options = {name: given.pop(name) for name in list(given) if name not in NAMES}
    given.setdefault("optimizer", optax.adam(1e-1))
    trainer = Trainer(
        init, loss, {"*a": ("up",)}, data, mesh=mesh or spmd.make_mesh(across=4, up=2),
        batch_marks={"*": ("across",)}, options=TrainerOptions(metrics=(), **options), **given,
    )  # fmt: skip
    trainer.console.quiet = True
    return trainer


NAMES = ("optimizer", "hooks", "frozen", "held_out", "eval_loss")


def alone(steps):
    """(adapters, their mean over steps, records) of plain jax on one device; `base` stays."""
    params, optimizer, records = init(jax.random.key(0)), with_mean(), []
    base, trained = params.pop("base"), params
    state, samples = optimizer.init(trained), 0

    @jax.jit
    def take(trained, state, batch):
        value_of = jax.value_and_grad(lambda p: loss({"base": base, **p}, batch), has_aux=True)
        (value, own), grads = value_of(trained)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, {"loss": value, **own}

    for step in range(steps):
        trained, state, record = take(trained, state, data(step))
        samples += len(data(step)["x"])
        records.append({"step": step + 1, "samples": samples} | jax.tree.map(float, record))
    return {"base": base, **trained}, {"base": base, **state[-1]}, records


@pytest.mark.parametrize("microbatches", [1, 2])
def test_all_of_it_as_plain_jax_has_it_also_broken_off(tmp_path: Path, microbatches):
    """Frozen parameters, a mean of the others, metrics, batches of two sizes, and two meshes."""
    noted: list[Any] = []
    evaluated: list[Any] = []
    hooks = Hooks(
        after_step=noted.append,
        after_eval=lambda record, params: evaluated.append((record, jax.device_get(params))),
        eval_params=lambda params, opt_state: opt_state[-1],
    )
    for steps, sizes in ((2, {"across": 4, "up": 2}), (6, {"across": 2, "up": 4})):
        outcome = make_trainer(
            mesh=spmd.make_mesh(**sizes), hooks=hooks, optimizer=with_mean(), frozen=["base"],
            held_out=data, eval_batches=3, steps=steps, run_dir=tmp_path, microbatches=microbatches,
        ).run()  # fmt: skip
    params, mean, records = alone(6)
    for found, wanted in zip(noted, records, strict=True):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert_close(outcome.state.params, params, rtol=1e-4, atol=1e-6)
    assert_close(outcome.params, mean, rtol=1e-4, atol=1e-6)
    record, parameters = evaluated[-1]
    assert_close(parameters, mean, rtol=1e-4, atol=1e-6)
    shares = np.array([data(step)["weights"].sum() for step in range(3)])
    means = [loss(mean, data(step)) for step in range(3)]
    wanted = {"eval_loss": [x for x, _ in means], "eval_worst": [x["worst"] for _, x in means]}
    wanted = {name: float(shares @ np.array(x)) / shares.sum() for name, x in wanted.items()}
    assert {name: record[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert outcome.samples == record["samples"] == 3 * 16 + 3 * 40
    meta = json.loads((tmp_path / "checkpoints/6/meta.json").read_text())
    assert meta["samples"] == outcome.samples
    assert not [path for path in meta["arrays"] if "base" in path]


def test_of_a_model_with_a_state(tmp_path: Path):
    """What is evaluated has the state of now; a state that a pattern matches is not frozen."""

    def stateful(key):
        return Stateful(init(key), {"base": jnp.zeros(())})

    def counting(variables, batch):
        value, own = loss(variables.params, batch)
        return value, {"base": variables.state["base"] + 1}, own

    outcome = make_trainer(
        stateful, counting, frozen=["*base"], optimizer=with_mean(), steps=3, eval_every=3,
        held_out=data, eval_batches=1,
        hooks=Hooks(eval_params=lambda params, opt_state: opt_state[-1]),
    ).run()  # fmt: skip
    params, mean, _ = alone(3)
    assert_close(outcome.state.params, Stateful(params, {"base": 3}), rtol=1e-4, atol=1e-6)
    assert_close(outcome.params, Stateful(mean, {"base": 3}), rtol=1e-4, atol=1e-6)


def learned_by_heart(step):
    x = np.random.default_rng(step % 2).standard_normal((16, 24), np.float32)
    return {"x": x, "y": np.random.default_rng(step % 2).standard_normal(16, np.float32)}


def test_ends_early_and_keeps_the_best(tmp_path: Path):
    def run(patience, steps=1000):
        return make_trainer(
            lambda key: {"a": jnp.zeros(24)},
            lambda params, batch: jnp.mean((batch["x"] @ params["a"] - batch["y"]) ** 2),
            learned_by_heart, held_out=lambda step: learned_by_heart(1), eval_every=2, steps=steps,
            run_dir=tmp_path, patience=patience, keep_best=True, keep_last=1,
        ).run()  # fmt: skip

    first = run(3, steps=12)
    ended = run(3)
    best = ended.best
    assert (ended.is_done, ended.is_stopped, exit_code(ended)) == (True, False, 0)
    assert (best.since, ended.state.step) == (3, best.step + 6)
    assert first.best.eval_loss >= best.eval_loss < ended.eval_loss
    kept = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {best.step, ended.state.step}
    again = run(3)
    assert (again.first, again.best, again.is_done) == (None, best, True)
    later = run(4)
    assert later.first["step"] == ended.state.step + 1
    assert (later.best.since, later.state.step) == (4, later.best.step + 8)


@pytest.mark.parametrize("hook", ["after_step", "after_eval"])
def test_a_hook_ends_the_run_as_its_last_step_would(tmp_path: Path, hook):
    hook_of: dict[str, Any] = {hook: lambda record, _=None: record["step"] >= 4}
    outcome = make_trainer(
        hooks=Hooks(**hook_of), steps=50, eval_every=2, run_dir=tmp_path, data=lambda s: data(0)
    )
    outcome = outcome.run()
    assert (outcome.is_done, outcome.state.step) == (True, 5 if hook == "after_step" else 4)
    assert (tmp_path / f"checkpoints/{outcome.state.step}").is_dir()


def renamed(params, batch):
    return loss(params, batch)[0], {"grad_norm": 0.0}


def not_a_scalar(params, batch):
    return loss(params, batch)[0], {"errors": batch["x"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": renamed}, "metrics with 'grad_norm'"),
        ({"loss": not_a_scalar}, "metrics with 'errors'"),
        ({"frozen": ["bas"]}, r"'bas' matches no parameter(?s:.*)there are base"),
        ({"frozen": ["*"]}, "no parameter is trained"),
        ({"data": lambda step: {**data(0), "x": np.zeros((16 + step, WIDTH + step), np.float32)}},
         r"a later batch has rows of {'weights': 'float32 \[\]', 'x': 'float32 \[9\]'"),
    ],
    ids=["taken", "shape", "pattern", "all", "batch"],
)  # fmt: skip
def test_what_cannot_be_is_said(given, message):
    with pytest.raises((spmd.SpmdError, DataError), match=message):
        make_trainer(steps=3, **given).run()
