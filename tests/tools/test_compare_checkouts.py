"""Checkouts side by side: what counts as equal, cheaper and dearer, a real run; and their size."""

import shutil
from pathlib import Path

import pytest

from tests.imports import imports_of
from tools.checkout_plans import fingerprint
from tools.compare_checkouts import (
    HERE,
    Measured,
    Pair,
    Verdict,
    compare,
    fastest,
    last_line,
    plan_lines,
    stage_lines,
    verdict,
)
from tools.house import (
    read,
)

OLD = Measured({"planned": "a", "emitted": "b"}, 2.0, 1.0, 8, {"plan": 3.0, "emit": 1.0})
TEXT = OLD._replace(texts={"planned": "a", "emitted": "c"})
BROKEN = Measured(error="PlanError: no")


@pytest.mark.parametrize(
    ("base", "new", "expected"),
    [
        (OLD, OLD._replace(stages={"plan": 9.0}), "equal"),
        (OLD, TEXT, "as dear"),
        (OLD, TEXT._replace(run=1.0 * (1 + 1e-12)), "as dear"),
        (OLD, OLD._replace(plan=5.0, run=0.5, bytes=99), "cheaper"),
        (OLD, TEXT._replace(run=1.1, bytes=1), "dearer"),
        (OLD, TEXT._replace(plan=1.5, bytes=99), "cheaper"),
        (OLD, TEXT._replace(bytes=9), "dearer"),
        (OLD, BROKEN, "dearer"),
        (BROKEN, OLD, "cheaper"),
        (BROKEN, BROKEN, "as dear"),
    ],
)
def test_verdict(base: Measured, new: Measured, expected: Verdict) -> None:
    assert verdict(Pair("p", base, new)) == expected


def test_the_fastest_runs_count_and_what_differs_is_shown() -> None:
    other = OLD._replace(stages={"plan": 2.0, "emit": 4.0})
    assert fastest([OLD, other]) == OLD._replace(stages={"plan": 2.0, "emit": 1.0})
    assert fastest([OLD, TEXT]).error == "lowered twice, it has two results"
    pairs = [Pair("same", OLD, OLD), Pair("other", OLD, TEXT._replace(bytes=6))]
    assert list(plan_lines(pairs))[2:] == ["| other | emitted | 1 | 2 | 8 -> 6 | cheaper |"]
    assert list(plan_lines(pairs[:1])) == []
    assert last_line(pairs) == "2 programs, 1 equal, 1 cheaper, 0 dearer"
    assert last_line([Pair("p", OLD, TEXT)]).endswith("0 cheaper, 0 dearer, 1 others as dear")
    new = OLD._replace(stages={"plan": 1.0, "check": 1.0})
    assert list(stage_lines([Pair("p", OLD, new), Pair("q", OLD, new)]))[2:] == [
        "| plan | 6.000 | 2.000 | 0.33 |",
        "| emit | 2.000 | 0.000 | 0.00 |",
        "| check | 0.000 | 2.000 | - |",
        "| all | 8.000 | 4.000 | 0.50 |",
    ]


def test_where_spmd_is_does_not_matter() -> None:
    here, there = Path("/here/spmd"), Path("/there/spmd")
    one = fingerprint('#loc1 = loc("/here/spmd/ops/attention.py":10:0)', here)
    assert one == fingerprint('#loc1 = loc("/there/spmd/ops/kernels/attention.py":12:4)', there)
    assert one != fingerprint('#loc1 = loc("/here/models/attention.py":10:0)', here)
    assert fingerprint("%1 = add", here) != fingerprint("%1 = sub", here)


def test_programs_use_public_names_alone() -> None:
    files = [*(HERE / "benchmarks" / "programs").glob("*.py"), HERE / "tools" / "checkout_plans.py"]
    names = {
        name
        for path in files
        for _, name in imports_of(path.read_text(encoding="utf-8"), path.relative_to(HERE))
    }
    ours = {name for name in names if name.split(".")[0] == "spmd"}
    assert {name for name in ours if not name.startswith("spmd.models.")} == {"spmd"}


@pytest.fixture
def greedy(tmp_path: Path) -> Path:
    """A checkout of which `spmd.Options` asks for the greedy planner."""
    shutil.copytree(HERE / "spmd", tmp_path / "spmd", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "spmd" / "options.py"
    text = path.read_text(encoding="utf-8")
    assert '= "exact"' in text
    path.write_text(text.replace('= "exact"', '= "greedy"'), encoding="utf-8")
    return tmp_path


@pytest.mark.thorough
def test_two_checkouts(greedy: Path) -> None:
    """One of them plans otherwise; where there is nothing to plan, they are equal."""
    only = r"^(moe/forward-own-axis@2x4|reshard/\(d,-\)->\(-,d\))$"
    found = {pair.name.partition("/")[0]: pair for pair in compare(greedy, HERE, only, 1)}
    experts, reshard = found["moe"], found["reshard"]
    assert verdict(reshard) == "equal"
    new = reshard.new
    assert min(new.plan, new.run, new.bytes, *new.stages.values()) > 0
    assert verdict(experts) == "cheaper"
    assert experts.base.run > experts.new.run
    assert experts.base.texts["propagated"] == experts.new.texts["propagated"]
    assert experts.base.texts["planned"] != experts.new.texts["planned"]


def test_this_repository_has_all_groups_and_others_are_refused() -> None:
    assert {path.split("/")[0] for path in read(str(HERE))} >= {"spmd", "models", "tests", "tools"}
    with pytest.raises(ValueError, match="'no-such-thing' is no folder and no revision"):
        read("no-such-thing")
