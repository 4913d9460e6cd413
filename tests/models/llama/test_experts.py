"""The biases of a DeepSeek's router follow its experts' loads: exactly, on all meshes, for good."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import spmd
from spmd.models.llama.model import forward
from spmd.models.llama.parameters import unstack_layers
from spmd.models.llama.program import LlamaProgram
from spmd.models.llama.weights.save import save
from spmd.models.training.checkpoints import tables
from spmd.models.training.checkpoints.store import Checkpoints
from tests.models.llama.made import LATENT
from tests.models.llama.test_program import HALF, STEPS, go_on, make_trainer, take, windows

RATE = 0.02


def made(mesh: dict[str, int], **changes: Any) -> LlamaProgram:
    small = {"vocab_size": 256, "num_hidden_layers": 2, "first_k_dense_replace": 0}
    of_router = {"router_aux_loss_coef": 0.0, "router_bias_rate": RATE}
    trainer: LlamaProgram = make_trainer(mesh, **vars(LATENT) | small | of_router | changes)
    return trainer


def bias_of(params: Any) -> Any:
    return np.asarray(params["layers"]["mlp"]["gate"]["e_score_correction_bias"])


@pytest.fixture(scope="module")
def alone() -> LlamaProgram:
    return made({"data": 1})


@jax.jit
def choices(params: Any, tokens: Any) -> Any:
    """The experts that each layer's tokens take."""
    config, mixture, found = made({"data": 1}, scan_layers=False).model, spmd.ops.experts, []

    def noted(x_BSH: Any, gates_BSC: Any, chosen_BSC: Any, *weights: Any) -> Any:
        found.append(chosen_BSC)
        return mixture(x_BSH, gates_BSC, chosen_BSC, *weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd.ops, "experts", noted)
        forward(params, tokens, config)
    return found


@pytest.fixture(scope="module")
def expected(alone: LlamaProgram) -> Any:
    """Biases after all steps, which numpy counts for and moves."""
    state, bias = alone.fresh_state(), np.zeros((2, 8), np.float32)
    for step in range(STEPS):
        tokens = windows(alone.run)(step)["inputs"]
        chosen = choices(unstack_layers(state.params), tokens)
        loads = np.stack([np.bincount(np.ravel(each), minlength=8) for each in chosen])
        bias += np.float32(RATE) * np.sign(loads.mean(-1, keepdims=True) - loads)
        state, _ = take(alone, state, step + 1)
        np.testing.assert_array_equal(bias_of(state.params), bias)
    return bias


def test_one_device_and_saved_and_exported(
    alone: LlamaProgram, expected: Any, tmp_path: Any
) -> None:
    """Of two microbatches; a run that goes on, and what it exports, have the biases moved."""
    half, _ = take(alone, alone.fresh_state(), HALF)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(half)
    resumed, _ = go_on(alone, tmp_path / "checkpoints")
    np.testing.assert_array_equal(bias_of(resumed.params), expected)
    assert not [path for path in tables.by_path(resumed.opt_state) if "correction" in path]
    save(resumed.params, alone.model, tmp_path / "hf")
    written = load_file(tmp_path / "hf/model.safetensors")
    names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1)]
    np.testing.assert_array_equal([written[name] for name in names], expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 2, "expert": 2, "model": 2}, {"remat": "full"}),
        ({"stage": 2, "data": 2}, {"stages": 2, "stage_microbatches": 4}),
    ],
    ids=str,
)
def test_meshes_move_them_to_the_bit(mesh: Any, changes: Any, expected: Any) -> None:
    trainer = made(mesh, **changes)
    state, _ = take(trainer, trainer.fresh_state(), STEPS)
    np.testing.assert_array_equal(bias_of(state.params), expected)


def test_a_skewed_router_becomes_balanced(alone: LlamaProgram) -> None:
    """And does not where its biases are put back after each step."""
    skewed = np.tile(np.linspace(0, 0.5, 8, dtype=np.float32), (2, 1))
    for is_moved in (True, False):
        state = alone.fresh_state()
        params, opt_state, largest = state.params, state.opt_state, []
        for step in range(50 if is_moved else 10):
            if step == 0 or not is_moved:
                gate = params["layers"]["mlp"]["gate"]
                gate["e_score_correction_bias"] = jnp.array(skewed)
            batch = alone.place(windows(alone.run)(step % STEPS))
            params, opt_state, metrics = alone.step(params, opt_state, batch)
            largest.append(float(metrics["largest_load"]))
        assert largest[0] > 2
        assert (np.mean(largest[-5:]) < 1.4) == is_moved, largest
