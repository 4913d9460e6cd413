"""Weights of bundles: those that were exported, to train from, to convert, to distil from."""

from pathlib import Path

import numpy as np
import pytest

from spmd.models.llama.config import ConfigError
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.convert import write_hf
from spmd.models.llama.weights.sources import hf_source
from spmd.serving.llama_bundle import write_llama_bundle
from tests.models.llama.test_decode import FEW
from tests.models.llama.weights import checkpoints


@pytest.mark.parametrize(("variant", "kind"), [("biased", "none"), ("mixtral", "fp8")])
def test_what_was_exported_is_read(variant: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    hf, bundle = tmp_path / "hf", tmp_path / "bundle"
    checkpoints.write(variant, hf, num_hidden_layers=1, hidden_size=64, head_dim=16)
    (hf / "tokenizer.json").write_text("{}")
    with hf_source(hf) as source:
        write_llama_bundle(source, bundle, FEW, dtype="float32", kind=kind, platforms=("cpu",))
    with hf_source(bundle) as source:
        write_hf(source, tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").is_file()
    assert read_config(tmp_path / "again") == read_config(hf)
    found, wanted = (checkpoints.tensors(x) for x in (tmp_path / "again", hf))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        loss = 0.07 * np.abs(array).max() if kind != "none" and array.ndim == 2 else 0
        np.testing.assert_allclose(found[name], array, rtol=0, atol=loss, err_msg=name)
    params = weights.load(bundle, read_config(bundle))
    last = params["layers"]["0"]["self_attn"]["o_proj"]["weight"]
    np.testing.assert_array_equal(last, found["model.layers.0.self_attn.o_proj.weight"])


def test_other_bundles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"contract": {}}')
    with pytest.raises(ConfigError, match="is not that of a Llama's bundle, whose weights can be"):
        read_config(tmp_path)
