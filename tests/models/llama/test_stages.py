"""A Llama over the stages of a pipeline: its loss and gradients are those of the scanned one."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd.models.llama import marks, objective, sharding
from spmd.models.llama.config import ConfigError
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.program import make_next_logits
from tests.models.llama.made import assert_close, forward, fresh_params

SCANNED = dataclasses.replace(CONFIGS["tiny"], num_hidden_layers=4, remat="full")
STAGES = dataclasses.replace(SCANNED, stages=2, stage_microbatches=4, stage_schedule="gpipe")
IDS = np.random.default_rng(0).integers(0, SCANNED.vocab_size, (2, 8, 32))
PACKED = {  # two documents in each row, of other lengths in each
    "segment_ids_BS": np.stack([np.arange(32) >= 3 * row + 4 for row in range(8)]).astype(np.int32),
    "positions_BS": np.stack([np.r_[: 3 * row + 4, : 28 - 3 * row] for row in range(8)]),
}

EXPERTS: Any = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}


def drawn() -> Any:
    return fresh_params(SCANNED)


def value_and_grad(config: Any, mark: Any = marks.no_marks) -> Any:
    def loss(params: Any, inputs: Any, targets: Any, packed: Any) -> Any:
        return objective.loss(params, inputs, targets, config, mark, **packed)

    return jax.value_and_grad(loss)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("packed", "schedule", "parts"),
    [
        pytest.param({}, "gpipe", {}, marks=pytest.mark.heavy),
        (PACKED, "interleaved", {}),
        ({}, "1f1b", EXPERTS),
    ],
)
def test_loss_and_gradients_are_those_of_the_scanned_model(
    packed: Any, schedule: str, parts: Any
) -> None:
    config = dataclasses.replace(STAGES, stage_schedule=schedule, **parts)
    scanned = dataclasses.replace(SCANNED, **parts)
    params = fresh_params(scanned)
    wanted = jax.jit(value_and_grad(scanned))(params, *IDS, packed)
    mesh = spmd.make_mesh(stage=2, data=2, **{"expert" if parts else "model": 2})
    given = sharding.mark_params(params, mesh, config), *sharding.mark_batch((*IDS, packed), mesh)
    step = spmd.jit(value_and_grad(config, sharding.activation_marks(mesh, config)), mesh=mesh)
    assert_close(step(*given), wanted, rtol=2e-4, atol=2e-6)


def test_stacked_layers_are_split_over_stages_but_text_is_generated_without_a_pipeline() -> None:
    shape = {"stage": 2, "data": 2, "model": 2}
    rules = sharding.parameter_rules(STAGES, shape)
    assert rules["layers/mlp/up_proj/weight"] == ("stage", "model", "data")
    assert rules["embed_tokens/weight"] == ("model", "data")
    whole = sharding.parameter_rules(SCANNED, shape)
    assert whole["layers/mlp/up_proj/weight"] == (None, "model", "data")
    tokens = IDS[0, :1]
    found = jax.jit(make_next_logits(STAGES))(drawn(), tokens, 5)
    np.testing.assert_allclose(found, forward(SCANNED)(drawn(), tokens)[0, 5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 3}, "3 stages of groups of remat_every 1 layers do not divide 4 layers"),
        ({"scan_layers": False}, "need scanned layers"),
        ({"matmul": "fp8"}, "without fp8"),
        ({"stage_schedule": "zero"}, "stage_schedule is 'zero', not one of"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(STAGES, **changes)
