"""Flags in YAML files: what they become, what goes before what, and what is said to bad ones."""

import argparse
from pathlib import Path

import pytest
import yaml

from spmd.cli.flags import Parser, Switch, positive, words
from spmd.cli.specs import mesh_axes


@pytest.fixture
def parser() -> Parser:
    made = Parser("program", "What it does.", settings=True)
    made.add_argument("files", nargs="*", help="to read")
    made.add_argument("--out", required=True)
    sizes = made.add_argument_group("sizes").add_argument
    sizes("--steps", type=positive, default=7)
    sizes("--rate", type=float)
    sizes("--mesh", type=mesh_axes, default="data=4,model=2")
    sizes("--slices", type=mesh_axes, default={})
    others = made.add_argument_group("others").add_argument
    others("--data", type=words, default=())
    others("--kind", choices=("plain", "on"), default="plain")
    others("--range")
    others("--scan", action=Switch, default=True)
    others("--first", action=Switch, default=None)
    others("--resume", nargs="?", const="auto")
    others("--key", action="append", default=[])
    others("--folder", type=Path, default=Path("here"))
    return made


@pytest.fixture
def read(parser: Parser, tmp_path: Path):
    """What a program with this file, and these words after it, is given."""

    def read(text: str, *more: str) -> argparse.Namespace:
        (tmp_path / "run.yaml").write_text(text)
        return parser.parse_args(["--settings", str(tmp_path / "run.yaml"), "--out=o", *more])

    return read


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("steps: 3", "steps", 3),
        ("steps: '3'", "steps", 3),
        ("rate: 1e-4", "rate", 1e-4),  # text to YAML 1.1
        ("rate: 1", "rate", 1.0),
        ("rate: inf", "rate", float("inf")),
        ("range: 10:13", "range", "10:13"),  # 613 to YAML 1.1
        ("kind: on", "kind", "on"),  # True to YAML 1.1
        ("range: 2026-01-01", "range", "2026-01-01"),  # a date
        ("range: 'null'", "range", "null"),
        ("range: ''", "range", ""),
        ("range: --odd=-", "range", "--odd=-"),
        ("mesh: {data: 8, model: 1}", "mesh", {"data": 8, "model": 1}),
        ("mesh: data=8,model=1", "mesh", {"data": 8, "model": 1}),
        ("mesh:\n  data: 8", "mesh", {"data": 8}),
        ("data: [a b, c]", "data", ("a b", "c")),
        ("data:\n- a\n- '*.txt'", "data", ("a", "*.txt")),
        ("data: a,b", "data", ("a", "b")),
        ("data: []", "data", ()),
        ("scan: false", "scan", False),
        ("scan: True", "scan", True),
        ("resume: true", "resume", "auto"),
        ("resume: false", "resume", None),
        ("resume: 12", "resume", "12"),
        ("key: one", "key", ["one"]),
        ("key: [one, 'two,three']", "key", ["one", "two,three"]),
        ("folder: a/b", "folder", Path("a/b")),
        ("mesh: null", "mesh", {"data": 4, "model": 2}),
        ("steps:", "steps", 7),
        ("rate: &n 3\nsteps: *n", "steps", 3),
    ],
)
def test_values(read, line: str, name: str, value: object):
    assert getattr(read(line), name) == value


def test_the_command_line_and_later_files_go_first_also_of_repeated_flags(
    read, tmp_path: Path, parser: Parser
):
    assert read("steps: 3", "--steps=4").steps == 4
    assert read("scan: false\nresume: true", "--scan", "--resume=3").scan
    more = tmp_path / "more.yaml"
    more.write_text("steps: 5\nkey: b")
    both = read("steps: 3\nkey: a\nrate: 2", f"--settings={more}", "--key=c", "file")
    assert (both.steps, both.rate, both.key, both.files) == (5, 2.0, ["c"], ["file"])
    before = parser.parse_args(["--steps=9", "--settings", str(more), "--out=o"])
    assert before.steps == 9  # wherever it stands
    assert read("key: [a, b]").key == ["a", "b"]
    assert read("key: [a, b]", "--key=c", "--key", "d").key == ["c", "d"]
    (tmp_path / "more.yaml").write_text("key: e")
    (tmp_path / "none.yaml").write_text("key: null")
    files = [f"--settings={tmp_path / name}" for name in ("run.yaml", "more.yaml", "none.yaml")]
    assert parser.parse_args([*files, "--out=o"]).key == ["e"]


