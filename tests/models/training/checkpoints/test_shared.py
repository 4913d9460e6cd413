"""Folders of checkpoints and two processes: one that they share, and one that they don't."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import spmd
from spmd.models.training.checkpoints import saving, together
from spmd.models.training.checkpoints.found import CheckpointError
from spmd.models.training.checkpoints.manifest import find_damage
from spmd.models.training.checkpoints.together import check_shared
from spmd.models.training.run.loop import TrainState
from tests.models.training.checkpoints.states import targets
from tests.two_processes import run_both


def test_two_processes(tmp_path: Path):
    said = run_both(Path(__file__), tmp_path)
    private = [each["private"] for each in said]
    assert private[0] == private[1]
    assert f"the processes do not share {tmp_path / 'private-0'}: process 1 (on " in private[0]
    assert f"{tmp_path / 'private-1'}) cannot see what process 0 (on " in private[0]
    assert said[0]["hashed_by"] == ["hashes.process_0.json", "hashes.process_1.json"]
    assert [each["damage"] for each in said] == [None, None]
    assert [each["found"] for each in said] == [7, 7]
    assert [each["is_same"] for each in said] == [True, True]
    full = "no space is left on the disk"
    assert [each["failures"][0].split(";")[0] for each in said] == [
        f"the checkpoint of step 11 could not be saved: process 1: {full}",
        f"the checkpoint of step 11 could not be saved: {full}",
    ]
    assert [each["failures"][1].split(";")[0] for each in said] == [
        f"the checkpoint of step 10 could not be saved: {full}",
        f"the checkpoint of step 10 could not be saved: process 0: {full}",
    ]
    assert said[0]["steps"] == [21, 20]
    manifest = json.loads((tmp_path / "shared" / "7" / "manifest.json").read_text())
    written = {p.relative_to(tmp_path / "shared" / "7").as_posix() for p in files(tmp_path)}
    assert set(manifest["files"]) == written


def files(folder: Path) -> list[Path]:
    """What a manifest lists: all files but itself and what orbax writes when it renames."""
    later = {"manifest.json", "commit_success.txt", "_CHECKPOINT_METADATA"}
    found = (folder / "shared" / "7").rglob("*")
    return [path for path in found if path.is_file() and path.name not in later]


def test_nothing_is_left_of_the_check(tmp_path: Path):
    check_shared(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


# Some of what it imports is exchanged here.
store: Any = importlib.import_module("spmd.models.training.checkpoints.store")


def failure(folder: Path, state: TrainState, rank: int, victim: int) -> str:
    """What a process hears when the disk of one is full; the next save succeeds."""
    module, name = (saving, "write_part") if victim else (store, "write_manifest")
    works = getattr(module, name)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if rank == victim:
        setattr(module, name, fails)
    with store.Checkpoints(folder) as checkpoints:
        checkpoints.save(dataclasses.replace(state, step=10 + victim))
        try:
            checkpoints.finish()
            said = "nothing"
        except CheckpointError as error:
            said = str(error)
        setattr(module, name, works)
        checkpoints.save(dataclasses.replace(state, step=20 + victim))
        checkpoints.finish()
    return said


def main() -> None:
    """In a shared folder: saves and finds; in a private one: an error."""
    port, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    spmd.initialize(f"localhost:{port}", 2, rank)
    together.PATIENCE_S = 0.5
    said: dict[str, Any] = {}
    try:
        store.Checkpoints(folder / f"private-{rank}")
    except CheckpointError as error:
        said["private"] = str(error)
    mesh = spmd.make_mesh(data=4)
    x: Any = spmd.mark_sharding(np.arange(64, dtype=np.float32).reshape(8, 8), mesh, ("data", None))
    state = TrainState({"x": x}, {"m": x}, 7)
    listed: list[str] = []
    hashed = store.write_manifest

    def noting(path: Path) -> None:
        """What process 0 reads to make the manifest."""
        listed.extend(str(part.name) for part in path.rglob("hashes.process_*"))
        hashed(path)

    store.write_manifest = noting
    with store.Checkpoints(folder / "shared") as checkpoints:
        checkpoints.save(state)
        checkpoints.finish()
    said["hashed_by"] = sorted(listed)
    said["damage"] = find_damage(folder / "shared" / "7")
    saved_steps = store.saved_steps
    if rank == 1:  # its disk shows it nothing yet
        store.saved_steps = lambda folder: []
    with store.Checkpoints(folder / "shared") as checkpoints:
        found = checkpoints.find()
        said["found"] = found.step if found else None
        restored = checkpoints.restore(found, targets(state))
        shards = (array.addressable_shards for array in (restored.params["x"], x))
        said["is_same"] = all(np.array_equal(a.data, b.data) for a, b in zip(*shards, strict=True))
    store.saved_steps = saved_steps
    said["failures"] = [failure(folder / "fails", state, rank, victim) for victim in (1, 0)]
    said["steps"] = saved_steps(folder / "fails") if rank == 0 else []
    print(json.dumps(said))


if __name__ == "__main__":
    main()
