"""How the server is reached: TLS, pages of other sites, and proxies before it."""

import logging
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from spmd.serving.errors import ServingError
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.server import Server
from spmd.serving.http.service import Service
from tests.serving.http.live import get, post, serving
from tests.waiting import wait_until

ASK = {"prompt": "hello", "max_tokens": 4, "seed": 0}
SITE = "https://chat.example"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make.split(), *names], check=True, capture_output=True)
    return cert, key


def test_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    trust = ssl.create_default_context(cafile=cert)
    with serving(http=HttpOptions(ssl_certfile=cert, ssl_keyfile=key)) as live:
        assert live.url.startswith("https://")
        text = live.alone("hello", 4)
        whole = post(f"{live.url}/v1/completions", json=ASK, verify=trust).json()
        assert whole["choices"][0]["text"] == text
        stream = post(f"{live.url}/v1/completions", json={**ASK, "stream": True}, verify=trust)
        assert stream.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            get(f"{live.url}/health")
        with pytest.raises(httpx.TransportError):
            get(f"http://127.0.0.1:{live.port}/health")


def test_a_certificate_that_is_none(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert = str(certificate[0])
    (tmp_path / "text").write_text("hello")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ssl_certfile": "no/such.pem"}, r"TLS with no/such\.pem: No such file"),
        ({"ssl_certfile": cert}, "TLS with .*cert.pem: "),
        ({"ssl_certfile": cert, "ssl_keyfile": str(tmp_path / "text")}, "TLS with .* and .*text: "),
    ]
    for given, says in cases:
        with pytest.raises(ServingError, match=says):
            Server(Service(), http=HttpOptions(**given))


def test_pages_of_other_sites() -> None:
    """Browsers ask before they send JSON, and look for their origin in the answer."""
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    with serving(http=HttpOptions(allow_origins=(SITE,))) as live:
        url = f"{live.url}/v1/completions"
        for origin, allowed in ((SITE, SITE), ("https://evil.example", None)):
            preflight = httpx.options(url, headers={"Origin": origin, **asks})
            assert preflight.headers.get("access-control-allow-origin") == allowed
            assert preflight.is_success == bool(allowed)
            for answer in (
                post(url, json=ASK, headers={"Origin": origin}),
                post(url, json={}, headers={"Origin": origin}),  # errors are for the page, too
            ):
                assert answer.headers.get("access-control-allow-origin") == allowed


def test_other_sites_may_not_unless_they_are_named() -> None:
    with serving() as live:
        asks = {"Origin": SITE, "Access-Control-Request-Method": "POST"}
        answer = httpx.options(f"{live.url}/v1/completions", headers=asks)
        assert answer.status_code == 405
        answers = [answer, get(f"{live.url}/v1/models", headers={"Origin": SITE})]
        assert not any(name.startswith("access-control") for a in answers for name in a.headers)


def test_a_path_that_a_proxy_removes() -> None:
    with serving(http=HttpOptions(root_path="/models/llama")) as live:
        assert "<html" in get(f"{live.url}/").text
        assert get(f"{live.url}/static/chat.js").status_code == 200
        assert get(f"{live.url}/v1/models").status_code == 200
        answer = get(f"{live.url}/v2/models/none")
        assert answer.status_code == 404
        assert set(answer.json()) == {"error"} and isinstance(answer.json()["error"], str)
        page = get(f"{live.url}/").text + get(f"{live.url}/static/chat.js").text
        assert 'src="/' not in page and 'href="/' not in page and 'fetch("/' not in page


@pytest.mark.parametrize(
    ("trusted", "client"),
    [
        ((), "127.0.0.1"),
        (("10.0.0.0/8",), "127.0.0.1"),  # we are no such proxy: anybody can send the header
        (("127.0.0.0/8",), "203.0.113.7"),
        (("127.0.0.1", "203.0.113.0/24"), "198.51.100.1"),  # two proxies, one behind the other
    ],
)
def test_proxies(trusted: tuple[str, ...], client: str, monkeypatch: Any, caplog: Any) -> None:
    """Whom fairness and the log take a client for."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn reads it; our flag alone decides
    seen = []
    caplog.set_level(logging.INFO, "serving.access")
    with serving(http=HttpOptions(forwarded_allow_ips=trusted)) as live:
        engine = live.service.language().engine
        submit = engine.submit

        def note(jobs: Any, client: str, *more: Any) -> Any:
            seen.append(client)
            return submit(jobs, client, *more)

        monkeypatch.setattr(engine, "submit", note)
        headers = {"X-Forwarded-For": "198.51.100.1, 203.0.113.7"}
        post(f"{live.url}/v1/completions", json=ASK, headers=headers)
        wait_until(lambda: caplog.records)
    assert seen == [f"address {client}"]
    assert caplog.records[0].fields["client"] == client


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"max_waiting": -1}, "max_waiting is -1; it has to be at least 0"),
        ({"token_budget": 0}, "token_budget is 0; it has to be at least 1"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan; it has to be at least 0"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile needs ssl_certfile"),
        ({"allow_origins": ("https://a.example/",)}, "'https://a.example/' is no origin"),
        ({"allow_origins": ("a.example",)}, "'a.example' is no origin"),
        ({"root_path": "llama"}, "'llama' is not like /models/llama"),
        ({"root_path": "/llama/"}, "'/llama/' is not like /models/llama"),
        ({"forwarded_allow_ips": ("proxy",)}, "'proxy' does not appear to be an IPv4"),
        ({"forwarded_allow_ips": ("10.0.0.1/8",)}, "10.0.0.1/8 has host bits set"),
        ({"otlp_endpoint": "collector:4318"}, "'collector:4318' is not like"),
    ],
)
def test_options_that_make_no_sense(option: dict[str, Any], says: str) -> None:
    kind = HttpOptions if set(option) <= set(HttpOptions.__dataclass_fields__) else ServerOptions
    with pytest.raises(ServingError, match=says):
        kind(**option)