def test_what_a_program_needs_may_be_in_the_file_if_it_reads_one(parser: Parser, tmp_path: Path):
    (tmp_path / "a.yaml").write_text("out: there")
    assert parser.parse_args(["--settings", str(tmp_path / "a.yaml")]).out == "there"
    with pytest.raises(SystemExit):
        Parser("program", "").parse_args(["--settings=a.yaml"])


ERRORS = {
    "step: 3": ":1: no setting is called 'step'; the nearest is 'steps'",
    "x-steps: 3": ":1: no setting is called 'x_steps'; the nearest is 'steps'",
    "zzz: 3": ":1: no setting is called 'zzz'",
    "noscan: true": ":1: no setting is called 'noscan'; the nearest is 'scan'",
    "settings: a.yaml": ":1: no setting is called 'settings'",
    "rate: 1\nsteps: ten": ":2: steps: invalid positive value: 'ten'",
    "steps: 2.0": ":1: steps: invalid positive value: '2.0'",
    "steps: [1, 2]": ":1: steps: invalid positive value: '1,2'",
    "range: [1, 2]": ":1: range: does not take a list",
    "range: {a: 2}": ":1: range: does not take a mapping",
    "mesh: [data=4]": ":1: mesh: does not take a list",
    "mesh: {data: 4, model: [2]}": ":1: mesh: ['2'] is not a single value",
    "mesh:\n  data: 0": ":1: mesh: 'data=0' is not of the form axis=size, as in data=4,model=2",
    "data: ['a,b', c]": ":1: data: a comma is within an item of this list",
    "data:\n- a\n-": ":1: data: None is not a single value",
    "kind: other": ":1: kind: invalid choice: 'other' (choose from ",
    "scan: off": ":1: scan: takes true or false, not 'off'",
    "scan: [true]": ":1: scan: takes true or false, not [True]",
    "steps: 3\n\nsteps: 4": ":3: steps is given twice",
    "steps: [3": ": this is not YAML: while parsing a flow sequence",
    "a: 1\n---\nb: 2": ": this is not YAML: expected a single document in the stream",
    "": ": settings are lines of a name, a colon, a space and a value, as in `steps: 100`",
    "- steps": ": settings are lines of a name, a colon, a space and a value, as in",
    "? [a]\n: 3": ":1: no setting is called ",
    "rate: \x07": ": this is not YAML: ",
}


@pytest.mark.parametrize("text", ERRORS)
def test_mistakes_are_one_line_with_the_place(read, tmp_path: Path, capsys, text: str):
    with pytest.raises(SystemExit) as ended:
        read(text)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"error: {tmp_path / 'run.yaml'}{ERRORS[text]}")
    assert said.endswith("; program --help lists the flags\n")
    assert said.count("\n") == 1


def test_files_that_cannot_be_read(parser: Parser, tmp_path: Path, capsys):
    (tmp_path / "latin").write_bytes(b"range: \xe9")
    for path, says in (
        (tmp_path / "none.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "latin", "is no text in UTF-8"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(["--settings", str(path), "--out=o"])
        assert capsys.readouterr().err.startswith(f"error: {path}: {says}; program --help")
    with pytest.raises(SystemExit):
        parser.parse_args(["--settings"])
    assert "argument --settings: expected one argument" in capsys.readouterr().err


def test_all_settings_are_printed_and_read_back(read, parser: Parser, capsys):
    words = ["--rate=1e-5", "--range=10:13", "--noscan", "--data=a: b,c", "--key=x,y", "--resume"]
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--out=no", *words, "--print_settings"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed == (
        "out: 'no'\n"
        "\n# sizes\n"
        "steps: 7\nrate: 1.0e-05\nmesh: {data: 4, model: 2}\nslices: null\n"
        "\n# others\n"
        "data: ['a: b', c]\nkind: plain\nrange: '10:13'\nscan: false\nfirst: null\n"
        "resume: auto\nkey: ['x,y']\nfolder: here\n"
    )
    assert yaml.safe_load(printed)["mesh"] == {"data": 4, "model": 2}
    given, again = vars(parser.parse_args(["--out=no", *words])), vars(read(printed, "--out=no"))
    assert {**again, "settings": []} == given
