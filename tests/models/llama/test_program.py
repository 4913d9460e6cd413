"""A Llama's program: what it evaluates, its fresh parameters; runs of a small one."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import spmd
from spmd.models.llama import objective
from spmd.models.llama.fresh import init
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.program import LlamaProgram, init_params
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.data import source as data
from spmd.models.training.options import TrainerOptions
from spmd.models.training.run.description import RunConfig
from spmd.models.training.run.loop import Loop
from spmd.models.training.run.optimizer import OptimizerConfig
from tests.models.llama.layers import stack_layers
from tests.models.llama.made import assert_close, fresh_params, shardings_of
from tests.models.training.checkpoints.states import latest
from tests.models.training.notes import Notes

SMALL = dataclasses.replace(CONFIGS["tiny"], hidden_size=16, intermediate_size=32, vocab_size=256)
STEPS, HALF = 4, 2
TEXT = data.encode("".join(chr(33 + i * i % 90) for i in range(4000)))


def make_run(mesh, **model_changes):
    return RunConfig(
        model=dataclasses.replace(SMALL, **model_changes),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-2),
        options=TrainerOptions(steps=STEPS, microbatches=2, on_nonfinite="skip"),
        mesh=mesh,
        seq_len=16,
        global_batch=16,
    )


def windows(run):
    text = data.whole(data.from_documents([TEXT], 256))
    return data.PackedTokens([text], run.seq_len, run.global_batch, seed=run.options.seed)


def make_trainer(mesh, **model_changes):
    run = make_run(mesh, **model_changes)
    return LlamaProgram(run, spmd.make_mesh(**mesh), windows(run).struct())


def take(trainer, state, steps):
    """The state after so many steps in all, and the losses of those taken."""
    notes = Notes()
    batches = map(trainer.place, map(windows(trainer.run), itertools.count(state.step)))
    options = TrainerOptions(steps=steps)
    loop = Loop(trainer.step, state, batches, options, cost=trainer.cost, sinks=[notes])
    return loop.run().state, [record["loss"] for record in notes]


def go_on(trainer, folder):
    with Checkpoints(folder) as checkpoints:
        state = checkpoints.restore(latest(checkpoints), trainer.targets())
    return take(trainer, state, STEPS)


@pytest.fixture(scope="module")
def trainer():
    return make_trainer({"data": 4, "model": 2})


@pytest.mark.thorough
def test_evaluates_what_the_loss_is(trainer):
    dataset = windows(trainer.run)
    params = take(trainer, trainer.fresh_state(), 1)[0].params
    got = trainer.evaluation(dataset, 2)(params)["loss"]
    params = jax.device_get(params)
    loss = jax.jit(lambda p, b: objective.loss(p, b["inputs"], b["targets"], SMALL))
    expected = [loss(params, dataset(0)), loss(params, dataset(1))]
    assert got == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.thorough
def test_fresh_parameters_are_those_of_init_stacked_or_unrolled(trainer):
    config = dataclasses.replace(SMALL, scan_layers=False)
    stacked = trainer.step.in_shardings[0]
    without_layers = jax.tree.map(
        lambda s: jax.sharding.NamedSharding(s.mesh, jax.sharding.PartitionSpec(*s.spec[1:])),
        stacked["layers"],
    )
    layers = {str(i): without_layers for i in range(config.num_hidden_layers)}
    params = init_params(config, jax.random.key(0), {**stacked, "layers": layers})
    fresh = trainer.fresh_state().params
    jax.tree.map(np.testing.assert_array_equal, stack_layers(params), fresh)
    assert_close(fresh, fresh_params(SMALL), rtol=1e-6)
    assert params["layers"]["1"]["mlp"]["up_proj"]["weight"].sharding.spec[0] == "model"


def init_memory(layers, config):
    """(bytes of the parameters, bytes beside them) on each of eight devices."""
    config = dataclasses.replace(config, num_hidden_layers=layers)
    shardings = shardings_of(config, spmd.make_mesh(data=4, model=2))
    make = jax.jit(lambda key: init(key, config), out_shardings=shardings)
    memory = make.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory is not None
    return memory.output_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.thorough
def test_memory_beside_the_parameters_is_that_of_a_layer():
    config = dataclasses.replace(CONFIGS["tiny"], hidden_size=256, intermediate_size=1024)
    few, many = init_memory(4, config), init_memory(32, config)
    assert many[0] > 6 * few[0]
    assert many[1] < 1.1 * few[1]
