"""Checkpoints that transformers wrote, loaded by us: the same logits, read shard by shard."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import spmd
from spmd.models.llama import model, sharding
from spmd.models.llama.program import generate, make_next_logits
from spmd.models.llama.weights import files as hf_files
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.files import WeightsError
from tests.models.llama.made import forward, shardings_of, structs
from tests.models.llama.weights import checkpoints
from tests.models.llama.weights.checkpoints import TOKENS_BS, VARIANTS
from tests.two_processes import record_reads

pytest.importorskip("torch")
pytest.importorskip("transformers")


def compile_forward(config, mesh):
    """The partitioned forward pass, with the marks that training has."""
    mark = sharding.activation_marks(mesh, config)
    step = spmd.jit(lambda p, t: model.forward(p, t, config, mark), mesh=mesh)
    params = sharding.mark_params(structs(config), mesh, config)
    return step.compile(params, sharding.mark_batch(TOKENS_BS, mesh))


def assert_same_logits(ours, folder):
    expected = checkpoints.their_logits(folder)
    assert np.std(expected) > 0.5
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


QUICK = {"llama3", "linear", *checkpoints.FAMILIES} - {"mixtral"}
"""Variants that have, together, all in which the variants differ."""


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=() if v in QUICK else pytest.mark.heavy) for v in VARIANTS]
)
def test_logits_are_transformers(variant, folders, mesh):
    if variant in ("heads", "qwen2"):
        config = read_config(folders(variant))
        compiled = compile_forward(config, mesh)
        params = weights.load(folders(variant), config, compiled.in_shardings[0])
    else:  # what others have is split in `test_families.py`
        config = dataclasses.replace(read_config(folders(variant)), scan_layers=False)
        compiled, params = forward(config), weights.load(folders(variant), config)
    assert_same_logits(compiled(params, TOKENS_BS), folders(variant))


def test_greedy_text_is_transformers(folders):
    variant = "llama3"
    config = read_config(folders(variant))
    params = weights.load(folders(variant), config)
    next_logits = jax.jit(make_next_logits(config))
    prompt = TOKENS_BS[0, :5].tolist()
    ours = generate(next_logits, params, prompt, tokens=32, window=37, temperature=0)
    assert ours == checkpoints.their_continuation(folders(variant), prompt, 32)
    assert len(set(ours)) > 5


# What is read


@pytest.fixture
def reads(monkeypatch):
    """(name, shape, bytes) of every slice that is read."""
    return record_reads(monkeypatch.setattr)


@pytest.mark.parametrize("scan", [True, False])
def test_every_byte_is_read_once_and_no_split_tensor_whole(scan, folders, mesh, reads):
    config = dataclasses.replace(read_config(folders("heads")), scan_layers=scan)
    weights.load(folders("heads"), config, shardings_of(config, mesh))
    assert sum(nbytes for _, _, nbytes in reads) == 4 * config.parameter_count()
    matrices = {shape for name, shape, _ in reads if "layernorm" not in name and name != NORM}
    assert matrices == {(8, 16), (16, 8), (64, 8), (24, 8), (8, 24)}


NORM = "model.norm.weight"


def test_param_dtype_and_loaded_parameters_can_be_donated(folders, mesh):
    config = dataclasses.replace(read_config(folders("grouped")), param_dtype="bfloat16")
    params = weights.load(folders("grouped"), config, shardings_of(config, mesh))
    exact = weights.load(folders("grouped"), dataclasses.replace(config, param_dtype="float32"))
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), exact)
    jax.tree.map(np.testing.assert_array_equal, params, rounded)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    config = read_config(folders("heads"))
    params = weights.load(folders("heads"), config, shardings_of(config, mesh))
    expected = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), params)
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)(params)
    jax.tree.map(np.testing.assert_array_equal, doubled, expected)


# What does not fit


@pytest.fixture
def copy(folders, tmp_path):
    """A copy of a variant, to be spoilt."""

    def make(variant):
        return shutil.copytree(folders(variant), tmp_path / variant)

    return make


def failure(folder, config=None):
    with pytest.raises(WeightsError) as caught:
        weights.load(folder, config or read_config(folder))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_does_not_fit_a_config(folders):
    config = dataclasses.replace(read_config(folders("heads")), intermediate_size=64)
    message = failure(folders("heads"), config)
    assert "6 of another shape" in message
    assert "gate_proj.weight is (48, 32) and should be (64, 32)" in message
    assert "and 1 more" in message
    assert "config.json that belongs to these weights" in message
    config = read_config(folders("heads"))
    more = failure(folders("heads"), dataclasses.replace(config, num_hidden_layers=3))
    assert "9 missing: model.layers.2." in more
    assert "and 4 more" in more
    fewer = failure(folders("heads"), dataclasses.replace(config, num_hidden_layers=1))
    assert "9 unexpected: model.layers.1." in fewer
    config = dataclasses.replace(read_config(folders("llama3")), tie_word_embeddings=False)
    message = failure(folders("llama3"), config)
    assert "1 missing: lm_head.weight" in message
    assert "set tie_word_embeddings to true" in message


def rewrite(folder, change):
    """Change the tensors of a folder of one file."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_tied_head_may_lie_there_if_it_is_the_same(copy):
    folder = copy("llama3")
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[table].copy()}))
    assert "lm_head" not in weights.load(folder, read_config(folder))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[table] + 1}))
    assert "set tie_word_embeddings to false" in failure(folder)


