"""scripts/serve: what its flags become."""

from __future__ import annotations

import dataclasses

import pytest

from scripts.serve_bundle import KEYS, LIMITS, make_parser, options
from serving.http.service import Options


def test_flags_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = make_parser()
    monkeypatch.delenv(KEYS, raising=False)
    assert options(parser.parse_args(["bundle"])) == Options()
    monkeypatch.setenv(KEYS, "b,c")
    flags = [
        "--api_key",
        "a",
        "--token_budget",
        "512",
        "--max_waiting",
        "7",
        "--drain_seconds",
        "2",
    ]
    given = options(parser.parse_args(["bundle", *flags]))
    assert given == Options(("a", "b", "c"), max_waiting=7, token_budget=512, drain_seconds=2.0)


def test_every_limit_has_a_flag() -> None:
    fields = {field.name for field in dataclasses.fields(Options)}
    assert fields == {*LIMITS, "api_keys", "token_budget"}
    flags = [word for name in LIMITS for word in (f"--{name}", "77")]
    given = options(make_parser().parse_args(["bundle", *flags]))
    assert all(getattr(given, name) == 77 for name in LIMITS)
