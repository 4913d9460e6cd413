"""A trainer of one's own model: the same run as plain jax, on any mesh, broken off or not."""

import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.models.training.data.samples import PackedTokens
from spmd.models.training.data.source import from_documents, whole
from spmd.models.training.errors import RunError
from spmd.models.training.run.optimizer import OptimizerConfig
from spmd.models.training.trainer import Trainer, TrainerOptions, exit_code
from tests.models.llama.made import assert_close
from tests.models.training.own_model import data, init, loss, make_trainer
from tests.two_processes import run_both

STEPS = 6


@pytest.fixture(scope="module")
def alone():
    """Parameters and losses of plain jax on one device."""
    params, optimizer = init(jax.random.key(0)), optax.adam(1e-2)
    state, losses = optimizer.init(params), []

    @jax.jit
    def take(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for step in range(STEPS):
        params, state, value = take(params, state, data(step))
        losses.append(float(value))
    return jax.device_get(params), losses


def test_it_is_the_same_run_as_in_plain_jax(alone, tmp_path: Path):
    """Half of it on one mesh and half on another, with everything that a run folder keeps."""
    options = {"run_dir": tmp_path / "run", "save_every": 2, "eval_every": 3, "eval_batches": 1}
    first = make_trainer(spmd.make_mesh(across=4, up=2), steps=4, **options).run()
    assert first.first["loss"] == pytest.approx(alone[1][0], rel=1e-5)
    second = make_trainer(spmd.make_mesh(across=2, up=4), steps=STEPS, **options).run()
    assert (second.first["step"], second.state.step, exit_code(second)) == (5, STEPS, 0)
    assert_close(second.state.params, alone[0], rtol=2e-4, atol=2e-6)
    assert second.eval_loss == pytest.approx(float(loss(alone[0], data(10_000))), rel=1e-4)
    assert second.state.params["layers"][0]["w"].sharding.spec[0] == "up"
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert there >= {"checkpoints", "metrics.jsonl", "tensorboard", "report.html", "compiled"}
    cache_dir = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    assert cache_dir != str(tmp_path / "run/compiled")
    with pytest.raises(RunError, match="holds a run that has come to step 6; go on from there"):
        make_trainer(spmd.make_mesh(across=2, up=4), steps=9, resume=None, **options).run()


def test_parts_of_a_batch_and_named_optimizers(alone):
    config = OptimizerConfig(
        name="adamw", total_steps=STEPS, learning_rate=1e-2, schedule="constant", warmup_steps=0,
        weight_decay=0.0, clip_norm=None, beta2=0.999,
    )  # fmt: skip
    mesh = spmd.make_mesh(across=2, up=2, devices=jax.devices()[:4])
    trainer = make_trainer(mesh, optimizer=config, steps=STEPS, microbatches=2, eval_batches=0)
    outcome = trainer.run()
    assert_close(outcome.state.params, alone[0], rtol=2e-4, atol=2e-6)
    assert outcome.last["learning_rate"] == pytest.approx(1e-2)
    assert outcome.last["rows_per_s"] > 0


def test_a_run_of_packed_tokens_goes_on_behind_the_samples_that_it_has_seen(tmp_path: Path):
    corpus = whole(from_documents([np.arange(400)], 400))
    for batch, steps, samples in ((4, 2, 8), (2, 5, 14), (4, 6, 18)):
        Trainer(
            lambda key: jnp.ones(400), lambda params, batch: jnp.mean(params[batch["inputs"]]), {},
            PackedTokens([corpus], 4, batch), mesh=spmd.make_mesh(data=2),
            batch_marks={"*": ("data",)}, optimizer=optax.sgd(1.0),
            options=TrainerOptions(steps=steps, run_dir=tmp_path, metrics=()),
        ).run()  # fmt: skip
        meta = json.loads((tmp_path / f"checkpoints/{steps}/meta.json").read_text())
        assert meta["samples"] == samples


def test_sigterm_saves_and_says_so(alone, tmp_path: Path):
    def data_with_a_signal(step):
        if step == 3 and not (tmp_path / "sent").exists():
            (tmp_path / "sent").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return data(step)

    mesh = spmd.make_mesh(across=2, devices=jax.devices()[:2], up=1)
    options = {"steps": 10_000, "run_dir": tmp_path / "run", "metrics": (), "eval_batches": 0}
    stopped = make_trainer(mesh, data=data_with_a_signal, **options).run()
    assert (stopped.is_stopped, exit_code(stopped)) == (True, 75)
    steps = stopped.state.step
    again = make_trainer(mesh, data=data, **{**options, "steps": steps + 1}).run()
    assert again.first["step"] == steps + 1


@pytest.mark.thorough
def test_two_processes(alone, tmp_path: Path):
    said = run_both(Path(__file__).with_name("own_model.py"), tmp_path / "run")
    assert said[0] == said[1]
    assert said[0]["loss 3"] == pytest.approx(alone[1][2], rel=1e-4)
    assert said[0]["loss 6"] == pytest.approx(alone[1][5], rel=1e-4)
    assert (said[0]["ended"], said[0]["went on"]) == (2, 9)
    assert "the processes of this job differ in data (hash)" in said[0]["other data"]
