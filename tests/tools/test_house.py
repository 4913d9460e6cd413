"""Lines of checkouts."""

from pathlib import Path

from tools.house import HERE, facts


def test_lines_of_a_folder_and_of_a_revision(tmp_path: Path) -> None:
    for name in ("spmd/ir/text.py", "tools/house.py", "tests/test_text.py", ".venv/lib/other.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\ny = 2\n")
    found = facts(str(tmp_path))
    assert [found[name] for name in ("spmd", "models", "tests", "all but tests")] == list("2024")
    assert all(int(count.replace(",", "")) > 1000 for count in facts(str(HERE)).values())
