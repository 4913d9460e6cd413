"""A Llama with its sequence split: the same loss and gradients as on one device."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd.models.llama import sharding
from spmd.models.llama.config import ConfigError
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.objective import batch_loss
from tests.models.llama.made import assert_close, forward, fresh_params
from tests.models.llama.test_packing import batch as packed_batch

TINY = CONFIGS["tiny"]


def batch(packed: bool) -> dict[str, Any]:
    found = packed_batch(32)
    return found if packed else {name: found[name] for name in ("inputs", "targets")}


@functools.cache
def alone(packed: bool) -> Any:
    params = fresh_params(TINY)
    return params, jax.jit(jax.value_and_grad(functools.partial(batch_loss, config=TINY)))(
        params, batch(packed)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("axes", "table", "zigzag", "packed"),
    [
        pytest.param({"data": 2, "seq": 4}, "2d", 4, False, marks=pytest.mark.heavy),
        ({"data": 2, "seq": 2, "model": 2}, "2d", 2, True),
        pytest.param({"seq": 4, "model": 2}, "2d-sequence", 1, True, marks=pytest.mark.heavy),
        pytest.param({"data": 2, "seq": 2, "model": 2}, "fsdp", 2, False, marks=pytest.mark.heavy),
        pytest.param({"data": 1, "seq": 4, "model": 2}, "tensor", 4, True, marks=pytest.mark.heavy),
    ],
)
def test_a_split_sequence(axes: Any, table: str, zigzag: int, packed: bool) -> None:
    mesh, specs = spmd.make_mesh(**axes), sharding.table_named(table)
    config = dataclasses.replace(TINY, zigzag=zigzag)
    params, want = alone(packed)
    loss = functools.partial(
        batch_loss, config=config, mark=sharding.activation_marks(mesh, config, specs)
    )
    marked = (
        sharding.mark_params(params, mesh, config, specs),
        sharding.mark_batch(batch(packed), mesh, specs),
    )
    step = spmd.jit(jax.value_and_grad(loss), mesh=mesh, options=spmd.Options(check=True))
    compiled = step.compile(*marked)
    assert_close(compiled(*marked), want, rtol=2e-4, atol=2e-6)
    if table == "2d":  # elsewhere heads may be exchanged for positions: attention is not split
        assert "rings" in compiled.explain(prices=False).splitlines()


def test_parameters_lie_over_data_and_the_sequence_but_not_with_einsum() -> None:
    rules = sharding.parameter_rules(TINY, {"data": 2, "seq": 2, "model": 2})
    assert rules["layers/mlp/up_proj/weight"] == (None, "model", ("data", "seq"))
    specs = sharding.activation_specs(TINY, {"seq": 4, "model": 2}, sharding.TABLES["2d-sequence"])
    assert specs["inputs_embeds"] == (None, ("seq", "model"), None)
    assert specs["q"] == (None, "seq", "model")
    with pytest.raises(ConfigError, match="einsum attention knows no zigzag order"):
        dataclasses.replace(TINY, zigzag=2, attention="einsum")


def test_forward_takes_and_gives_the_usual_order(tiny_params: Any) -> None:
    tokens = batch(False)["inputs"]
    want, got = (
        forward(config)(tiny_params, tokens)
        for config in (TINY, dataclasses.replace(TINY, zigzag=4))
    )
    np.testing.assert_array_equal(got, want)
