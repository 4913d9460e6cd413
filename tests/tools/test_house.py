"""What is said of a checkout's size, on sources small enough to count by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.house import (
    HERE,
    comment_lines,
    facts,
    function_lines,
    imported_once,
    largest_folder,
    op_names,
    read,
    size,
    spread,
    table,
)

SOURCES = {
    "spmd/__init__.py": "from spmd.compiler import run\n",
    "spmd/compiler.py": "from spmd.ir import text, types\n\n\ndef run():\n    return 'spmd.mark'\n",
    "spmd/ir/types.py": "",
    "spmd/ir/text.py": "# Types print as\n# they are read.\nfrom . import types\n",
    "spmd/ir/dialect/add.py": "NAME = 'stablehlo.add'\n",
    "tests/test_text.py": "import spmd.ir.text\nimport spmd.ir.dialect.add\n",
}


def test_lines_files_and_folders() -> None:
    assert size(SOURCES, ("spmd",)) == "10, 5, 3"
    assert size(SOURCES, ("spmd", "tests")) == "12, 6, 4"
    assert size(SOURCES, ("models",)) == "0, 0, 0"
    assert largest_folder({f"a/{n}.py": "" for n in range(3)} | {"a/b/c.py": ""}) == "a, 3"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("f('stablehlo.add', \"chlo.top_k\")", 2),
        ("def f():\n    '''stablehlo.add'''", 0),
        ("SIZE = 1\n'spmd.size'", 0),
        ("f('the op stablehlo.add')", 0),
        ("f('stablehlo.')", 0),
        ("f(f'stablehlo.{name}')", 0),
        ("TABLE = {'sdy.mesh': 'other.add'}", 1),
    ],
)
def test_names_of_ops(text: str, count: int) -> None:
    assert op_names(text) == count


def test_modules_that_one_other_imports() -> None:
    # compiler by the package, text by compiler (a test's import does not count); types by two.
    assert imported_once(SOURCES) == ["spmd.compiler", "spmd.ir.text"]


def test_lengths() -> None:
    text = (
        "@cache\ndef f():\n    def g():\n        return 1\n\n    return g\n\nasync def h(): ...\n"
    )
    assert sorted(function_lines([text])) == [1, 2, 5]
    assert spread([3, 1, 2]) == "2, 3"
    assert spread(range(1, 101)) == "50.5, 90"
    assert spread([]) == "none"


def test_comments_are_lines_of_their_own() -> None:
    assert comment_lines("# one\nx = 1  # none\n    # two\ny = '''\n# none\n'''\n") == 2


def test_the_table_has_a_column_for_each_checkout() -> None:
    lines = table({"before": {"files": "1"}, "after": {"files": "2"}}).splitlines()
    assert lines == ["|  | before | after |", "| --- | ---: | ---: |", "| files | 1 | 2 |"]


def test_all_of_one_checkout(tmp_path: Path) -> None:
    for name, text in {**SOURCES, ".venv/lib/other.py": "x = 1\n"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = facts(read(str(tmp_path)))
    assert found["tests: lines, files, folders"] == "2, 1, 1"
    assert found["spmd: names of ops"] == "2"
    assert found["spmd: files that name ops, and elsewhere than they belong"] == "2, 1"
    assert found["spmd: lines that are comments"] == "20.0%"


def test_this_repository_has_all_groups() -> None:
    assert {path.split("/")[0] for path in read(str(HERE))} >= {"spmd", "models", "tests", "tools"}


def test_neither_a_folder_nor_a_revision() -> None:
    with pytest.raises(ValueError, match="'no-such-thing' is no folder and no revision"):
        read("no-such-thing")
