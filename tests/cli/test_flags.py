"""How programs read their flags."""

import pytest

from spmd.cli.flags import Parser, Switch, positive, words


@pytest.fixture
def parser() -> Parser:
    made = Parser("program", "What it does.\n\nExamples:\n    program --steps 3")
    made.add_argument("files", nargs="*", help="to read")
    made.add_argument("--max_steps", type=positive, default=7, help="at most")
    made.add_argument("--names", type=words, default=(), help="of axes")
    made.add_argument("--scan", action=Switch, default=True, help="layers in a loop, 100%%")
    made.add_argument("--dry_run", action=Switch, help="start nothing")
    return made


@pytest.mark.parametrize("flags", [["--max-steps=3"], ["--max_steps", "3"]])
def test_dashes_are_underscores(parser: Parser, flags: list[str]):
    assert parser.parse_args(flags).max_steps == 3


def test_values_keep_their_dashes(parser: Parser):
    given = parser.parse_args(["--names=--a-b,c-d", "--", "--e-f"])
    assert given.names == ("--a-b", "c-d")
    assert given.files == ["--e-f"]


def test_switches(parser: Parser):
    assert (parser.parse_args([]).scan, parser.parse_args([]).dry_run) == (True, False)
    given = parser.parse_args(["--noscan", "--dry-run"])
    assert (given.scan, given.dry_run) == (False, True)
    assert parser.parse_args(["--noscan", "--scan"]).scan
    assert not parser.parse_args(["--no-scan"]).scan


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--max_steps=0"], "argument --max_steps: invalid positive value: '0'"),
        (["--max=3"], "unrecognized arguments: --max=3"),
        (["--scan=no"], "argument --scan/--noscan/--no_scan: ignored explicit argument 'no'"),
    ],
)
def test_what_cannot_be_read_is_one_line(parser: Parser, capsys, flags: list[str], error: str):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {error}; program --help lists the flags\n"


def test_help_keeps_lines_and_shows_defaults(parser: Parser, capsys):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "Examples:\n    program --steps 3\n" in text
    assert "at most [7]" in text
    assert "  --[no]scan " in text
    assert "layers in a loop, 100% [true]" in text
    assert "of axes\n" in text
    assert text.endswith("start nothing\n")
