"""OpenTelemetry's traces: a span of each request, and in it those of its completions.

Of each completion there are `queue` (until it has a slot), `prefill` (until its first token) and
`decode` (until its last). They are made of the engine's record when the answer has ended: while it
is under way, tracing costs nothing.

Only this module imports OpenTelemetry's libraries, and it is imported if traces are asked for.
"""

import os
import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from spmd.serving.engine.records import Finished
from spmd.serving.errors import ServingError
from spmd.serving.http.logs import HttpExchange

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ServingError(
        f'traces need OpenTelemetry\'s libraries (pip install "spmd[otlp]"): {error}'
    ) from error

TRACES = "/v1/traces"
"""Where collectors take traces over HTTP, as OpenTelemetry's specification says."""

NANOSECONDS = 1e9


class Tracing:
    """Sends spans to a collector, in batches, on a thread of its own.

    The libraries' own environment variables hold, too: `OTEL_SERVICE_NAME`,
    `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`.

    Args:
      endpoint: of the collector; without a path it gets `/v1/traces`.
    """

    def __init__(self, endpoint: str) -> None:
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + TRACES
        name = os.environ.get("OTEL_SERVICE_NAME", "spmd")
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("spmd.serving")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, exchange: HttpExchange, headers: Mapping[str, str]) -> Span:
        """Begins the span of a request, in the trace that its `traceparent` names, if any."""
        return self._tracer.start_span(
            exchange.method,
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": exchange.method,
                "url.path": exchange.path,
                "client.address": exchange.client,
                "http.request.header.x-request-id": [exchange.request_id],
            },
        )

    def end(self, span: Span, exchange: HttpExchange) -> str:
        """Ends a request's span, and makes those of its completions; returns its trace's id."""
        span.set_attribute("http.response.status_code", exchange.status)
        if exchange.status != 404:  # strangers should not make up names of spans
            span.update_name(f"{exchange.method} {exchange.path}")
        records = exchange.stream.records if exchange.stream else []
        if exchange.model is not None:
            span.set_attributes(
                {
                    "gen_ai.request.model": exchange.model,
                    "gen_ai.response.finish_reasons": [record.reason for record in records],
                    "gen_ai.usage.input_tokens": exchange.prompt_tokens,
                    "gen_ai.usage.output_tokens": exchange.completion_tokens,
                }
            )
        if exchange.status >= 500 or any(record.reason == "error" for record in records):
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        since_1970 = time.time() - time.monotonic()
        for record in records:
            for name, start, end, attributes in _phases(record):
                part = self._tracer.start_span(
                    name,
                    context=inside,
                    start_time=round((since_1970 + start) * NANOSECONDS),
                    attributes={"spmd.choice": record.choice, **attributes},
                )
                part.end(round((since_1970 + end) * NANOSECONDS))
        span.end()
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Sends what has not been sent, if the collector takes it."""
        self._provider.shutdown()


def _phases(record: Finished) -> Iterator[tuple[str, float, float, Mapping[str, int]]]:
    """What a completion went through: (name, start, end, attributes), by the engine's clock."""
    arrived = record.ended - record.total
    placed = arrived + record.queued
    first = placed + record.prefill
    yield "queue", arrived, placed, {}
    if placed < record.ended:
        yield "prefill", placed, first, {"gen_ai.usage.input_tokens": record.prompt_tokens}
    if record.generated:
        yield "decode", first, record.ended, {"gen_ai.usage.output_tokens": record.generated}
