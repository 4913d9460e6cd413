"""Whatever is thrown at the server: a clear error, and it lives on with all its slots."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.serving.http.limits import HttpOptions, ServerOptions
from tests.serving.http.live import Live, post, serving
from tests.waiting import PATIENCE

LIMIT = 100_000
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(options=ServerOptions(body_bytes=LIMIT)) as running:
        yield running


@pytest.fixture
def hasty() -> Iterator[Live]:
    """A server that soon gives up on what does not come; nothing else is asked of it."""
    options = ServerOptions(body_bytes=LIMIT, body_seconds=0.4, header_seconds=0.3)
    with serving(options=options) as running:
        yield running


@pytest.fixture(scope="module")
def local() -> Iterator[Live]:
    with serving(http=HttpOptions(allowed_hosts=())) as running:
        yield running


def is_well(live: Live) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "seed": 0}
    answer = post(f"{live.url}/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == live.alone("hello", 3)
    live.wait_idle()


def send(live: Live, content: Any, **headers: str) -> httpx.Response:
    return post(f"{live.url}/v1/completions", content=content, headers={**JSON, **headers})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        (b"[]", "has to be a JSON object, not a list of 0"),
        (b"null", "has to be a JSON object, not null"),
        (b'"prompt"', "has to be a JSON object"),
        (b'{"prompt": "a"} x', "not JSON: Extra data"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 12 is wrong"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no number"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity is no number"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not usable"),
        (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "a huge integer"),
        (b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", "nested too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b'{"prompt": "a\x00b\ncd"}', "not JSON: Invalid control character"),
        ("{'prompt': 'a'}".encode("utf-16"), "not UTF-8"),
    ],
)
def test_bodies_that_are_no_request(live: Live, content: bytes, message: str) -> None:
    response = send(live, content)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert len(response.content) < 600
    is_well(live)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = """
    prompt messages model max_tokens max_completion_tokens temperature top_p top_k min_p n stop
    stream stream_options logprobs top_logprobs echo seed user repetition_penalty tools best_of
    response_format logit_bias stop_token_ids ignore_eos
"""
NAMES = st.sampled_from(FIELDS.split())


@given(
    path=st.sampled_from(["completions", "chat/completions"]),
    body=st.dictionaries(NAMES, VALUES, max_size=4),
    usual=st.booleans(),
)
def test_fields_of_any_type(live: Live, path: str, body: Any, usual: bool) -> None:
    start = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]} if usual else {}
    content = json.dumps({**start, **body}).encode()
    response = post(f"{live.url}/v1/{path}", content=content, headers=JSON)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
        assert len(response.content) < 1000


def test_bodies_that_are_too_large(live: Live) -> None:
    response = send(live, b'{"prompt": "' + b"a" * LIMIT + b'"}')
    assert response.status_code == 413
    assert "100,000 bytes are the most" in response.json()["error"]["message"]
    is_well(live)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_bodies_of_another_kind(live: Live, kind: str) -> None:
    url = f"{live.url}/v1/completions"
    assert post(url, content=b'{"prompt": "a"}', headers={"Content-Type": kind}).status_code == 415


# Below HTTP.


def talk(live: Live, *pieces: bytes, pause: float = 0.0, close_ours: bool = False) -> bytes:
    """Send some bytes and read what comes until the server hangs up."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as connection:
        got = b""
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
            if close_ours:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                got += piece
        except ConnectionError:
            pass
        return got


def head(length: int) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"\x00" * 1000,
        b"GET\r\n\r\n",
        b"GET / HTTPS\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 2_000_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: 1\r\n" * 400_000,
    ],
)
def test_what_is_no_http(live: Live, garbage: bytes) -> None:
    answer = talk(live, garbage)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    is_well(live)


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        *((name, 200) for name in ("LOCALHOST:80", "a.localhost", "[::1]:80", "10.0.0.7")),
        *((name, 421) for name in ("evil.example", "127.0.0.1.evil.example:80", "[evil")),
        *(("", 400), ("localhost localhost", 400)),
    ],
)
def test_hosts(local: Live, hosts: str, status: int) -> None:
    lines = b"".join(b"Host: %b\r\n" % host.encode() for host in hosts.split())
    start = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n"
    assert talk(local, start + lines + b"\r\n").startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    "lines",
    [
        b"Host: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Host: x\nContent-Length: 5\n\n12345",
        b"Host: x\r\nX: a\r\n b\r\n\r\n",
    ],
    ids=["two lengths", "bare line feeds", "a folded header"],
)
def test_what_proxies_might_read_otherwise(live: Live, lines: bytes) -> None:
    answer = talk(live, b"POST /v1/completions HTTP/1.1\r\n" + lines + b"GET / HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1


def test_a_body_that_does_not_say_how_large_it_is(live: Live, hasty: Live) -> None:
    start = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    piece = b"3e8\r\n" + b"a" * 1000 + b"\r\n"
    assert talk(hasty, start, piece * 99).startswith(b"HTTP/1.1 408 ")
    answer = talk(live, start, piece * 101)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    is_well(live)


@pytest.mark.parametrize("pieces", [[b'{"prompt'], [b"{"] * 3])
def test_a_body_that_never_comes_or_drop_by_drop(hasty: Live, pieces: list[bytes]) -> None:
    answer = talk(hasty, head(1000), *pieces, pause=0.1)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"was not here within 0.4 seconds" in answer


def test_headers_that_come_drop_by_drop(hasty: Live) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\n"
    assert talk(hasty, start, *[b"X: 1\r\n"] * 8, pause=0.1) == b""
    assert talk(hasty) == b""


def test_a_connection_that_is_closed_in_its_middle(live: Live) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 50, "stream": True}).encode()
    request = head(len(body)) + body
    for end in (5, 60, len(request) - 5, len(request)):
        with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE) as connection:
            connection.sendall(request[:end])
    is_well(live)
    assert talk(live, request[:-5], close_ours=True) == b""
    is_well(live)


def test_two_requests_in_one_piece(live: Live) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 3, "seed": 0}).encode()
    answer = talk(live, (head(len(body)) + body) * 2 + b"GET /health HTTP/1.0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(live.alone("hello", 3).encode()) == 2