def test_buffers_of_old_checkpoints_are_passed_over_and_quantized_weights_are_not(copy):
    folder = copy("heads")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({name: np.ones(4, np.float32)}))
    weights.load(folder, read_config(folder))
    rewrite(folder, lambda t: t.update({NORM: t[NORM].astype(np.int8)}))
    message = failure(folder)
    assert "not floating point: model.norm.weight is I8" in message
    assert "as config.json says in quantization_config" in message


@pytest.mark.parametrize("size", [0, 5, 100, 5000])
def test_truncated_files(size, copy):
    file = copy("heads") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert f"{file} is truncated or no safetensors file" in failure(file.parent)


def test_flipped_bits_of_the_header(copy):
    """An error of ours, or a change that is none: never another exception."""
    folder = copy("heads")
    config = read_config(folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for position in [*range(8), *range(8, header, 41)]:
        flipped = bytes([whole[position] ^ 1 << position % 8])
        file.write_bytes(whole[:position] + flipped + whole[position + 1 :])
        try:
            weights.check_can_load(folder, config)
        except WeightsError:
            refused += 1
    assert refused > 30


def test_no_safetensors(tmp_path, folders):
    config = read_config(folders("heads"))
    assert "no folder" in failure(tmp_path / "nowhere", config)
    assert "holds neither model.safetensors nor" in failure(tmp_path, config)
    (tmp_path / "pytorch_model.bin").touch()
    assert "convert its pickled weights" in failure(tmp_path, config)


def spoil_index(folder, change):
    file = folder / hf_files.INDEX_FILE
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 3, None]
)
def test_the_index_leads_nowhere_else(name, copy):
    folder = copy(checkpoints.SHARDED)
    spoil_index(folder, lambda weight_map: weight_map.update({NORM: name}))
    assert "no file of the folder itself" in failure(folder)


def test_broken_indices(copy):
    folder = copy(checkpoints.SHARDED)
    spoil_index(folder, lambda weight_map: weight_map.pop(NORM))
    assert f"disagree about {NORM}" in failure(folder)
    spoil_index(folder, lambda weight_map: weight_map.clear())
    assert "has no weight_map" in failure(folder)
    (folder / hf_files.INDEX_FILE).write_text("{")
    assert "cannot be read" in failure(folder)


def test_a_missing_file_of_several(copy):
    folder = copy(checkpoints.SHARDED)
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    assert f"{file} is missing" in failure(folder)
