"""Checkpoints that we write, loaded by transformers: the same tensors, whole or not there."""

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import spmd
from spmd.models.llama import sharding
from spmd.models.llama.config import RopeScaling
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights import save
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.files import WeightsError
from tests.models.llama.layers import unstack_layers
from tests.models.llama.made import forward, shardings_of, structs
from tests.models.llama.weights import checkpoints
from tests.two_processes import record_reads, run_both

TINY = CONFIGS["tiny"]
UNROLLED = dataclasses.replace(TINY, scan_layers=False)
QWEN3 = dataclasses.replace(
    TINY, model_type="qwen3", qk_norm=True, attention_bias="qkvo", sliding_window=6,
    max_window_layers=1, vocab_size=128, initializer_range=0.3, bos_token_id=126,
    eos_token_id=(126, 127),
)  # fmt: skip
MIXTURE = dataclasses.replace(
    QWEN3, model_type="qwen3_moe", max_window_layers=0, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=40, router_aux_loss_coef=0.1,
)  # fmt: skip
SCALING = RopeScaling(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
LLAMA3 = dataclasses.replace(
    TINY, vocab_size=128, intermediate_size=48, head_dim=16, rope_theta=1000.0,
    rope_scaling=SCALING, max_position_embeddings=128, initializer_range=0.3,
    tie_word_embeddings=True, bos_token_id=126, eos_token_id=(126, 127),
)  # fmt: skip


@functools.cache
def fresh(config):
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), x.dtype), structs(config)
    )


def assert_equal_trees(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.thorough
@pytest.mark.parametrize("config", [LLAMA3, QWEN3, MIXTURE])
def test_transformers_computes_the_same(config, mesh, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    params = fresh(config)
    folder = tmp_path / "exported"
    weights.save(sharding.mark_params(params, mesh, config), config, folder, max_shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    ours = forward(config)(params, checkpoints.TOKENS_BS)
    theirs = checkpoints.their_logits(folder)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    generation = checkpoints.theirs(folder).generation_config
    assert (generation.bos_token_id, generation.eos_token_id) == (126, [126, 127])


@pytest.mark.parametrize("config", [TINY, UNROLLED, LLAMA3, QWEN3, MIXTURE])
def test_round_trip_is_exact(config, mesh, tmp_path):
    params = fresh(config)
    weights.save(sharding.mark_params(params, mesh, config), config, tmp_path / "exported")
    read = dataclasses.replace(read_config(tmp_path / "exported"), scan_layers=config.scan_layers)
    explicit = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_width}
    assert read == dataclasses.replace(config, **explicit)
    assert_equal_trees(weights.load(tmp_path / "exported", read), params)


def test_scanned_and_unrolled_write_the_same_files(tmp_path):
    weights.save(fresh(TINY), TINY, tmp_path / "scanned")
    weights.save(unstack_layers(fresh(TINY)), UNROLLED, tmp_path / "unrolled")
    names = sorted(path.name for path in (tmp_path / "scanned").iterdir())
    assert names == ["config.json", "model.safetensors"]
    for name in names:
        first, second = ((tmp_path / kind / name).read_bytes() for kind in ("scanned", "unrolled"))
        assert first == second


def test_files_hold_at_most_so_many_bytes(tmp_path):
    params, folder = fresh(TINY), tmp_path / "exported"
    weights.save(params, TINY, folder, max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * TINY.parameter_count()
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        with safe_open(file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}
    names = list(checkpoints.tensors(folder))
    assert len(names) == len(index["weight_map"]) == 9 * TINY.num_hidden_layers + 3
    assert_equal_trees(weights.load(folder, read_config(folder)), params)


def test_dtype(tmp_path):
    params, folder = fresh(TINY), tmp_path / "exported"
    weights.save(params, TINY, folder, dtype="bfloat16")
    assert checkpoints.tensors(folder)["model.norm.weight"].dtype == ml_dtypes.bfloat16
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    expected = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    assert_equal_trees(weights.load(folder, read_config(folder)), expected)
    with pytest.raises(WeightsError, match="dtype is 'int8'"):
        weights.save(params, TINY, tmp_path / "other", dtype="int8")


def test_what_belongs_to_tokens_comes_along(tmp_path):
    known: dict[str, dict[str, float]] = {
        "config.json": {"pad_token_id": 7}, "generation_config.json": {"temperature": 0.6},
        "tokenizer.json": {},
    }  # fmt: skip
    for name, content in {**known, "model.safetensors": "not this"}.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = dataclasses.replace(TINY, eos_token_id=2)
    weights.save(fresh(TINY), config, tmp_path / "to", tokenizer_from=tmp_path)
    assert {path.name for path in (tmp_path / "to").iterdir()} == {*known, "model.safetensors"}
    for name, content in known.items():
        assert content.items() <= json.loads((tmp_path / "to" / name).read_text()).items()
    assert_equal_trees(weights.load(tmp_path / "to", read_config(tmp_path / "to")), fresh(TINY))


# Failures


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="full exists already; name a new or an empty folder"):
        weights.check_can_save(tmp_path / "full")
    with pytest.raises(WeightsError, match="exists already"):
        weights.save(fresh(TINY), TINY, tmp_path / "full")
    with pytest.raises(WeightsError, match="is no writable folder"):
        weights.check_can_save(tmp_path / "full/file/where")
    weights.check_can_save(tmp_path / "not/yet/there")
    weights.check_can_save(tmp_path / "empty")
    weights.save(fresh(TINY), TINY, tmp_path / "empty")
    assert (tmp_path / "empty/model.safetensors").exists()


def test_neither_parameters_of_another_config_nor_a_full_disk_leave_anything(tmp_path, monkeypatch):
    for other in (UNROLLED, LLAMA3, dataclasses.replace(TINY, vocab_size=128)):
        with pytest.raises(WeightsError, match="not those of the config"):
            weights.save(fresh(TINY), other, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []

    def write_files(folder, plan, arrays):
        (folder / "model.safetensors").write_bytes(next(arrays).tobytes())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "write_files", write_files)
    with pytest.raises(WeightsError, match=r"could not be written to .*No space left on device"):
        weights.save(fresh(TINY), TINY, tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


# Several processes


def test_two_processes(tmp_path):
    """Each reads its half, process 0 writes, and a failure is known to both."""
    params = fresh(TINY)
    weights.save(params, TINY, tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "full")
    said = run_both(Path(__file__), tmp_path)
    norms = 4 * 32 * (2 * TINY.num_hidden_layers + 1)  # these are whole on every device
    for one in said:
        assert one["read"] == (4 * TINY.parameter_count() - norms) // 2 + norms
    assert "exists already" in said[0]["failure"]
    assert "process 0 says why" in said[1]["failure"]
    assert_equal_trees(weights.load(tmp_path / "exported", TINY), params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "full", "original"]


def main() -> None:
    """Loads and saves a checkpoint, as one of two processes."""
    port, rank, root = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    config = CONFIGS["tiny"]
    reads = record_reads()
    params = weights.load(root / "original", config, shardings_of(config, spmd.make_mesh(data=4)))
    weights.save(params, config, root / "exported", max_shard_bytes=30_000)
    failure = ""
    try:
        weights.save(params, config, root / "full")
    except weights.WeightsError as error:
        failure = str(error)
    print(json.dumps({"read": sum(nbytes for _, _, nbytes in reads), "failure": failure}))


if __name__ == "__main__":
    main()
