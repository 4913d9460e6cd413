"""How many connections an address may have, and what becomes of those beyond."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from serving.errors import ServingError
from serving.http import connections
from serving.http.connections import Addresses
from serving.http.limits import HttpOptions, Options
from tests.serving.http.live import Live, get, post, serving
from tests.waiting import PATIENCE, wait_until

TWO = Options(address_connections=2)
BODY = {"prompt": "hello", "max_tokens": 3, "seed": 0}


def begin(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE)


def ends(connection: socket.socket) -> bool:
    """Whether it ends before anything comes; it hangs otherwise, or gets a byte."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def connect(live: Live) -> socket.socket:
    """A connection that the server knows of, and on which nothing is sent."""
    before = set(live.server.server_state.connections)
    made = begin(live)
    wait_until(lambda: set(live.server.server_state.connections) - before)
    return made


@contextmanager
def two_connections(live: Live) -> Iterator[ExitStack]:
    """As many as an address may have; whatever else is entered closes with them."""
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(live))
        yield stack


def refused(live: Live) -> float:
    """How many the metrics say were refused."""
    text = live.service.traffic.render().decode()
    counts = [line for line in text.splitlines() if 'reason="connections_full"' in line]
    return sum(float(line.split()[-1]) for line in counts if "_total{" in line)


def test_one_more_is_told_so() -> None:
    with serving(options=TWO) as live:
        with two_connections(live):
            answer = post(f"{live.url}/v1/completions", json=BODY)
            assert answer.status_code == 429 and int(answer.headers["Retry-After"]) > 0
            assert answer.headers["Connection"] == "close" and answer.headers["X-Request-Id"]
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "connections_full")
            assert error["message"].startswith("there are 2 connections from this address")
            ours = get(f"{live.url}/v2")
            assert ours.status_code == 429 and ours.json()["error"] == error["message"]
            assert refused(live) == 2
        wait_until(lambda: not live.server.server_state.connections)
        assert post(f"{live.url}/v1/completions", json=BODY).status_code == 200
        assert refused(live) == 2


def test_many_more_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are told hold what they have until they ask; the others hold nothing."""
    monkeypatch.setattr(connections, "TOLD", 1)
    monkeypatch.setattr(connections, "TOLD_SECONDS", PATIENCE)
    with serving(options=TWO) as live, two_connections(live) as stack:
        told = stack.enter_context(connect(live))
        assert ends(stack.enter_context(begin(live)))
        assert refused(live) == 1
        told.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with told.makefile("rb") as file:
            assert file.readline().startswith(b"HTTP/1.1 429 ")
            assert b"connections_full" in file.read()
        assert refused(live) == 2


def test_one_that_asks_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TOLD_SECONDS", 0.05)
    with serving(options=TWO) as live, two_connections(live) as stack:
        assert ends(stack.enter_context(begin(live)))
        assert refused(live) == 1
        assert len(live.server.server_state.connections) == 2


def test_trusted_proxies_bring_many() -> None:
    for proxies in (("127.0.0.0/8",), ("*",), ("10.0.0.0/8",)):
        http = HttpOptions(forwarded_allow_ips=proxies)
        with serving(options=TWO, http=http) as live, two_connections(live):
            answer = post(f"{live.url}/v1/completions", json=BODY)
            assert answer.status_code == (429 if proxies == ("10.0.0.0/8",) else 200)


def test_addresses() -> None:
    addresses = Addresses(1)
    assert [addresses.enter(host) for host in ("1.2.3.4", "1.2.3.5", "1.2.3.4")] == [0, 0, 1]
    assert [addresses.enter(host) for host in ("2001:db8::1", "2001:db8::2")] == [0, 1]
    assert [addresses.enter(host) for host in ("2001:db9::1", "::ffff:1.2.3.4", None)] == [0, 0, 0]
    for _ in range(2):
        addresses.leave("1.2.3.4")
    assert addresses.enter("1.2.3.4") == 0
    with pytest.raises(ServingError, match="address_connections is 0"):
        Options(address_connections=0)
