"""Llama's relatives are trained as transformers and PyTorch train them; all parts together."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import spmd
from benchmarks.llama_step import train_step
from spmd.models.llama import parameters, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.objective import batch_loss
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.models.training.run.optimizer import initial_state
from spmd.ops import fp8
from tests.models.llama.layers import stack_layers, unstack_layers
from tests.models.llama.made import LATENT, assert_close, fresh_params
from tests.models.llama.test_packing import batch as packed_batch
from tests.models.llama.weights import checkpoints
from tests.models.llama.weights.checkpoints import with_random_biases
from tools import compare_training

STEPS = 3
PARTS = dataclasses.replace(
    CONFIGS["tiny"], model_type="qwen3", num_hidden_layers=2, attention_bias="qkvo", qk_norm=True,
    sliding_window=5, max_window_layers=1, initializer_range=0.2,
)  # fmt: skip
"""A model that has everything by which families differ."""


def batches() -> list[dict[str, Any]]:
    """Token ids of each step: more of them than windows reach."""
    tokens = np.random.default_rng(1).integers(3, 128, (STEPS, 8, 25)).astype(np.int32)
    return [{"inputs": x[:, :-1], "targets": x[:, 1:]} for x in tokens]


def their_steps(folder: Any, into: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses and parameters after `STEPS` steps of PyTorch's AdamW."""
    import torch
    import transformers

    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = list(compare_training.torch_steps(net, lambda number: batches()[number], STEPS))
    net.save_pretrained(into)
    return losses, load_file(into / "model.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(v, marks=() if v == "qwen3_moe" else pytest.mark.heavy)
        for v in checkpoints.FAMILIES
    ],
)
def test_three_steps_are_transformers(
    variant: str, folders: Any, mesh: spmd.Mesh, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded, trained on a mesh and saved again: their losses, their parameters."""
    # AdamW's usual epsilon makes a whole step of a gradient that is rounding alone.
    monkeypatch.setattr(compare_training, "EPSILON", 1e-5)
    config = dataclasses.replace(read_config(folders(variant)), scan_layers=variant != "biased")
    params = weights.load(folders(variant), config)
    rule = compare_training.optimizer()
    step = spmd.jit(train_step(config, rule, sharding.activation_marks(mesh, config)), mesh=mesh)
    params, state = sharding.mark_params(params, mesh, config), rule.init(params)
    losses = []
    for given in batches():
        params, state, loss = step(params, state, sharding.mark_batch(given, mesh))
        losses.append(float(loss))
    their_losses, theirs = their_steps(folders(variant), tmp_path / "theirs")
    np.testing.assert_allclose(losses, their_losses, rtol=1e-5)
    weights.save(params, config, tmp_path / "trained")
    ours, before = (
        load_file(x / "model.safetensors") for x in (tmp_path / "trained", folders(variant))
    )
    assert set(ours) == set(theirs)
    for name, wanted in theirs.items():
        moved = np.abs(wanted - before[name]).max()
        fixed = name.endswith("correction_bias")  # no gradient moves it; this rule decays it
        assert (moved > 1e-3) != fixed, name
        rtol = 1e-3 if fixed else 0
        np.testing.assert_allclose(ours[name], wanted, rtol, atol=0.02 * moved, err_msg=name)


@functools.cache
def drawn(config: LlamaConfig) -> Any:
    return with_random_biases(fresh_params(config))


@functools.cache
def alone(config: LlamaConfig) -> Any:
    """Loss and gradients with packed documents: unrolled, on one device, by two einsums."""
    plain = dataclasses.replace(config, attention="einsum", scan_layers=False)
    params = unstack_layers(drawn(config))
    return jax.jit(jax.value_and_grad(functools.partial(batch_loss, config=plain)))(
        params, packed_batch()
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.heavy),
        {"scan_layers": False, "attention": "composite", "remat": "save:q,k"},
        pytest.param({"attention": "einsum", "remat": "full"}, marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_all_parts_with_packed_documents(changes: dict[str, Any], mesh: spmd.Mesh) -> None:
    """On a mesh, scanned and not, by every attention."""
    config = dataclasses.replace(PARTS, **changes)
    given = drawn(PARTS) if config.scan_layers else unstack_layers(drawn(PARTS))
    step = jax.value_and_grad(
        functools.partial(batch_loss, config=config, mark=sharding.activation_marks(mesh, config))
    )
    loss, grads = spmd.jit(step, mesh=mesh)(
        sharding.mark_params(given, mesh, config), sharding.mark_batch(packed_batch(), mesh)
    )
    found = loss, unstack_layers(grads) if config.scan_layers else grads
    assert_close(found, alone(PARTS), rtol=2e-4, atol=1e-6)


@pytest.mark.thorough
def test_all_parts_in_fp8() -> None:
    config = dataclasses.replace(PARTS, matmul="fp8")
    params = drawn(config)
    rule = compare_training.optimizer()
    step = jax.jit(train_step(config, rule))
    new, _, loss = step(params, initial_state(rule, params), packed_batch())
    exact = float(alone(PARTS)[0])
    assert abs(loss - exact) > 1e-5 * exact and float(loss) == pytest.approx(exact, rel=0.02)
    layers, before = new["layers"]["self_attn"], params["layers"]["self_attn"]
    for name, part in (("q_proj", "bias"), ("o_proj", "bias"), ("k_norm", "weight")):
        assert np.abs(layers[name][part] - before[name][part]).max() > 1e-4
    for state in jax.tree.leaves(fp8.split(new)[1]):
        assert (np.asarray(state)[..., 0] > 0).all()


MIXTURE = dataclasses.replace(
    PARTS, model_type="qwen3_moe", attention_bias="none", max_window_layers=0, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=48, router_aux_loss_coef=0.1,
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("axes", "table", "changes"),
    [
        ({"data": 2, "expert": 2, "model": 2}, "2d", {}),
        pytest.param(
            {"data": 4, "model": 2}, "2d-experts", {"remat": "full"}, marks=pytest.mark.heavy
        ),
        pytest.param({"expert": 2, "model": 2}, "fsdp", {}, marks=pytest.mark.heavy),
        pytest.param({"data": 4, "model": 2}, "2d", {}, marks=pytest.mark.heavy),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [MIXTURE, LATENT], ids=["mixture", "latent"])
def test_experts_on_meshes(
    model: LlamaConfig, axes: Any, table: str, changes: Any, devices8: Any
) -> None:
    mesh = spmd.make_mesh(devices=devices8[: math.prod(axes.values())], **axes)
    specs = sharding.table_named(table)
    config = dataclasses.replace(model, **changes)
    step = jax.value_and_grad(
        functools.partial(
            batch_loss, config=config, mark=sharding.activation_marks(mesh, config, specs)
        )
    )
    found = spmd.jit(step, mesh=mesh)(
        sharding.mark_params(drawn(model), mesh, config, specs),
        sharding.mark_batch(packed_batch(), mesh, specs),
    )
    loss, grads = alone(model)
    assert_close(found, (loss, stack_layers(grads)), rtol=5e-4, atol=1e-6)
    held = found[1]["layers"]["mlp"]["experts"]["up_proj"]["weight"].addressable_shards[0]
    split = axes["data"] if table == "2d-experts" else axes.get("expert", 1)
    assert held.data.shape[1] <= model.num_experts // split  # of gradients, that leave the program


@pytest.mark.thorough
def test_experts_are_not_in_fp8() -> None:
    """What is multiplied beside them is."""
    config = dataclasses.replace(MIXTURE, matmul="fp8")
    params = drawn(config)
    assert "q_proj k_proj v_proj" in params["layers"]["self_attn"][parameters.FP8]
    assert not params["layers"]["mlp"][parameters.FP8]
    loss = float(jax.jit(functools.partial(batch_loss, config=config))(params, packed_batch()))
    exact = float(alone(MIXTURE)[0])
    assert abs(loss - exact) > 1e-5 * exact and loss == pytest.approx(exact, rel=0.02)


def test_the_load_balancing_loss_counts() -> None:
    unbalanced = dataclasses.replace(MIXTURE, router_aux_loss_coef=0.0)
    loss = float(
        jax.jit(functools.partial(batch_loss, config=unbalanced))(drawn(MIXTURE), packed_batch())
    )
    assert 0.1 * 2 <= alone(MIXTURE)[0] - loss < 0.1 * 2 * 2  # two choices, if all are alike
