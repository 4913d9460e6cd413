"""Checkpoints on an object store: whole when their manifest is there, in orbax's own format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.training.checkpoints.found import AUTO, CheckpointError, find_saved
from models.training.checkpoints.manifest import MANIFEST
from models.training.checkpoints.store import Checkpoints
from models.training.paths import download, file_sizes
from models.training.run.loop import TrainState


def state(step, spec=("data", "model"), shape=(4, 2)):
    """Of several dtypes; what is not split is written once."""
    mesh = jax.make_mesh(shape, ("data", "model"))
    w = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    keys = jax.random.split(jax.random.key(step, impl="rbg"), 8)
    params = {
        "w": jax.device_put(w, NamedSharding(mesh, PartitionSpec(*spec))),
        "keys": jax.device_put(keys, NamedSharding(mesh, PartitionSpec(spec[0]))),
        "layers": {"0": {"b": jnp.full((), step, jnp.bfloat16)}},
    }
    return TrainState(params, {"count": jnp.int32(step), "m": params["w"] * 2}, step)


def targets(like):
    def struct(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    tree = jax.tree.map(struct, {"params": like.params, "opt_state": like.opt_state})
    return TrainState(tree["params"], tree["opt_state"], like.step)


def assert_same(got, expected):
    assert got.params["keys"].dtype == expected.params["keys"].dtype
    assert got.params["keys"].sharding == expected.params["keys"].sharding
    for tree in (got.params, expected.params):
        tree["keys"] = jax.random.key_data(tree["keys"])
    jax.tree.map(np.testing.assert_array_equal, got.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, got.opt_state, expected.opt_state)


def restored(checkpoints, like, step=AUTO):
    found = checkpoints.find(step)
    assert found is not None
    return checkpoints.restore(found, targets(like))


def save(folder, *steps, **keep):
    with Checkpoints(folder, **keep) as checkpoints:
        for step in steps:
            checkpoints.save(state(step))
            checkpoints.finish()
        return checkpoints.steps()


def test_saved_kept_and_restored_on_another_mesh(store):
    assert save(store, 2, 4, 6, 8, keep_last=2, keep_every=4) == [8, 6, 4]
    assert not file_sizes(store / "2")
    with Checkpoints(store) as checkpoints:
        other = state(6, ("model", None), (2, 4))
        got = restored(checkpoints, other, 6)
        assert got.params["w"].sharding == other.params["w"].sharding
        assert_same(got, other)
        # The run takes the later steps again: what was saved of them is not lost, and not found.
        assert checkpoints.steps() == [6, 4]
        assert (store / "aside-8" / MANIFEST).is_file()


def test_orbax_reads_what_is_copied_to_a_disk(store, tmp_path):
    save(store, 3)
    download(store, tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        got = restored(checkpoints, state(3))
    assert_same(got, state(3))


def test_what_orbax_wrote_is_read_from_a_store(s3, tmp_path):
    save(tmp_path, 3)
    for name in file_sizes(tmp_path):
        (s3 / name).write_bytes((tmp_path / name).read_bytes())
    with Checkpoints(s3) as checkpoints:
        got = restored(checkpoints, state(3))
    assert_same(got, state(3))


def test_without_its_manifest_a_checkpoint_is_none(s3):
    save(s3, 2, 4)
    (s3 / "4" / MANIFEST).unlink()
    assert find_saved(s3).step == 2
    with Checkpoints(s3) as checkpoints:
        assert checkpoints.notes == [
            "the save of step 4 was interrupted; what it had written is removed"
        ]
        assert checkpoints.steps() == [2]
    assert not file_sizes(s3 / "4")


def test_damage_is_noticed(s3):
    save(s3, 2, 4)
    (largest,) = (s3 / "4/state").glob("ocdbt.process_0/d/*")
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(bytes(content))
    (s3 / "2/meta.json").unlink()
    with Checkpoints(s3) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.find()
    assert "does not hold what was written" in str(caught.value)
    assert "meta.json is missing" in str(caught.value)


def test_a_save_that_fails_is_told_and_the_next_one_is_whole(s3, monkeypatch):
    from models.training.checkpoints import remote

    def fail(*_):
        raise OSError("the bucket is gone")

    with Checkpoints(s3) as checkpoints:
        with monkeypatch.context() as broken:
            broken.setattr(remote, "_merge", fail)
            checkpoints.save(state(1))
            with pytest.raises(CheckpointError, match="step 1 could not be saved: the bucket is"):
                checkpoints.finish()
        assert checkpoints.steps() == []
        checkpoints.save(state(1))
        checkpoints.finish()
        assert_same(restored(checkpoints, state(1)), state(1))


def test_a_bucket_that_is_not_there_is_one_line(s3):
    with pytest.raises(CheckpointError, match=r"^s3://none/a cannot be written: there is no such"):
        Checkpoints(type(s3)("s3", "none/a"))
