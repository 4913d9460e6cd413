"""Traces as a collector gets them; where none are asked for, they need no libraries."""

import gzip
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

from spmd.serving.errors import ServingError
from spmd.serving.http.limits import HttpOptions
from spmd.serving.http.server import Server
from spmd.serving.http.service import Service
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, get, post, serving

ASK = {"prompt": "hello", "max_tokens": 8, "seed": 0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

needs_libraries = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None,
    reason="OpenTelemetry is not installed: pip install '.[otlp]'",
)


class Collector(NamedTuple):
    """What was sent, and where to."""

    endpoint: str
    spans: list[Any]
    resources: list[dict[str, Any]]
    paths: list[str]


def attributes(message: Any) -> dict[str, Any]:
    found = {}
    for one in message.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = (
            [item.string_value for item in value.values] if kind == "array_value" else value
        )
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []
    resources: list[Any] = []
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            paths.append(self.path)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resources.append(attributes(group.resource))
                for scope in group.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield Collector(endpoint, spans, resources, paths)
        finally:
            server.shutdown()
            thread.join()


def tracing(collector: Collector, path: str = "") -> HttpOptions:
    return HttpOptions(otlp_endpoint=collector.endpoint + path)


@needs_libraries
@pytest.mark.parametrize("stream", [False, True])
def test_the_spans_of_a_request(stream: bool) -> None:
    with collecting() as collector, serving(http=tracing(collector)) as live:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "abc"}
        post(f"{live.url}/v1/completions", json={**ASK, "n": 2, "stream": stream}, headers=headers)
    assert set(collector.paths) == {"/v1/traces"}
    assert all(resource["service.name"] == "spmd" for resource in collector.resources)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    (request,) = (span for span in collector.spans if span.parent_span_id.hex() == PARENT)
    assert request.name == "POST /v1/completions"
    assert request.kind == request.SPAN_KIND_SERVER
    assert attributes(request) == {
        "http.request.method": "POST", "url.path": "/v1/completions", "client.address": "127.0.0.1",
        "http.request.header.x-request-id": ["abc"], "http.response.status_code": 200,
        "gen_ai.request.model": MODEL, "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 16,
    }  # fmt: skip
    inner = [span for span in collector.spans if span.parent_span_id == request.span_id]
    assert len(inner) == len(collector.spans) - 1 == 6
    for choice in (0, 1):
        mine = [span for span in inner if attributes(span)["spmd.choice"] == choice]
        assert [span.name for span in mine] == ["queue", "prefill", "decode"]
        queue, prefill, decode = mine
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        assert decode.start_time_unix_nano <= decode.end_time_unix_nano
        assert attributes(prefill)["gen_ai.usage.input_tokens"] == 5
        assert attributes(decode)["gen_ai.usage.output_tokens"] == 8


@needs_libraries
def test_requests_without_completions() -> None:
    """Errors have a span, probes have none, and each request without a parent has its own trace."""
    with collecting() as collector, serving(http=tracing(collector, "/here")) as live:
        get(f"{live.url}/health")
        get(f"{live.url}/no/such", headers={"traceparent": "nonsense"})
        post(f"{live.url}/v1/completions", json={"prompt": 1.5})
    assert set(collector.paths) == {"/here"}
    missing, refused = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert missing.trace_id != refused.trace_id
    assert missing.name == "GET"  # strangers do not make up names of spans
    assert attributes(missing)["http.response.status_code"] == 404
    assert refused.name == "POST /v1/completions"
    assert attributes(refused)["http.response.status_code"] == 400


@needs_libraries
def test_a_request_that_fails() -> None:
    broken = FakeBackend(fail_after=0)
    with collecting() as collector, serving(broken, http=tracing(collector)) as live:
        assert post(f"{live.url}/v1/completions", json={**ASK, "stream": True}).status_code == 200
    (request,) = (span for span in collector.spans if not span.parent_span_id)
    assert request.status.code == request.status.STATUS_CODE_ERROR
    assert attributes(request)["gen_ai.response.finish_reasons"] == ["error"]


def test_without_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "spmd.serving.http.tracing", raising=False)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    Server(Service())
    with pytest.raises(
        ServingError, match=r'need OpenTelemetry\'s libraries \(pip install "spmd\[otlp'
    ):
        Server(Service(), http=HttpOptions(otlp_endpoint="http://localhost:4318"))
