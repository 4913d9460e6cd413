"""Weights on an object store: written as on a disk, and read by ranges."""

import jax
import numpy as np
import pytest

from spmd.models.llama.named import CONFIGS
from spmd.models.llama.weights import load as weights
from spmd.models.llama.weights.config import read_config
from spmd.models.llama.weights.files import WeightsError, open_folder
from spmd.models.llama.weights.sources import hf_source
from spmd.models.training.paths import file_sizes

TINY = CONFIGS["tiny"]


def test_the_same_files_as_on_a_disk_and_the_same_parameters(tiny_params, store, tmp_path):
    weights.save(tiny_params, TINY, tmp_path / "model", max_shard_bytes=100_000)
    weights.save(tiny_params, TINY, str(store), max_shard_bytes=100_000)
    there = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert len(there) == 4
    assert {name: (store / name).read_bytes() for name in file_sizes(store)} == there
    assert read_config(str(store)) == read_config(tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, weights.load(str(store), TINY), tiny_params)
    with pytest.raises(WeightsError, match="exists already; name a new or an empty folder"):
        weights.check_can_save(str(store))


def test_slices_are_read_by_ranges(tiny_params, s3, asked):
    weights.save(tiny_params, TINY, s3, dtype="bfloat16")
    with open_folder(s3) as stored, hf_source(s3) as source:
        name = "model.layers.0.self_attn.q_proj.weight"
        rows, columns = stored.tensors[name].shape
        whole = np.asarray(source.tensors[name])
        del asked[:]
        part = stored.read(name, (slice(2, 5), slice(0, columns)))
        np.testing.assert_array_equal(part, whole[2:5])
        assert [size for *_, size in asked] == [3 * columns * 2]
        del asked[:]
        for low in range(0, columns, columns // 4):  # the shards of four devices
            index = (slice(1, rows), slice(low, low + columns // 4))
            np.testing.assert_array_equal(stored.read(name, index), whole[index])
        assert sum(size for *_, size in asked) <= rows * columns * 2


def test_broken_files_are_one_line(tiny_params, s3):
    weights.save(tiny_params, TINY, s3)
    content = (s3 / "model.safetensors").read_bytes()
    for broken in (content[:-1], content[:100], b"", b"\xff" * 64):
        (s3 / "model.safetensors").write_bytes(broken)
        with pytest.raises(WeightsError, match="is truncated or no safetensors file"):
            weights.check_can_load(s3, TINY)
    with pytest.raises(WeightsError, match="is no folder; name one that holds"):
        weights.check_can_load(s3 / "none", TINY)


def test_of_an_export_that_fails_nothing_is_left_and_a_killed_one_is_replaced(
    tiny_params, s3, monkeypatch
):
    from spmd.models.llama.weights import save

    def fail(*_):
        raise OSError("the bucket is full")

    with monkeypatch.context() as broken:
        broken.setattr(save, "write_beside", fail)
        with pytest.raises(WeightsError, match="the bucket is full"):
            weights.save(tiny_params, TINY, s3)
    assert not file_sizes(s3)
    (s3 / ".unfinished").write_text("")  # what a process that was killed leaves
    (s3 / "model.safetensors").write_text("half")
    weights.save(tiny_params, TINY, s3)
    weights.check_can_load(s3, TINY)
    assert ".unfinished" not in file_sizes(s3)
