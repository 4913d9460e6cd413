import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from models.llama import model
from models.llama.config import CONFIGS
from models.training import data
from models.training.loop import (
    TrainingError,
    TrainState,
    make_train_step,
    train,
    typical_seconds,
)
from models.training.metrics import StepCost
from models.training.optimizer import OptimizerConfig, make_optimizer

TINY = CONFIGS["tiny"]
COST = StepCost(tokens=100, devices=1)


def counting_step(params, opt_state, batch):
    """Adds the batch to the parameters."""
    params = params + batch
    metrics = {"loss": jnp.asarray(params, jnp.float32), "grad_norm": jnp.zeros(())}
    return params, opt_state, metrics


def quiet():
    return Console(file=io.StringIO(), width=200)


def test_llama_learns_in_a_few_steps():
    tokens = data.encode("the quick brown fox jumps over the lazy dog. " * 40)
    corpus = data.whole(data.from_documents([tokens], 256))
    windows = data.PackedTokens([corpus], seq_len=16, batch_size=4)
    optimizer = make_optimizer(OptimizerConfig(name="adamw", total_steps=20, learning_rate=1e-2))

    def loss_fn(params, batch):
        return model.loss(params, batch["inputs"], batch["targets"], TINY)

    params = model.init(jax.random.key(0), TINY)
    state = TrainState(params, optimizer.init(params))
    step = jax.jit(make_train_step(loss_fn, optimizer), donate_argnums=(0, 1))
    state, records = train(step, state, windows, steps=20, cost=COST, console=quiet())
    assert state.step == 20
    assert records[0]["loss"] == pytest.approx(np.log(256), abs=0.2)
    assert records[-1]["loss"] < 3.5
    assert all(record["grad_norm"] > 0 for record in records)


def test_records_are_of_their_own_step():
    state, records = train(
        counting_step, TrainState(0, None), lambda step: step, steps=5, cost=COST, console=quiet()
    )
    assert state == TrainState(0 + 1 + 2 + 3 + 4, None, 5)
    assert [(record["step"], record["loss"]) for record in records] == [
        (1, 0),
        (2, 1),
        (3, 3),
        (4, 6),
        (5, 10),
    ]


def test_resuming_takes_the_remaining_steps():
    run = functools.partial(train, counting_step, cost=COST, console=quiet())
    half, _ = run(TrainState(0, None), lambda step: step, steps=3)
    resumed, records = run(half, lambda step: step, steps=5)
    whole, _ = run(TrainState(0, None), lambda step: step, steps=5)
    assert resumed == whole
    assert [record["step"] for record in records] == [4, 5]


def test_nothing_to_do():
    state, records = train(
        counting_step,
        TrainState(7, None, 3),
        lambda step: step,
        steps=3,
        cost=COST,
        console=quiet(),
    )
    assert (state, records) == (TrainState(7, None, 3), [])


def test_a_loss_that_is_not_finite_ends_the_run():
    with pytest.raises(TrainingError, match="the loss of step 2 is nan"):
        train(
            counting_step,
            TrainState(0.0, None),
            lambda step: float("nan") if step else 0.0,
            steps=5,
            cost=COST,
            console=quiet(),
        )


def test_progress_lines_and_jsonl(tmp_path):
    console, jsonl = quiet(), tmp_path / "log.jsonl"
    _, records = train(
        counting_step,
        TrainState(0, None),
        lambda step: step,
        steps=5,
        cost=COST,
        console=console,
        log_every=2,
        jsonl=jsonl,
    )
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/5", "2/5", "4/5", "5/5"]
    assert [json.loads(line) for line in jsonl.read_text().splitlines()] == records


def test_the_first_step_does_not_count_as_typical():
    records = [{"seconds": 60.0}, {"seconds": 1.0}, {"seconds": 3.0}, {"seconds": 2.0}]
    assert typical_seconds(records) == 2.0
    assert typical_seconds(records[:1]) == 60.0
