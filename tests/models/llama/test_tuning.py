"""Losses of preferences and of distillation, beside sums written down, and on a mesh."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.models.llama import fresh, objective
from spmd.models.llama.model import forward
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.parameters import TEACHER
from spmd.models.llama.program import LlamaProgram
from spmd.models.training.data.source import DataConfig, load_datasets
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.description import RunConfig
from spmd.models.training.run.optimizer import OptimizerConfig

TINY = dataclasses.replace(CONFIGS["tiny"], initializer_range=0.2)
TEACHING = dataclasses.replace(TINY, num_hidden_layers=1)
PARAMS, OTHERS, TAUGHT = (
    jax.tree.map(np.asarray, fresh.init(jax.random.key(seed), config))  # none can be donated
    for seed, config in enumerate((TINY, TINY, TEACHING))
)
PAIRS = [
    {"prompt": f"{i} and ", "chosen": "so on" * (i % 3 + 1), "rejected": "no" * (i % 4 + 1)}
    for i in range(8)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    return load_datasets(DataConfig([str(path)], valid=[str(path)]), seq_len=48, batch_size=8)[0]


def logps(params, kind):
    """Of answers and the ends of their documents, each alone in a sequence."""
    texts = [(row["prompt"] + row[kind] + "\0").encode().ljust(33, b"\0") for row in PAIRS]
    tokens = np.array([list(text) for text in texts], np.int32)
    found = jax.nn.log_softmax(forward(params, jnp.asarray(tokens[:, :-1]), TINY))
    each = np.take_along_axis(np.asarray(found), tokens[:, 1:, None], -1)[..., 0]
    spans = [(len(row["prompt"]), len(row["prompt"] + row[kind])) for row in PAIRS]
    return [row[start - 1 : stop].sum() for row, (start, stop) in zip(each, spans, strict=True)]


def program(data, **more):
    run = RunConfig(
        model=TINY, mesh={"data": 4, "model": 2}, seq_len=48, global_batch=8, dpo_beta=0.3,
        options=TrainerOptions(steps=1, microbatches=2 if more else 1), distill_temperature=2.0,
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3),
    )  # fmt: skip
    return LlamaProgram(run, spmd.make_mesh(data=4, model=2), data, **more)


def test_preferences_are_as_written_down_and_as_on_a_mesh(data):
    made = program(data.struct())
    params = jax.device_put(OTHERS, made.step.in_shardings[0])
    data = dataclasses.replace(data, references=made.reference(params, {"it": data})["it"])
    reference, found = (
        np.stack([logps(params, kind) for kind in ("chosen", "rejected")], axis=1)
        for params in (OTHERS, PARAMS)
    )
    np.testing.assert_allclose(data.references, reference, rtol=1e-5)
    rewards = 0.3 * (found - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    batch = data(0)
    loss, metrics = objective.preference_loss(PARAMS, batch, TINY, beta=0.3)
    assert loss == pytest.approx(np.log1p(np.exp(-margins)).mean(), rel=1e-5)
    assert metrics["rewards/chosen"] == pytest.approx(rewards[:, 0].mean(), rel=1e-4)
    assert metrics["rewards/margins"] == pytest.approx(margins.mean(), rel=1e-4)
    assert metrics["rewards/accuracies"] == np.mean(margins > 0)
    assert metrics["logps/rejected"] == pytest.approx(found[:, 1].mean(), rel=1e-5)
    state = made.fresh_state(jax.device_put(PARAMS, made.step.in_shardings[0]))
    _, _, stepped = made.step(state.params, state.opt_state, made.place(batch))
    assert {name: float(stepped[name]) for name in metrics} == pytest.approx(
        jax.tree.map(float, metrics), rel=1e-4
    )


def test_distillation_is_as_written_down_and_as_on_a_mesh():
    tokens = np.random.default_rng(0).integers(0, 256, (8, 49)).astype(np.int32)
    weights = (np.arange(48) % 3 > 0) * np.ones((8, 1), np.float32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    batch = jax.tree.map(jnp.asarray, batch)
    ours, theirs = (
        jax.nn.log_softmax(forward(params, batch["inputs"], config) / 2)
        for params, config in ((PARAMS, TINY), (TAUGHT, TEACHING))
    )
    apart = np.average(jnp.sum(jnp.exp(theirs) * (theirs - ours), -1), weights=weights)
    entropy = objective.loss(
        PARAMS, batch["inputs"], batch["targets"], TINY, weights_BS=batch["weights"]
    )
    wanted = 0.5 * entropy + 0.5 * 4 * apart
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    made = program(structs, teacher=TEACHING)
    state = made.fresh_state(jax.device_put({**PARAMS, TEACHER: TAUGHT}, made.step.in_shardings[0]))
    params, _, found = made.step(state.params, state.opt_state, made.place(batch))
    assert found["loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert found["kl"] == pytest.approx(float(apart), rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, params[TEACHER], TAUGHT)
    assert not np.array_equal(params["norm"]["weight"], PARAMS["norm"]["weight"])
