"""Experts whose loads differ: a router's biases follow them, and hot ones are where tokens are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import spmd
from spmd.ir.description import COMPOSITE
from spmd.mesh.sharding import local_shape
from spmd.models.llama.config import ConfigError
from spmd.models.llama.experts import mixture
from spmd.models.llama.model import forward
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.program import LlamaProgram
from spmd.models.llama.weights.save import save
from spmd.models.training.checkpoints import tables
from spmd.models.training.checkpoints.store import Checkpoints
from tests.close import close
from tests.models.llama.layers import unstack_layers
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

    def noted(x_BSH: Any, gates_BSC: Any, chosen_BSC: Any, *weights: Any, **how: Any) -> Any:
        found.append(chosen_BSC)
        return mixture(x_BSH, gates_BSC, chosen_BSC, *weights, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd.ops, "experts", noted)
        forward(params, tokens, config)
    return found


@pytest.fixture(scope="module")
def expected(alone: LlamaProgram) -> Any:
    """Biases after all steps, which numpy counts for and moves."""
    state, bias = alone.fresh_state(), np.zeros((2, 8), np.float32)
    for step in range(STEPS):
        chosen = choices(unstack_layers(state.params), windows(alone.run)(step)["inputs"])
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


CONFIG = dataclasses.replace(CONFIGS["tiny"], num_experts=8, num_experts_per_tok=2)
ROWS, NAMES = ("expert",), ("gate_proj", "up_proj", "down_proj")
SPLIT = {"gate": {"weight": ()}, "experts": {name: {"weight": ("expert",)} for name in NAMES}}


def structs(hidden: int, inner: int) -> Any:
    struct = lambda *shape: {"weight": jax.ShapeDtypeStruct(shape, jnp.float32)}  # noqa: E731
    shapes = ((8, inner, hidden), (8, inner, hidden), (8, hidden, inner))
    experts = {name: struct(*shape) for name, shape in zip(NAMES, shapes, strict=True)}
    return {"gate": struct(8, hidden), "experts": experts}


def loss_of(hot: int) -> Any:
    def run(x: Any, weights: Any) -> Any:
        out, loads = mixture(weights, x, CONFIG, hot)
        return jnp.sum(jnp.sin(out)), loads

    return jax.value_and_grad(run, (0, 1), has_aux=True)


def test_hot_experts_give_the_same_numbers(devices8: Any) -> None:
    """Half of the choices are of two experts of one device."""
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape) / 4, jnp.float32)  # noqa: E731
    x, given = draw(np.zeros((8, 16, 16))).at[..., 0].set(3), jax.tree.map(draw, structs(16, 24))
    given["gate"]["weight"] = given["gate"]["weight"].at[:2, 0].set(3)
    want = jax.jit(loss_of(0))(x, given)
    assert want[0][1][0, :2].sum() > 1.9  # of two
    close(jax.jit(loss_of(2))(x, given), want)
    mesh = spmd.make_mesh(expert=4, devices=devices8[:4])
    close(spmd.jit(loss_of(2), mesh=mesh, in_specs=(ROWS, SPLIT)).compile(x, given)(x, given), want)


def test_rows_of_hot_experts_stay_where_they_are() -> None:
    """The others' are sent: a device has a quarter of the rows and two experts in both ops."""
    x = jax.ShapeDtypeStruct((8, 1024, 2048), jnp.float32)
    jitted = spmd.jit(loss_of(2), mesh=spmd.Mesh(None, (4,), ("expert",)), in_specs=(ROWS, SPLIT))
    plan = jitted.lower(x, structs(2048, 8192), topology=spmd.Topology("h200:4")).stages.plan
    found = [
        [
            local_shape(op.kind.operands[i].shape, plan.choice(op).operands[i], plan.mesh)[0]
            for i in (0, 4)
        ]
        for op in plan.program.walk()
        if op.name == COMPOSITE and op.kind.attrs["name"] == "spmd.experts"
    ]
    assert found == [[2, 2], [2, 2]]


def test_there_are_not_more_hot_experts() -> None:
    with pytest.raises(ConfigError, match="hot_experts 9: the model has 8 experts"):
        dataclasses.replace(CONFIG, hot_experts=9)
