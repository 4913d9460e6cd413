import errno
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmd.models.training.checkpoints.found import CheckpointError
from spmd.models.training.checkpoints.manifest import write_manifest
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.run.loop import TrainState
from tests.forked import run_text
from tests.models.training.checkpoints.states import (
    assert_same,
    latest,
    make_mesh,
    restored,
    save,
    targets,
)

LAYERS = 3
P = PartitionSpec


def make_state(mesh, step=10, *, stacked=True, optimizer=None):
    """A state whose numbers hang on the step, with two arrays in each layer."""
    generator = np.random.default_rng(step)

    def layer():
        return {
            "norm": {"weight": generator.normal(size=(16,)).astype(np.float32)},
            "proj": {"weight": generator.normal(size=(16, 8)).astype(np.float32)},
        }

    layers = [layer() for _ in range(LAYERS)]
    params = {"embed": {"weight": generator.normal(size=(32, 16)).astype(np.float32)}}
    params["layers"] = (
        jax.tree.map(lambda *x: np.stack(x), *layers)
        if stacked
        else {str(i): one for i, one in enumerate(layers)}
    )
    state = (optimizer or optax.adamw(1e-3)).init(params)
    # Moments that are not zero: those of the parameters, scaled.
    state = jax.tree.map(lambda x: x + 0.5 if x.ndim else x + step, state)
    return place(TrainState(params, state, step), mesh)


def spec_of(leaf):
    """Matrices are split over both axes, norms (stacked or not) are not."""
    is_matrix = leaf.ndim > 1 and leaf.shape[-2] % 8 == 0
    return P(*[None] * (leaf.ndim - 2), "data", "model") if is_matrix else P()


def place(state, mesh):
    def one(leaf):
        return jax.device_put(leaf, NamedSharding(mesh, spec_of(np.asarray(leaf))))

    params, opt_state = jax.tree.map(one, (state.params, state.opt_state))
    return TrainState(params, opt_state, state.step)


