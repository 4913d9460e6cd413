"""Checkpoints in other pieces: restored by training as before, for the devices they are cut for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.models.training.checkpoints.found import CheckpointError, find_saved
from spmd.models.training.checkpoints.relayout import piece_shape, relayout
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.run.loop import TrainState

SPECS = {
    "w": PartitionSpec("data", "model"),
    "b": PartitionSpec(("data", "model")),
    "n": PartitionSpec(),
    "h": PartitionSpec("model"),
}


def make_mesh(devices, data, model):
    return Mesh(np.array(devices[: data * model]).reshape(data, model), ("data", "model"))


def make_state(mesh):
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.normal(size=(16, 8)).astype(np.float32),
        "b": np.arange(16, dtype=np.int32),
        "n": np.float32(3),
        "h": rng.normal(size=(8, 3)).astype(jnp.bfloat16),
    }
    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in arrays.items()}
    return TrainState({"layers": params}, {"mu": params, "count": jnp.int32(7)}, 7)


def targets_of(state, mesh):
    def struct(path, x):
        spec = SPECS.get(getattr(path[-1], "key", ""), PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params, opt_state = jax.tree_util.tree_map_with_path(struct, (state.params, state.opt_state))
    return TrainState(params, opt_state, 0)


def stored_chunks(folder, key):
    import tensorstore

    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/state", "path": f"{key}/"}
    opened = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True)
    return opened.result().chunk_layout.read_chunk.shape


@pytest.mark.parametrize(("saved", "wanted"), [((4, 2), (1, 2)), ((1, 1), (2, 4))])
def test_training_restores_the_copy(saved, wanted, tmp_path, devices8):
    state = make_state(make_mesh(devices8, *saved))
    with Checkpoints(tmp_path / "from", about={"config": {"seed": 1}}) as checkpoints:
        checkpoints.save(state)
    data, model = wanted
    assert relayout(tmp_path / "from", tmp_path / "to", {"data": data, "model": model}) == 7
    assert stored_chunks(tmp_path / "to" / "7", "params.layers.w") == (16 // data, 8 // model)
    found = find_saved(tmp_path / "to")
    assert found.meta["mesh"] == {"data": data, "model": model}
    assert found.meta["config"] == {"seed": 1}
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["7"]
    with Checkpoints(tmp_path / "to") as checkpoints:
        latest = checkpoints.find()
        assert latest is not None
        restored = checkpoints.restore(latest, targets_of(state, make_mesh(devices8, *wanted)))
    for a, b in zip(
        jax.tree.leaves((restored.params, restored.opt_state)),
        jax.tree.leaves((state.params, state.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert restored.step == 7
    with pytest.raises(CheckpointError, match="exists already"):
        relayout(tmp_path / "from", tmp_path / "to", {"data": 1})


def test_what_cannot_be_written(tmp_path, devices8, monkeypatch):
    with Checkpoints(tmp_path / "from") as checkpoints:
        checkpoints.save(make_state(make_mesh(devices8, 1, 1)))
    (tmp_path / "run" / "9").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds a run that has come to step 9; name another"):
        relayout(tmp_path / "from", tmp_path / "run", {"data": 1})

    def full(*arguments):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

    monkeypatch.setattr("models.training.checkpoints.relayout._copy_array", full)
    with pytest.raises(CheckpointError, match="/7 cannot be written: no space is left on the disk"):
        relayout(tmp_path / "from", tmp_path / "to", {"data": 1})
    assert list((tmp_path / "to").iterdir()) == []


def test_pieces():
    entry = {"shape": [10, 12, 3], "dtype": "float32", "spec": [["data", "model"], None]}
    assert piece_shape(entry, {"data": 2, "model": 2}) == (3, 12, 3)
    assert piece_shape(entry, {"model": 5}) == (2, 12, 3)
    assert piece_shape(entry, {}) == (10, 12, 3)


def test_no_checkpoint(tmp_path):
    (tmp_path / "from").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        relayout(tmp_path / "from", tmp_path / "to", {"data": 2})
    assert not (tmp_path / "to").exists()
