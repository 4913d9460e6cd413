"""Checkpoints in other pieces: restored by training as before, for the devices they are cut for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmd.models.training.checkpoints.found import CheckpointError, find_saved
from spmd.models.training.checkpoints.relayout import piece_shape, relayout
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.run.loop import TrainState
from tests.models.training.checkpoints.states import (
    assert_same,
    make_mesh,
    restored,
    save,
    stored_chunk,
)

SPECS = {
    "w": PartitionSpec("data", "model"),
    "b": PartitionSpec(("data", "model")),
    "n": PartitionSpec(),
    "h": PartitionSpec("model"),
}


def make_state(mesh):
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.normal(size=(16, 8)).astype(np.float32),
        "b": np.arange(16, dtype=np.int32),
        "n": np.float32(3),
        "h": rng.normal(size=(8, 3)).astype(jnp.bfloat16),
    }
    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in arrays.items()}
    keys = jax.random.split(jax.random.key(1), 8)
    params["k"] = jax.device_put(keys, NamedSharding(mesh, PartitionSpec("data")))
    return TrainState({"layers": params}, {"mu": params, "count": jnp.int32(7)}, 7)


@pytest.mark.parametrize(("saved", "wanted"), [((4, 2), (1, 2)), ((1, 1), (2, 4))])
def test_training_restores_the_copy(saved, wanted, tmp_path, devices8):
    save(tmp_path / "from", make_state(make_mesh(devices8, *saved)), about={"config": {"seed": 1}})
    data, model = wanted
    assert relayout(tmp_path / "from", tmp_path / "to", {"data": data, "model": model}) == 7
    assert stored_chunk(tmp_path / "to" / "7", "params.layers.w") == (16 // data, 8 // model)
    found = find_saved(tmp_path / "to")
    assert found.meta["mesh"] == {"data": data, "model": model}
    assert found.meta["config"] == {"seed": 1}
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["7"]
    expected = make_state(make_mesh(devices8, *wanted))
    with Checkpoints(tmp_path / "to") as checkpoints:
        assert_same(restored(checkpoints, expected), expected)
    with pytest.raises(CheckpointError, match="exists already"):
        relayout(tmp_path / "from", tmp_path / "to", {"data": 1})


def test_what_cannot_be_written(tmp_path, devices8, monkeypatch):
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        relayout(tmp_path / "none", tmp_path / "to", {"data": 2})
    assert not (tmp_path / "to").exists()
    save(tmp_path / "from", make_state(make_mesh(devices8, 1, 1)))
    (tmp_path / "run" / "9").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds a run that has come to step 9; name another"):
        relayout(tmp_path / "from", tmp_path / "run", {"data": 1})

    def full(*arguments):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

    monkeypatch.setattr("spmd.models.training.checkpoints.pieces._write", full)
    with pytest.raises(CheckpointError, match=r"/7 cannot be written: .*no space is left"):
        relayout(tmp_path / "from", tmp_path / "to", {"data": 1})
    assert list((tmp_path / "to").iterdir()) == []


def test_pieces():
    entry = {"shape": [10, 12, 3], "dtype": "float32", "spec": [["data", "model"], None]}
    assert piece_shape(entry, {"data": 2, "model": 2}) == (3, 12, 3)
    assert piece_shape(entry, {"model": 5}) == (2, 12, 3)
    assert piece_shape(entry, {}) == (10, 12, 3)
