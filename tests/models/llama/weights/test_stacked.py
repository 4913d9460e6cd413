"""gpt-oss' files: all experts in one tensor, as floats or in MXFP4; transformers reads the same."""

import json
from pathlib import Path

import numpy as np
import pytest

from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.convert import write_hf
from spmd.models.llama.weights.files import TensorEntry, WeightsError, plan_files, write_files
from spmd.models.llama.weights.sources import hf_source
from tests.models.llama.weights import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("gpt_oss")
    checkpoints.write("gpt_oss", path, intermediate_size=64, num_hidden_layers=2)
    return path


def test_it_is_written_as_it_was_read(folder: Path, tmp_path: Path) -> None:
    with hf_source(folder) as source:
        assert source.tensors["model.layers.1.mlp.experts.3.up_proj.bias"].shape == (64,)
        write_hf(source, tmp_path / "again")
    found, wanted = (checkpoints.tensors(x) for x in (tmp_path / "again", folder))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("lacking", [None, "_scales"])
def test_mxfp4_is_what_transformers_makes_of_it(
    lacking: str | None, folder: Path, tmp_path: Path
) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng, stored, wanted = np.random.default_rng(0), {}, {}
    for name, array in checkpoints.tensors(folder).items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            stored[name] = array
            continue
        experts, inputs, outputs = array.shape
        shape = experts, outputs, inputs // 32
        blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
        scales = rng.integers(120, 132, shape, np.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        of_all = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
        wanted[name] = of_all.float().numpy()
    stored = {name: x for name, x in stored.items() if not (lacking and name.endswith(lacking))}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    entries = [TensorEntry(name, x.shape, x.dtype.name) for name, x in stored.items()]
    write_files(tmp_path, plan_files(entries, 10**9), iter(stored.values()))
    if lacking:
        with pytest.raises(WeightsError, match=r"_proj has no .*_proj_scales of .*; download"):
            weights.check_can_load(tmp_path, read_config(tmp_path))
        return
    with hf_source(tmp_path) as source:
        write_hf(source.astype("bfloat16"), tmp_path / "plain")  # has room for all of these
        tensor = source.tensors["model.layers.0.mlp.experts.2.down_proj.weight"]
        piece = tensor[slice(3, 7), slice(5, 50)]
    np.testing.assert_array_equal(
        piece, wanted["model.layers.0.mlp.experts.down_proj"][2].T[3:7, 5:50]
    )
    plain = checkpoints.tensors(tmp_path / "plain")
    for name, array in wanted.items():
        np.testing.assert_array_equal(plain[name].astype(np.float32), array, err_msg=name)
