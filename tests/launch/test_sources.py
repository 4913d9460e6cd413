"""Sources outside the environment: what is hashed, and what is said where hosts differ."""

import importlib
import sys
from pathlib import Path

import pytest

from spmd.errors import LaunchError
from spmd.launch.agree import (
    by_package,
    check_same_sources,
    different_sources,
    imported,
    raise_json,
)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A user's own package with one module, imported."""
    package = tmp_path / "own_package_of_a_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("seed = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(f"{package.name}.data")
    yield package
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]


def test_what_is_the_users_is_hashed_and_what_is_installed_is_not(own: Path):
    before = imported()
    assert {own.name, f"{own.name}.data", "spmd", "spmd.launch.agree"} <= before.keys()
    assert not {"jax", "numpy", "json", "pytest"} & before.keys()
    (own / "data.py").write_text("seed = 2\n")
    after = imported()
    assert [name for name in before if before[name] != after[name]] == [f"{own.name}.data"]
    packages = by_package(before)
    changed = {top for top, sha in by_package(after).items() if packages[top] != sha}
    assert changed == {own.name}


def test_who_has_other_files_is_named():
    found = {
        0: {"checked": "sources", "models": "a", "models.data": "1", "main_only": "x"},
        1: {"checked": "sources", "models": "a", "models.data": "1"},
        2: {"checked": "sources", "models": "a", "models.data": "2", "own": "y"},
    }
    with pytest.raises(LaunchError) as error:
        raise_json(different_sources(found))
    assert str(error.value).splitlines()[:2] == [
        "the processes of this job run different sources of models.data",
        "  actual: process 2 has another models.data than process 0",
    ]


def test_a_module_that_only_some_have_imported_is_no_difference():
    assert different_sources({0: {"a": "1", "report": "2"}, 1: {"a": "1"}}) == ""


def test_alone_there_is_nobody_to_differ():
    check_same_sources()
