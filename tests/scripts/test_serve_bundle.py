"""scripts/serve: what its flags become."""

from __future__ import annotations

import pytest

from scripts.serve_bundle import KEYS, make_parser, options
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
