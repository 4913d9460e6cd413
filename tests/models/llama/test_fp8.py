"""A Llama whose projections are multiplied in 8-bit floats: trained, saved, resumed, exported."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.models.llama import parameters
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.weights.save import _sources
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.run.step import loss_and_grads
from spmd.ops import Fp8State, fp8
from tests.models.llama.made import assert_close, fresh_params, structs
from tests.models.llama.test_program import HALF, STEPS, go_on, make_trainer, take

MESH = {"data": 4, "model": 2}
FP8 = dataclasses.replace(CONFIGS["tiny"], matmul="fp8")


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(MESH, matmul="fp8")


@pytest.mark.thorough
def test_a_resumed_run_is_the_run_that_never_stopped(trainer, tmp_path):
    """States are saved and restored like everything else; microbatches take their maximum."""
    whole, losses = take(trainer, trainer.fresh_state(), STEPS)
    half, first = take(trainer, trainer.fresh_state(), HALF)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(half)
    resumed, rest = go_on(trainer, tmp_path / "checkpoints")
    assert first + rest == losses
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    for state in jax.tree.leaves(fp8.split(whole.params)[1]):
        maxima = np.asarray(state)
        assert (maxima[..., 0] > 0).all()
        assert (maxima[..., STEPS + 1 :] == 0).all()
        assert state.sharding.is_fully_replicated
    assert not jax.tree.leaves(fp8.split(whole.opt_state)[1])  # no optimizer's business


@pytest.mark.thorough
def test_parameters_of_others_get_states(trainer):
    fresh = trainer.fresh_state().params
    given = jax.tree.map(jnp.copy, parameters.without_states(fresh))
    assert_close(trainer.fresh_state(given).params, fresh, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("scan_layers", [True, False])
def test_states_know_the_weights_and_are_not_exported(scan_layers):
    config = dataclasses.replace(FP8, scan_layers=scan_layers)
    params = fresh_params(config)
    plain = dataclasses.replace(config, matmul="dtype")
    found: Any = jax.tree.structure(parameters.without_states(params))
    assert found == jax.tree.structure(structs(plain))
    assert len(_sources(params, config)) == len(_sources(parameters.without_states(params), plain))
    layer = params["layers"] if scan_layers else params["layers"]["1"]
    state = layer["mlp"]["fp8"]["gate_proj up_proj"]
    assert isinstance(state, Fp8State)
    last = state.maxima[-1] if scan_layers else state.maxima
    up = layer["mlp"]["up_proj"]["weight"]
    assert last.shape == (5, 16)
    assert last[2, 0] == np.abs(up[-1] if scan_layers else up).max()


def test_microbatches_take_the_maximum_of_their_maxima():
    params: Any = {"w": jnp.eye(4), "s": fp8.fp8_state(jnp.eye(4))}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)

    def loss(params, batch):
        return jnp.mean(fp8.fp8_dot(batch, params["w"], params["s"]))

    _, _, grads = loss_and_grads(loss, params, x, microbatches=4)
    maxima = grads["s"].maxima
    np.testing.assert_array_equal(maxima[:2, 0], [np.abs(x).max(), 1.0])
    np.testing.assert_array_equal(maxima[:, 1], params["s"].maxima[:, 0])
