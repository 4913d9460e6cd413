"""Who asks for too much, connects too often, or leaves, costs the others nothing."""

import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import Request

from spmd.models.training.data.tokenizer import ByteTokenizer
from spmd.serving.engine.infer import Array, TensorSpec
from spmd.serving.errors import ServingError
from spmd.serving.http import connections
from spmd.serving.http.admission import SPARE, Allowance
from spmd.serving.http.connections import Addresses
from spmd.serving.http.fields import SHORT
from spmd.serving.http.keys import Keys
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import HttpOptions, ServerOptions
from spmd.serving.http.requests import client_of
from tests.serving.engine.fake_backend import LIMITS
from tests.serving.http.live import Live, begin, get, post, serving
from tests.waiting import PATIENCE, wait_until

LONG = "a b " * (SHORT // 4)


class Slow(ByteTokenizer):
    """Long texts wait until they may go on; how long they are says nothing of their tokens."""

    longest = None

    def __init__(self) -> None:
        self.open = threading.Event()
        self.long = 0

    def encode_batch(self, texts: Sequence[str]) -> Any:
        if len(texts[0]) >= len(LONG):
            self.long += 1
            self.open.wait(PATIENCE)
        return super().encode_batch(texts)


class Gated:
    """y = x, once the gate is open."""

    inputs = outputs = (TensorSpec("x", "float32", (1,)),)

    def __init__(self) -> None:
        self.open = threading.Event()
        self.called: list[float] = []

    def infer(self, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
        self.called.append(tensors["x"].item())
        self.open.wait(PATIENCE)
        return {"x": np.asarray(tensors["x"])}


@contextmanager
def serving_tensors(options: ServerOptions | None = None) -> Iterator[tuple[Live, Gated]]:
    gated = Gated()
    with serving(options=options, load=False) as live:
        live.service.become_ready(Loaded("gated", infer=gated))
        yield live, gated
        gated.open.set()


TENSOR = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [7]}]}
INFER = "/v2/models/gated/infer"


def status(connection: socket.socket) -> int:
    with connection:
        return int(connection.makefile("rb").readline().split()[1])


def taken(live: Live) -> int:
    return live.service.admission.places.taken


def test_a_client_leaves_something_to_others() -> None:
    budget = Allowance(10 * SPARE)
    assert budget.take("a", 9 * SPARE) and not budget.take("a", SPARE)
    assert budget.take("a", SPARE - 10) and not budget.take("a", 1)
    assert budget.take("b", 10) and not budget.take("b", 1)
    budget.give_back("a", 1)
    assert budget.taken == 10 * SPARE - 1 and budget.take("c", 1)
    assert Allowance(SPARE - 1).take("a", SPARE - 1)


