"""scripts/serve: what its flags become."""

from __future__ import annotations

import pytest

from scripts.serve_bundle import KEYS, http_options, make_parser, options
from serving.http.options import HttpOptions
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


def test_flags_say_how_the_server_is_reached() -> None:
    parser = make_parser()
    assert http_options(parser.parse_args(["bundle"])) == HttpOptions()
    flags = (
        "--ssl_certfile cert.pem --ssl_keyfile key.pem --root_path /llama "
        "--allow_origins https://a.example,http://localhost:3000 "
        "--forwarded_allow_ips 10.0.0.7,fd00::/8 --otlp_endpoint http://collector:4318"
    )
    assert http_options(parser.parse_args(["bundle", *flags.split()])) == HttpOptions(
        ssl_certfile="cert.pem",
        ssl_keyfile="key.pem",
        allow_origins=("https://a.example", "http://localhost:3000"),
        root_path="/llama",
        forwarded_allow_ips=("10.0.0.7", "fd00::/8"),
        otlp_endpoint="http://collector:4318",
    )
