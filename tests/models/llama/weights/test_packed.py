"""Quantized checkpoints: what is read stands for the same numbers, and so do products with it."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.models.llama.config import ConfigError, LlamaConfig
from spmd.models.llama.quantize import dequantize
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.files import WeightsError
from spmd.models.llama.weights.packed import check_quantization
from spmd.models.llama.weights.sources import hf_source
from spmd.ops import linear
from spmd.serving.llama_bundle import serving_weights
from tests.models.llama.made import flat, fresh_params
from tests.models.llama.test_decode import FEW, backend_of, check_against_forward, on_mesh, plain
from tests.models.llama.weights import checkpoints, quantized

CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=256, intermediate_size=384, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, scan_layers=False,
)  # fmt: skip
PROJECTION = "_proj.weight"


def about(config: LlamaConfig, name: str) -> dict[str, Any]:
    keys = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads"
    ).split()
    given = {key: getattr(config, key) for key in keys}
    return {"model_type": "llama", **given, "quantization_config": quantized.FORMATS[name][1]}


def tensors() -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in checkpoints_of(fresh_params(CONFIG)).items()}


def checkpoints_of(params: Any) -> dict[str, Any]:
    names = {path: path.replace("/", ".") for path in flat(params)}
    return {
        n if n.startswith("lm_head") else f"model.{n}": flat(params)[path]
        for path, n in names.items()
    }


@pytest.mark.parametrize("name", quantized.FORMATS)
def test_what_is_read_is_what_is_stored(name, tmp_path):
    """Bit by bit, for training, for converting and for serving; products are of the same."""
    stored, whole = quantized.quantized(name, tensors(), lambda t: t.endswith(PROJECTION))
    quantized.write(tmp_path / "q", stored, about(CONFIG, name))
    params = weights.load(tmp_path / "q", CONFIG)
    for tensor, found in checkpoints_of(params).items():
        np.testing.assert_array_equal(found, whole[tensor], err_msg=tensor)
    with hf_source(tmp_path / "q") as source:
        tree = jax.tree.map(np.asarray, serving_weights(source, "float32", "none"))
        for tensor, want in whole.items():
            np.testing.assert_array_equal(np.asarray(source.tensors[tensor]), want)
    layer = tree["layers"]["0"]
    assert "weight" not in layer["mlp"]["down_proj"] and "weight" in tree["lm_head"]
    down = layer["mlp"]["down_proj"]
    want = whole["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(dequantize(down), want)
    x = np.random.default_rng(0).standard_normal((3, want.shape[1])).astype(np.float32)
    given = x[:, down["order"]] if "order" in down else x
    np.testing.assert_allclose(linear(given, down), x @ want.T, atol=1e-3)