@pytest.mark.parametrize(
    ("host", "keys", "client"),
    [
        ("10.0.0.1", ("one",), "address 10.0.0.1"),
        ("10.0.0.1", ("one", "two"), "key 1"),
        ("2001:db8:1:2:3:4:5:6", (), "address 2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", (), "address ::ffff:10.0.0.1"),
        ("a name", (), "address a name"),
    ],
)
def test_who_a_client_is(host: str, keys: tuple[str, ...], client: str) -> None:
    request = Request({"type": "http", "client": (host, 1), "headers": []})
    assert client_of(request, "1", Keys(keys)) == client


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_texts_that_are_too_long_are_not_tokenized(path: str) -> None:
    class Never(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> Any:
            assert len(texts[0]) < len(LONG)
            return super().encode_batch(texts)

    with serving(tokenizer=Never()) as live:
        body = {"prompt": LONG, "messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
        answer = post(f"{live.url}/v1/{path}", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in error["message"]
        assert f"at least {len(LONG) // 100}" in error["message"]
        ids = post(f"{live.url}/v1/completions", json={"prompt": [1] * 300}).json()
        assert ids["error"]["code"] == "context_length_exceeded"
        live.wait_idle()


def test_long_texts_do_not_hold_others_up_and_those_who_leave_get_nothing() -> None:
    tokenizer = Slow()
    with serving(options=ServerOptions(text_threads=2), tokenizer=tokenizer) as live:
        leaving = [begin(live, "/v1/completions", {"prompt": LONG}) for _ in range(8)]
        wait_until(lambda: tokenizer.long == 2 and taken(live) == 8)
        body = {"prompt": "hello", "max_tokens": 3, "seed": 0}
        answer = post(f"{live.url}/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == live.alone("hello", 3)
        assert get(f"{live.url}/health").status_code == 200
        for connection in leaving:
            connection.close()
        wait_until(lambda: taken(live) == 0)
        assert live.service.admission.bytes.taken == 0
        last = begin(live, "/v1/completions", {"prompt": LONG})
        tokenizer.open.set()
        assert status(last) == 400
        assert tokenizer.long == 3
        live.wait_idle()
        assert live.numbers()['spmd:requests_refused_total{reason="left"}'] == 8


def test_bodies_have_a_limit_together() -> None:
    tokenizer = Slow()
    with serving(options=ServerOptions(bodies_bytes=3 * len(LONG)), tokenizer=tokenizer) as live:
        first = [begin(live, "/v1/completions", {"prompt": LONG}) for _ in range(2)]
        wait_until(lambda: tokenizer.long == 2)
        answer = post(f"{live.url}/v1/completions", json={"prompt": LONG})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "memory_full"
        body = {"prompt": "hello", "max_tokens": 3}
        assert post(f"{live.url}/v1/completions", json=body).status_code == 200
        tokenizer.open.set()
        assert list(map(status, first)) == [400, 400]
        wait_until(lambda: live.service.admission.bytes.taken == 0)


def test_one_address_cannot_take_all_places() -> None:
    places = LIMITS.slots + 28
    body = {"prompt": "hello", "max_tokens": 3}
    with serving(options=ServerOptions(max_waiting=28)) as live, ExitStack() as stack:
        live.backend.gate.close()
        most = places - places // SPARE
        for i in range(most):
            named = {**body, "user": f"user {i}"}
            stack.enter_context(begin(live, "/v1/completions", named, "127.0.0.2"))
        wait_until(lambda: taken(live) == most)
        assert status(begin(live, "/v1/completions", body, "127.0.0.2")) == 429
        others = [begin(live, "/v1/completions", body) for _ in range(places - most)]
        wait_until(lambda: taken(live) == places)
        refused = post(f"{live.url}/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        live.backend.gate.open()
        assert {status(other) for other in others} == {200}


# Tensors.


def test_tensors_of_those_who_leave_are_not_computed() -> None:
    with serving_tensors() as (live, gated):
        leaving = [begin(live, INFER, TENSOR) for _ in range(20)]
        wait_until(lambda: len(gated.called) == 1 and taken(live) == 20)
        wait_until(lambda: live.numbers()['vllm:num_requests_waiting{model_name="gated"}'] == 19)
        for connection in leaving:
            connection.close()
        wait_until(lambda: taken(live) == 0)
        honest = begin(live, INFER, TENSOR)
        gated.open.set()
        assert status(honest) == 200
        assert len(gated.called) == 2
        counts = live.numbers()
        ended = 'vllm:request_success_total{finished_reason="%s",model_name="gated"}'
        assert counts[ended % "abort"] == 20 and counts[ended % "stop"] == 1
        assert counts['vllm:e2e_request_latency_seconds_count{model_name="gated"}'] == 21


def test_tensors_that_hang() -> None:
    with serving_tensors(ServerOptions(stall_seconds=0.1)) as (live, gated):
        asked = begin(live, INFER, TENSOR)
        wait_until(lambda: "under way" in get(f"{live.url}/health").text)
        gated.open.set()
        assert status(asked) == 200
        assert get(f"{live.url}/health").status_code == 200


def test_tensors_are_fair_to_addresses() -> None:
    with serving_tensors() as (live, gated):
        workers, _ = live.service.tensors()
        many = [begin(live, INFER, TENSOR, "127.0.0.2") for _ in range(10)]
        wait_until(lambda: len(gated.called) == 1 and workers.waiting == 9)
        one = begin(live, INFER, {"inputs": [{**TENSOR["inputs"][0], "data": [8]}]})
        wait_until(lambda: workers.waiting == 10)
        gated.open.set()
        assert status(one) == 200
        assert list(map(status, many)) == [200] * 10
        assert gated.called[1] == 8


@pytest.mark.parametrize(("drain_seconds", "answer"), [(PATIENCE, 200), (0.1, 503)])
def test_draining_tensors(drain_seconds: float, answer: int) -> None:
    with serving_tensors(ServerOptions(drain_seconds=drain_seconds)) as (live, gated):
        asked = [begin(live, INFER, TENSOR) for _ in range(10)]
        wait_until(lambda: taken(live) == 10 and len(gated.called) == 1)
        live.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: live.service.status == "draining")
        if answer == 200:
            assert post(f"{live.url}{INFER}", json=TENSOR).status_code == 503
        else:
            wait_until(lambda: live.service.tensors()[0]._stopping)
        gated.open.set()
        assert list(map(status, asked)) == [answer] * 10


# Answers that nobody reads.


def send_little(live: Live) -> None:
    """What nobody reads fills the buffers of connections at once."""
    wait_until(lambda: live.server.started)
    for sock in live.server.servers[0].sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def test_a_stream_that_is_not_read_is_cancelled() -> None:
    with serving(options=ServerOptions(write_seconds=0.2)) as live:
        send_little(live)
        live.backend.gate.close(after=250)
        body = {"prompt": "hello", "max_tokens": 50, "stream": True, "n": 32, "logprobs": 5}
        with begin(live, "/v1/completions", body):
            wait_until(lambda: taken(live) == 32)
            wait_until(lambda: taken(live) == 0)
            wait_until(lambda: not live.server.server_state.connections)
            live.backend.gate.open()
            live.wait_idle()
            assert live.service.language().engine.state().counts.cancelled > 0


def test_a_stream_holds_its_places_only_until_the_model_is_done() -> None:
    with serving() as live:
        send_little(live)
        body = {"prompt": "hello", "max_tokens": 50, "stream": True, "n": 32, "logprobs": 5}
        with begin(live, "/v1/completions", body) as connection:
            wait_until(lambda: live.backend.calls)
            wait_until(lambda: taken(live) == 0)
            assert live.service.language().engine.state().counts.cancelled == 0
            content = b""
            while not content.endswith(b"0\r\n\r\n"):
                content += connection.recv(2**20)
            assert content.count(b'"finish_reason":"length"') == 32


def test_answers_are_counted_by_route_and_refusals_by_reason() -> None:
    with serving() as live:
        for prompt in ("a", "a", 7, "a" * 99):
            post(f"{live.url}/v1/completions", json={"prompt": prompt})
        get(f"{live.url}/v1/nothing")
        for path in ("models", "completions"):
            httpx.request("PROPFIND", f"{live.url}/v1/{path}", timeout=PATIENCE)
        counts = live.numbers()
    total = 'http_requests_total{handler="%s",method="%s",status="%d"}'
    assert counts[total % ("/v1/completions", "POST", 200)] == 2
    assert counts[total % ("/v1/completions", "POST", 400)] == 2
    assert counts[total % ("other", "GET", 404)] == 1
    assert counts[total % ("/v1/completions", "other", 405)] == 1
    seconds = 'http_request_duration_seconds_count{handler="/v1/completions",method="POST"}'
    assert counts[seconds] == 4
    reason = 'spmd:requests_refused_total{reason="%s"}'
    assert counts[reason % "context_length_exceeded"] == counts[reason % "invalid"] == 1
    assert counts[reason % "method"] == 2 and counts[reason % "not_found"] == 1


TWO = ServerOptions(address_connections=2)
BODY = {"prompt": "hello", "max_tokens": 3, "seed": 0}


def open_connection(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE)


def ends(connection: socket.socket) -> bool:
    """Whether it ends before anything comes; it hangs otherwise, or gets a byte."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def connect_known(live: Live) -> socket.socket:
    """A connection that the server knows of, and on which nothing is sent."""
    before = set(live.server.server_state.connections)
    made = open_connection(live)
    wait_until(lambda: set(live.server.server_state.connections) - before)
    return made


@contextmanager
def two_connections(live: Live) -> Iterator[ExitStack]:
    """As many as an address may have; whatever else is entered closes with them."""
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect_known(live))
        yield stack


def refused(live: Live) -> float:
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
        told = stack.enter_context(connect_known(live))
        assert ends(stack.enter_context(open_connection(live)))
        assert refused(live) == 1
        told.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with told.makefile("rb") as file:
            assert file.readline().startswith(b"HTTP/1.1 429 ")
            assert b"connections_full" in file.read()
        assert refused(live) == 2


def test_one_that_asks_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TOLD_SECONDS", 0.05)
    with serving(options=TWO) as live, two_connections(live) as stack:
        assert ends(stack.enter_context(open_connection(live)))
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
        ServerOptions(address_connections=0)
