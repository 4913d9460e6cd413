"""Flags and settings that are fields of a dataclass."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from spmd.cli.flags import Parser
from spmd.cli.settings import SettingsError
from spmd.models.fields import from_yaml, of_fields, read_by, taken


def halves(text: str) -> float:
    number = float(text)
    if number % 0.5:
        raise ValueError(f"{text} is no number of halves")
    return number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    steps: int
    rate: float | None = 0.5
    folder: str | Path | None = None
    kind: Literal["one", "two"] = "one"
    is_fast: bool = False
    names: tuple[str, ...] = ("a", "b")
    width: float = dataclasses.field(default=1.5, metadata=read_by(halves))


@pytest.fixture
def parser() -> Parser:
    made = Parser("program", None)
    add = of_fields(made.add_argument, Sizes)
    add("--steps", default=3, help="how many")
    for name in ("rate", "folder", "kind", "is_fast", "names", "width"):
        add(f"--{name}", help="said")
    made.add_argument("--other", default=1)
    return made


def test_types_choices_and_defaults_are_the_fields_and_others_are_refused(parser: Parser):
    assert taken(Sizes, parser.parse_args([])) == Sizes(steps=3)
    words = ["--rate=2", "--folder=f", "--kind=two", "--is_fast", "--names=c", "--width=2"]
    assert taken(Sizes, parser.parse_args(words), steps=4) == Sizes(
        steps=4, rate=2.0, folder="f", kind="two", is_fast=True, names=("c",), width=2.0
    )
    assert "said [a,b]" in parser.format_help()
    with pytest.raises(KeyError):
        of_fields(parser.add_argument, Sizes)("--seeds")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--kind=six", "argument --kind: invalid choice: 'six'"),
        ("--rate=x", "argument --rate: invalid float value: 'x'"),
        ("--width=0.3", "argument --width: 0.3 is no number of halves"),
    ],
)
def test_what_a_field_does_not_take(parser: Parser, capsys, word: str, says: str):
    with pytest.raises(SystemExit):
        parser.parse_args([word])
    assert says in capsys.readouterr().err


def test_from_yaml(tmp_path: Path):
    file = tmp_path / "sizes.yaml"
    file.write_text("steps: 9\nrate: null\nkind: null\nnames: [x]\nis_fast: true\nwidth: 2e0")
    expected = Sizes(steps=9, rate=None, names=("x",), is_fast=True, width=2.0)
    assert from_yaml(Sizes, file) == expected
    assert from_yaml(Sizes, file, steps=2, folder=tmp_path) == dataclasses.replace(
        expected, steps=2, folder=tmp_path
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rate: 1", "sizes.yaml: steps is missing"),
        ("steps: 1\nrates: 1", "sizes.yaml:2: no setting is called 'rates'; the nearest is 'rate'"),
        ("steps: many", "sizes.yaml:1: steps: invalid int value: 'many'"),
        ("steps: 1\nwidth: 0.3", "sizes.yaml:2: width: 0.3 is no number of halves"),
    ],
)
def test_from_yaml_says_what_is_wrong(tmp_path: Path, text: str, says: str):
    (tmp_path / "sizes.yaml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        from_yaml(Sizes, tmp_path / "sizes.yaml")
    assert str(caught.value) == f"{tmp_path}/{says}"