@pytest.fixture(scope="module")
def mesh42(devices8):
    return make_mesh(devices8, 4, 2)


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory, mesh42):
    """A folder with the checkpoints of steps 10 and 20; copy before damaging."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    states = [make_state(mesh42, step) for step in (10, 20)]
    save(folder, *states, about={"config": {"seq_len": 128}, "data": {"seed": 3}})
    return folder


@pytest.fixture
def copy(two_saved, tmp_path):
    return Path(shutil.copytree(two_saved, tmp_path / "checkpoints"))


# Whole checkpoints


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (1, 1)])
def test_restores_onto_any_mesh(two_saved, tmp_path, devices8, shape):
    folder = shutil.copytree(two_saved, tmp_path / "c")
    expected = make_state(make_mesh(devices8, *shape), 20)
    with Checkpoints(folder) as checkpoints:
        found = latest(checkpoints)
        assert (found.step, checkpoints.notes) == (20, [])
        assert_same(checkpoints.restore(found, targets(expected)), expected)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_key_arrays_are_key_arrays_again(tmp_path, mesh42, devices8, impl):
    def state(mesh):
        keys = jax.random.split(jax.random.key(7, impl=impl), 8)
        placed = [NamedSharding(mesh, spec) for spec in (P("data"), P())]
        return TrainState({"keys": jax.device_put(keys, placed[0])},
                          {"key": jax.device_put(keys[0], placed[1])}, 3)  # fmt: skip

    save(tmp_path, state(mesh42))
    expected = state(make_mesh(devices8, 2, 4))
    with Checkpoints(tmp_path) as checkpoints:
        found = latest(checkpoints)
        dtype = str(jax.random.key(0, impl=impl).dtype)
        entry = {"shape": [8], "dtype": dtype, "spec": ["data"]}
        assert found.meta["arrays"]["params/keys"] == entry
        got = checkpoints.restore(found, targets(expected))
        other = TrainState({"keys": jax.ShapeDtypeStruct((8,), np.uint32)}, got.opt_state)
        with pytest.raises(CheckpointError, match=rf"params/keys is {dtype} \[8\]"):
            checkpoints.restore(found, other)
    assert_same(got, expected)


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_may_be_stacked_in_one_and_unrolled_in_the_other(
    tmp_path, mesh42, devices8, stacked
):
    save(tmp_path, make_state(mesh42, stacked=not stacked))
    expected = make_state(make_mesh(devices8, 2, 4), stacked=stacked)
    with Checkpoints(tmp_path) as checkpoints:
        assert_same(restored(checkpoints, expected), expected)


def test_adafactor_does_not_convert(tmp_path, mesh42):
    """Its factors depend on how an array is laid out."""
    rule = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    save(tmp_path, make_state(mesh42, optimizer=rule, stacked=False))
    message = "layers stacked in one and unrolled in the other"
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=message):
        restored(checkpoints, make_state(mesh42, optimizer=rule))


def test_a_person_can_read_what_is_in_it(two_saved):
    meta = json.loads((two_saved / "20/meta.json").read_text())
    assert meta["step"] == 20
    assert meta["mesh"] == {"data": 4, "model": 2}
    assert (meta["config"], meta["data"]) == ({"seq_len": 128}, {"seed": 3})
    entry = {"shape": [3, 16, 8], "dtype": "float32", "spec": [None, "data", "model"]}
    assert meta["arrays"]["params/layers/proj/weight"] == entry
    assert "opt_state/0/mu/embed/weight" in meta["arrays"]


def test_a_save_does_not_see_later_changes(tmp_path, mesh42):
    """The next step donates its arguments while the save is still going on."""
    state, expected = make_state(mesh42), make_state(mesh42)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        for _ in range(3):
            overwrite(make_state(mesh42).params)
        jax.block_until_ready(overwrite((state.params, state.opt_state)))
        checkpoints.finish()
        (record,) = checkpoints.poll()
        assert record["step"] == 10
        assert 0 < record["save_stall_seconds"] < record["save_seconds"]
        assert_same(restored(checkpoints, expected), expected)


def test_keeps_the_last_and_every_nth(tmp_path, mesh42):
    states = [make_state(mesh42, step) for step in (1, 2, 3, 4, 5)]
    assert save(tmp_path, *states, keep_last=1, keep_every=2) == [5, 4, 2]


def test_what_cannot_be_found(tmp_path, copy):
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.find() is None
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; there are: none"):
            checkpoints.find(3)
    for step in ("10", "20"):
        (copy / step / "manifest.json").unlink()
    with (
        Checkpoints(copy) as checkpoints,
        pytest.raises(CheckpointError, match=r"is whole: .*step 20 is damaged.*step 10 is damaged"),
    ):
        latest(checkpoints)
    path = copy / "20/meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    write_manifest(copy / "20")
    with Checkpoints(copy) as checkpoints, pytest.raises(CheckpointError, match="has schema 99"):
        latest(checkpoints)


def test_going_back_sets_later_ones_aside(copy, mesh42):
    with Checkpoints(copy) as checkpoints:
        state = restored(checkpoints, make_state(mesh42), 10)
        assert checkpoints.steps() == [10]
        assert (copy / "aside-20").is_dir()
        checkpoints.save(make_state(mesh42, 20))
        checkpoints.finish()
        assert latest(checkpoints).step == 20
    assert state.step == 10


# Another state


def test_another_optimizer_or_shape_is_named(two_saved, mesh42):
    def problem(state):
        with Checkpoints(two_saved) as checkpoints, pytest.raises(CheckpointError) as caught:
            restored(checkpoints, state)
        return str(caught.value)

    text = problem(make_state(mesh42, optimizer=optax.sgd(0.1, momentum=0.9)))
    assert "step 20 does not fit this run: it lacks opt_state/0/trace/embed/weight" in text
    assert "it has opt_state/0/count, opt_state/0/mu/embed/weight" in text
    other = make_state(mesh42)
    other.params["embed"]["weight"] = jax.device_put(
        np.zeros((64, 16), np.float32), other.params["embed"]["weight"].sharding
    )
    text = problem(other)
    assert "params/embed/weight is float32 [32, 16] and has to be float32 [64, 16]" in text


# Damage


def files_of(folder):
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {"flipped": flip_a_bit, "truncated": truncate, "gone": Path.unlink}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_any_file_is_noticed_and_the_one_before_is_used(copy, tmp_path, kind, mesh42):
    """Every file in turn; those that orbax adds afterwards may be damaged, they hold nothing."""
    whole, expected = shutil.copytree(copy / "20", tmp_path / "whole"), make_state(mesh42, 20)
    with Checkpoints(copy) as checkpoints:
        for name in files_of(whole):
            DAMAGE[kind](copy / "20" / name)
            checkpoints.notes.clear()
            if name.name in ("commit_success.txt", "_CHECKPOINT_METADATA"):
                assert_same(restored(checkpoints, expected), expected)
            else:
                found = latest(checkpoints)
                assert found.step == 10, name
                note = checkpoints.notes[0]
                assert note.startswith("the checkpoint of step 20 is damaged: "), name
                with pytest.raises(CheckpointError, match=r"step 20 is damaged: .*; resume"):
                    checkpoints.find(20)
            shutil.copy(whole / name, copy / "20" / name)
        assert latest(checkpoints).step == 20


def test_an_interrupted_save_is_removed_and_a_damaged_one_makes_room(copy, mesh42):
    left = copy / "30.orbax-checkpoint-tmp"
    shutil.copytree(copy / "20", left)
    with Checkpoints(copy) as checkpoints:
        found = latest(checkpoints)
    assert found.step == 20
    assert checkpoints.notes == [
        "the save of step 30 was interrupted; what it had written is removed"
    ]
    assert not left.exists()
    truncate(copy / "20/manifest.json")
    with Checkpoints(copy) as checkpoints:
        restored(checkpoints, make_state(mesh42))
        checkpoints.save(make_state(mesh42, 20))
        checkpoints.finish()
        assert latest(checkpoints).step == 20


# A full disk

FULL_DISK = """
import resource, signal, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from tests.models.training.checkpoints.test_checkpoint import *
from absl import logging; logging.set_verbosity(logging.FATAL)
mesh = make_mesh(jax.devices(), 4, 2)
folder = Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Checkpoints(folder) as checkpoints:
    checkpoints.save(make_state(mesh, 10))
    checkpoints.finish()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    checkpoints.save(make_state(mesh, 20))
    checkpoints._saving.join()
    errors = [record.get("error") for record in checkpoints.poll()]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))  # what is printed goes to a file, too
    print("told:", errors)
    checkpoints.save(make_state(mesh, 30))
    checkpoints.finish()
    print("then:", latest(checkpoints).step, checkpoints.steps())
