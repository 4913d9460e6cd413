"""scripts/serve: what its flags become."""

import dataclasses
import json
from pathlib import Path

import pytest

from spmd.models.fields import taken
from spmd.scripts.flags.reach import KEYS
from spmd.scripts.serve_bundle import LIMITS, make_parser, options
from spmd.serving.errors import ServingError
from spmd.serving.http.limits import HttpOptions, ServerOptions
from tests.forked import Forked


def test_flags_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = make_parser()
    monkeypatch.delenv(KEYS, raising=False)
    assert options(parser.parse_args(["bundle"])) == ServerOptions()
    monkeypatch.setenv(KEYS, "b,c")
    flags = "--api_key a --api_key_file f --token_budget 512 --max_waiting 7 --drain_seconds 2"
    drawn = ["--override-generation-config", '{"top_k": 3}', "--generation_config", "none"]
    assert options(parser.parse_args(["bundle", *flags.split(), *drawn])) == ServerOptions(
        ("a", "b", "c"), Path("f"), max_waiting=7, token_budget=512, drain_seconds=2.0,
        generation_config="none", override_generation_config={"top_k": 3},
    )  # fmt: skip
    with pytest.raises(ServingError, match="JSON is needed"):
        options(parser.parse_args(["bundle", "--override_generation_config", "[1]"]))


def test_every_limit_has_a_flag() -> None:
    fields = {field.name for field in dataclasses.fields(ServerOptions)}
    others = {"generation_config", "override_generation_config", "api_keys", "api_key_file"}
    assert fields == {*LIMITS, *others, "token_budget", "tool_format", "adapters_from"}
    flags = [word for name in LIMITS for word in (f"--{name}", "77")]
    given = options(make_parser().parse_args(["bundle", *flags]))
    assert all(getattr(given, name) == 77 for name in LIMITS)


def test_flags_say_how_the_server_is_reached() -> None:
    parser = make_parser()
    assert taken(HttpOptions, parser.parse_args(["bundle"])) == HttpOptions()
    flags = (
        "--ssl_certfile cert.pem --ssl_keyfile key.pem --root_path /llama "
        "--allow_origins https://a.example,http://localhost:3000 "
        "--forwarded_allow_ips 10.0.0.7,fd00::/8 --otlp_endpoint http://collector:4318"
    )
    assert taken(HttpOptions, parser.parse_args(["bundle", *flags.split()])) == HttpOptions(
        ssl_certfile="cert.pem",
        ssl_keyfile="key.pem",
        allow_origins=("https://a.example", "http://localhost:3000"),
        root_path="/llama",
        forwarded_allow_ips=("10.0.0.7", "fd00::/8"),
        otlp_endpoint="http://collector:4318",
    )


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_a_user_can_mend_is_the_last_line(form: str, tmp_path: Path) -> None:
    """As text, or as an object of the log; not as a traceback."""
    arguments = [str(tmp_path / "none"), "--port", "0", "--log_format", form]
    started = Forked("spmd.scripts.serve_bundle", arguments, tmp_path / "said.txt", {})
    assert started.wait() == 1
    last = started.said.splitlines()[-1]
    if form == "json":
        assert json.loads(last)["level"] == "CRITICAL" and "none" in json.loads(last)["message"]
    else:
        assert last.startswith("error: ") and "none" in last
