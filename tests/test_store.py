"""What is kept of earlier starts: whole or not at all, bounded, and never a reason to fail."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from spmd.store import NOWHERE, Store, key_of, store_in


def test_what_was_put_is_there_and_a_folder_that_cannot_be_is_no_reason_to_fail(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert store.get("a") is None
    store.put("a", b"1\n2")
    store.put("b", b"")
    assert Store(store.folder).get("a") == b"1\n2"
    assert store.get("b") == b""
    store.put("a", b"3")
    assert store.get("a") == b"3"
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "below")
    store.put("a", b"1")
    assert store.get("a") is None


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 200])
def test_what_is_damaged_is_not_there(tmp_path: Path, damage: bytes) -> None:
    store = Store(tmp_path)
    store.put("a", b"content")
    (tmp_path / "a").write_bytes(damage)
    assert store.get("a") is None
    store.put("a", b"content")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    assert store.get("a") is None


def test_an_entry_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Store(tmp_path).put("a", b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert Store(tmp_path).get("a") is None


def test_what_was_not_used_for_longest_is_dropped(tmp_path: Path) -> None:
    store = Store(tmp_path, most_bytes=400)
    for number, name in enumerate("abc"):
        store.put(name, bytes(50))
        os.utime(tmp_path / name, (number, number))
    store.get("a")
    store.put("d", bytes(50))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_many_write_at_once(tmp_path: Path) -> None:
    contents = [bytes([number]) * 10_000 for number in range(8)]

    def write(content: bytes) -> None:
        for _ in range(20):
            store = Store(tmp_path, most_bytes=30_000)
            store.put("a", content)
            assert store.get("a") in (None, *contents)

    with ThreadPoolExecutor(len(contents)) as threads:
        list(threads.map(write, contents))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert Store(tmp_path).get("a") in contents


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(given: str | None = None) -> Path | None:
        store = store_in(given, "kind")
        return store.folder if store is not None else None

    assert folder() is None  # as every test has it
    assert folder(NOWHERE) is None
    assert folder("/here") == Path("/here/kind")
    monkeypatch.setenv("SPMD_CACHE_DIR", "/there")
    assert folder() == Path("/there/kind")
    monkeypatch.delenv("SPMD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "spmd" / "kind"
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_compilation_cache_dir", "/jaxs")
        assert folder() == Path("/jaxs/spmd/kind")
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/jaxs")
        assert folder() == tmp_path / "spmd" / "kind"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_keys_tell_apart() -> None:
    assert key_of("a", 1) == key_of("a", 1)
    assert len({key_of("a", 1), key_of("a", 2), key_of("a"), key_of("a", "1"), key_of()}) == 5
