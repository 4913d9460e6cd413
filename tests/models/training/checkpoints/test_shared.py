"""Folders of checkpoints and two processes: one that they share, and one that they don't."""

import json
from pathlib import Path

from models.training.checkpoints.shared import check_shared
from tests.two_processes import run_both


def test_two_processes(tmp_path: Path):
    said = run_both(Path(__file__).with_name("two_folders.py"), tmp_path)
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
