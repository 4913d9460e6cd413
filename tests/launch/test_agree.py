"""Comparing values and sources: who differs and in what, without processes."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd.errors import LaunchError, MeshError, SpmdError
from spmd.launch import agree
from tests.launch.memory import Memory
from tests.waiting import PATIENCE


def compare(store: Memory, members, me: int, what: dict[str, str], timeout_s: float) -> None:
    occasion = agree.Occasion(store, tuple(members), "x", is_aside=True)
    occasion.judged(me, what, agree.refuse_differences, timeout_s)


def told_by(values: dict[int, dict[str, str]], timeout_s: float = PATIENCE) -> list[str]:
    """What each process is told, all of them at once."""
    store, members = Memory(), sorted(values)

    def run(me: int) -> str:
        try:
            compare(store, members, me, {"checked": "flags", **values[me]}, timeout_s)
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def test_everyone_hears_who_differs_or_did_not_come():
    assert told_by({0: {"--a": "1"}, 2: {"--a": "1"}, 5: {"--a": "1"}}) == ["", "", ""]
    told = told_by({0: {"--a": "1"}, 1: {"--a": "1"}, 2: {"--a": "2"}})
    assert len(set(told)) == 1
    assert told[0].splitlines()[:2] == [
        "the processes of this job differ in --a",
        "  actual: process 2: 2; processes 0, 1: 1",
    ]
    store = Memory()
    with pytest.raises(LaunchError, match=r"process 1 did not come to compare flags within 0\.2 s"):
        compare(store, (0, 1), 0, {"checked": "flags"}, 0.2)
    with pytest.raises(LaunchError, match="process 0 did not come"):
        compare(Memory(), (0, 1), 1, {"checked": "flags"}, 0.2)


def differing(found: dict[int, dict[str, str]]) -> str:
    with pytest.raises(LaunchError) as error:
        agree.refuse_differences(found)
    return str(error.value)


def test_several_names_are_all_said_and_many_or_long_values_in_few_words():
    assert "process 1: (not set); process 0: 1" in differing({0: {"a": "1"}, 1: {}})
    text = differing({0: {"a": "1", "b": "x", "c": "="}, 1: {"a": "2", "b": "y", "c": "="}})
    assert "differ in a, b\n" in text
    assert "a: process 1: 2; process 0: 1; b: process 1: y; process 0: x" in text
    text = differing({p: {"a": "2" if p == 40 else "1"} for p in range(100)})
    assert "process 40: 2; processes 0, 1, 2, 3, 4, 5, 6, 7, ...: 1\n" in text
    text = differing({p: {"a": str(p)} for p in range(20)})
    assert "process 8: 8; 11 more differ; process 0: 0" in text
    text = differing({0: {"a": "x" * 500}, 1: {"a": "x" * 499 + "y"}})
    assert "x" * 201 not in text
    assert text.count("... (500 characters, hash ") == 2
    one, two = [part.split(")")[0] for part in text.split("hash ")[1:]]
    assert one != two


def test_neither_source_locations_nor_flags_of_a_process_own_count(monkeypatch: pytest.MonkeyPatch):
    module = 'module {\n  op loc(#loc0)\n}\n#loc0 = loc("%s/a.py":1:0)\n'
    assert agree.without_locations(module % "/one") == agree.without_locations(module % "/two")
    assert "op" in agree.without_locations(module % "/one")
    flags = "--xla_dump_to=/x --xla_force_host_platform_device_count=4 --xla_a=1 --xla_b"
    monkeypatch.setenv("XLA_FLAGS", flags)
    found = {
        name: value for name, value in agree.settings().items() if name.startswith("XLA_FLAGS")
    }
    assert found == {"XLA_FLAGS --xla_a": "1", "XLA_FLAGS --xla_b": "(given)"}
    assert agree.settings()["jax_enable_x64"] == "False"


def test_what_is_the_users_is_hashed_and_what_is_installed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file, own = tmp_path / "data.py", "sources of own.data (hash)"
    file.write_text("seed = 1\n")
    monkeypatch.setitem(sys.modules, "own.data", SimpleNamespace(__file__=str(file)))
    before = agree.sources()
    unwanted = {"jax", "numpy", "json", "pytest", "spmd", "spmd.launch.agree"}
    assert not {f"sources of {name} (hash)" for name in unwanted} & before.keys()
    file.write_text("seed = 2\n")
    after = agree.sources()
    assert [name for name in before if before[name] != after[name]] == [own]


def test_neither_a_module_that_only_some_have_nor_one_process_alone_differs():
    found = {0: {"a": "1", "b": "2"}, 1: {"a": "1"}, 2: {"a": "1", "b": "3"}}
    with pytest.raises(LaunchError, match=r"differ in b\n  actual: process 2: 3; process 0: 2\n"):
        agree.refuse_differences(found, may_lack=True)
    agree.refuse_differences({0: found[0], 1: found[1]}, may_lack=True)
    agree.check_same({"--a": "1"})
    agree.check_same_sources()


@pytest.mark.parametrize("result", [None, "text", {"what": "is no error"}, ["a"]])
def test_what_is_decided_is_heard(result: object):
    told: list[str] = []
    assert agree.deciding(lambda: result, told.append, "it") == agree.heard(told[0]) == result


def test_what_is_raised_is_heard():
    """The same error, where it is one of ours; of a bug what it was."""

    def fail(error: Exception) -> str:
        told: list[str] = []
        with pytest.raises(type(error)):
            agree.deciding(lambda: (_ for _ in ()).throw(error), told.append, "planning")
        with pytest.raises(SpmdError) as other:
            agree.heard(told[0])
        return f"{type(other.value).__name__}: {other.value}"

    error = MeshError("no such mesh", fix="make one")
    assert fail(error) == f"MeshError: {error}"
    assert fail(KeyError("a")).startswith("LaunchError: process 0 failed at planning\n")
