"""Paths that users give: local ones as they are, URLs with the same methods over a store."""

import hashlib
import pickle
from pathlib import Path

import pytest

from spmd.models.training import paths
from spmd.models.training.paths import StoreError, as_path, file_sizes, move_tree


def names(found):
    return [path.name for path in found]


def test_local_paths_are_those_of_pathlib_and_what_cannot_be_used_is_one_line(monkeypatch):
    assert as_path("runs/a") == Path("runs/a")
    assert as_path(Path("runs")) == Path("runs")
    assert not paths.is_url("runs/s3:/a")
    with pytest.raises(StoreError, match=r"^ftp://a/b: ftp:// is not supported, only s3:// and gs"):
        as_path("ftp://a/b")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"^gs://a/b needs a package: pip install gcsfs$"):
        as_path("gs://a/b")
    with pytest.raises(StoreError, match=r"^s3://a/b needs a package: pip install s3fs$"):
        as_path("s3://a/b")


def test_files_and_folders(store):
    (store / "a.txt").write_text("hello")
    (store / "sub" / "b.bin").write_bytes(b"0123456789")
    assert names(store.iterdir()) == ["a.txt", "sub"]
    assert names(store.rglob("*")) == ["a.txt", "b.bin"]
    assert names(store.glob("*/*.bin")) == ["b.bin"]
    assert file_sizes(store) == {"a.txt": 5, "sub/b.bin": 10}
    assert (store.is_dir(), store.is_file(), (store / "a.txt").is_file()) == (True, False, True)
    assert not (store / "none").exists()
    assert list((store / "none").iterdir()) == []
    assert (store / "sub/b.bin").read_bytes(3, 5) == b"34"
    status = (store / "a.txt").stat()
    assert (status.st_size, status.st_mtime_ns > 0) == (5, True)
    with (store / "a.txt").open() as file:
        assert hashlib.file_digest(file, "md5").digest() == hashlib.md5(b"hello").digest()
    assert as_path(str(pickle.loads(pickle.dumps(store)))) == store
    (store / "a.txt").unlink()
    (store / "a.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=r"no such file, or no such bucket.*a\.txt"):
        (store / "a.txt").read_text()


def test_a_file_appears_when_it_is_closed_and_not_after_an_error(store):
    with pytest.raises(KeyError), (store / "broken").open("wb") as file:
        file.write(b"half")
        raise KeyError
    assert not (store / "broken").exists()
    with (store / "whole").open("wb") as file:
        file.write(b"all")
    assert (store / "whole").read_bytes() == b"all"


def test_folders_are_moved_and_copied(store):
    for name in ("x", "y/z"):
        (store / "old" / name).write_text(name)
    move_tree(store / "old", store / "new", "x")
    assert file_sizes(store) == {"new/x": 1, "new/y/z": 3}
    assert (store / "new/y/z").read_text() == "y/z"


def test_a_store_that_cannot_be_reached_is_one_line(s3_bucket, monkeypatch):
    paths.file_system.cache_clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(pytest.importorskip("fsspec").get_filesystem_class("s3"), "retries", 1)
    for ask in ((s3_bucket / "a").read_bytes, (s3_bucket / "a").is_file):
        with pytest.raises(StoreError, match=r"^s3://tests/a: .*127\.0\.0\.1:9") as caught:
            ask()
        assert "\n" not in str(caught.value)
    paths.file_system.cache_clear()