"""


def test_files_that_cannot_grow(tmp_path):
    """The disk is full during one save: it is told, and the next one works."""
    code, said = run_text(FULL_DISK, [tmp_path / "c"], tmp_path)
    assert code == 0, said
    # asyncio may complain of what tensorstore gave up, before and after it, up to the limit
    told = said.partition("told: ")[2].partition("\n")[0]
    assert "the checkpoint of step 20 could not be saved: " in told
    assert "the latest checkpoint is that of step 10" in told
    assert "\nthen: 30 [30, 10]\n" in said


WRITE_MANIFEST = "spmd.models.training.checkpoints.store.write_manifest"


def full(folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_called_that(tmp_path, mesh42, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(mesh42, 10))
        checkpoints.finish()
        monkeypatch.setattr(WRITE_MANIFEST, full)
        checkpoints.save(make_state(mesh42, 20))
        says = "step 20 could not be saved: no space is left on the disk; the latest checkpoint is"
        with pytest.raises(CheckpointError, match=f"{says} that of step 10"):
            checkpoints.finish()
        checkpoints.save(make_state(mesh42, 30))
        checkpoints.save(make_state(mesh42, 40))
        with pytest.raises(CheckpointError, match="3 saves in a row have failed"):
            checkpoints.finish()
        assert checkpoints.steps() == [10]


def test_what_a_failed_save_still_writes_goes_after_the_next(tmp_path, mesh42, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(WRITE_MANIFEST, full)
            checkpoints.save(make_state(mesh42, 10))
            with pytest.raises(CheckpointError, match="no space is left"):
                checkpoints.finish()
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "10.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
        checkpoints.save(make_state(mesh42, 20))
        checkpoints.finish()
        assert [path.name for path in tmp_path.iterdir()] == ["20"]
