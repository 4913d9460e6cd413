"""Runs on an object store: the same as on a disk, killed and resumed, by one process and by two."""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import spmd
from spmd.models.training.checkpoints import remote
from spmd.models.training.checkpoints.found import find_saved
from spmd.models.training.checkpoints.manifest import MANIFEST
from spmd.models.training.paths import StorePath
from spmd.models.training.run.mirror import Mirror
from tests.forked import Forked
from tests.models.training.own_model import make_trainer
from tests.two_processes import run_both

STEPS = 6


@pytest.fixture(scope="module")
def on_a_disk(tmp_path_factory):
    """The outcome of the run on a disk, without a break."""
    folder = tmp_path_factory.mktemp("disk") / "run"
    mesh = spmd.make_mesh(across=4, up=2)
    return make_trainer(mesh, steps=STEPS, run_dir=folder, save_every=2, eval_batches=0).run()


def assert_same(state, expected):
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, expected.opt_state)


def test_killed_in_a_save_and_resumed_it_is_the_same(on_a_disk, s3, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("spmd.models.training.run.start.BEAT_S", 0.2)
    killed = Forked(Path(__file__), ["alone", "0", str(s3)], tmp_path / "said.txt", {})
    assert killed.wait() == -signal.SIGKILL, killed.said
    assert (s3 / "checkpoints/4/state/manifest.ocdbt").is_file()
    assert not (s3 / "checkpoints/4" / MANIFEST).exists()
    assert find_saved(s3 / "checkpoints").step == 2
    trainer = make_trainer(
        spmd.make_mesh(across=4, up=2), steps=STEPS, run_dir=str(s3), save_every=2, keep_last=2,
        eval_batches=0,
    )  # fmt: skip
    trainer.console.quiet = False
    outcome = trainer.run()
    said = capsys.readouterr().out
    assert "the save of step 4 was interrupted; what it had written is removed" in said
    assert "resuming after step 2" in said
    assert f"report: {s3}/report.html" in said
    assert_same(outcome.state, on_a_disk.state)
    assert {path.name for path in (s3 / "checkpoints").iterdir()} == {"4", "6"}
    lines = [json.loads(line) for line in (s3 / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line][-4:] == [3, 4, 5, 6]
    assert {path.name for path in s3.iterdir()} >= {"compiled", "report.html", "tensorboard"}


def test_two_processes_go_on_from_each_others_parts(on_a_disk, s3):
    said = run_both(Path(__file__), str(s3))
    assert said[0] == said[1]
    assert said[0]["first"] == 4
    assert said[0]["loss"] == pytest.approx(on_a_disk.last["loss"], rel=1e-4)
    written = {path.name for path in (s3 / "checkpoints/6/state").iterdir()}
    assert written >= {"ocdbt.process_0", "ocdbt.process_1"}


def test_a_store_that_fails_stops_no_run_and_gets_all_later(s3, tmp_path, capsys, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("1\n")
    monkeypatch.setattr("spmd.models.training.run.mirror.INTERVAL_S", 3600)
    with Mirror(tmp_path, s3) as mirror:
        mirror.copy()
        assert (s3 / "metrics.jsonl").read_text() == "1\n"
        (tmp_path / "metrics.jsonl").write_text("1\n2\n")
        with monkeypatch.context() as broken:
            broken.setattr(mirror, "kept", StorePath("s3://no-such-bucket/x"))
            for _ in range(2):
                mirror.copy()
        assert capsys.readouterr().err.count("training goes on, and it is tried again") == 1
    assert "written again" in capsys.readouterr().err
    assert (s3 / "metrics.jsonl").read_text() == "1\n2\n"
    (tmp_path / "later").mkdir()
    with Mirror(tmp_path / "later", s3):
        assert (tmp_path / "later/metrics.jsonl").read_text() == "1\n2\n"


def kill_in_the_second_save() -> None:
    """When the arrays are on the store and the manifest is not, the process dies."""
    name_arrays, saves = remote._name_arrays, []

    def dying(folder, shapes):
        name_arrays(folder, shapes)
        saves.append(folder)
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    remote._name_arrays = dying


def main() -> None:
    """A run that is killed, or half of one and its rest as one of two processes."""
    port, rank, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if port == "alone":
        kill_in_the_second_save()
        mesh = spmd.make_mesh(across=4, up=2)
        make_trainer(mesh, steps=STEPS, run_dir=url, save_every=2, eval_batches=0).run()
        return
    spmd.initialize(f"localhost:{port}", 2, rank)
    mesh = spmd.make_mesh(up=2, across=2)  # parameters are split over the processes
    for steps in (3, STEPS):
        outcome = make_trainer(mesh, steps=steps, run_dir=url, eval_batches=0).run()
    print(json.dumps({"loss": outcome.last["loss"], "first": outcome.first["step"]}))


if __name__ == "__main__":
    main()
