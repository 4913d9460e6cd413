"""Metrics that do not depend on the kind of model: what HTTP was asked for, and how it ended."""

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from spmd.serving.engine.records import Finished
from spmd.serving.engine.statistics import Statistics
from spmd.serving.errors import ApiError
from spmd.serving.http.admission import Admission
from spmd.serving.http.logs import HttpExchange
from spmd.serving.http.timeline import TO_FIRST_TOKEN, phases

REQUEST_SECONDS = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
    7680,
)  # fmt: skip
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
ANSWER_SECONDS = (0.001, 0.005, 0.02, 0.1, *REQUEST_SECONDS[1:])

_REASONS = {
    400: "invalid", 401: "api_key", 404: "not_found", 405: "method", 408: "slow_body",
    413: "large_body", 415: "content_type", 499: "left", 500: "mistake",
}  # fmt: skip

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class Weighted:
    """A histogram that notes a value several times at once; only one thread may.

    Args:
      buckets: their upper bounds, ascending.
      requests: has the model and the registry.
    """

    def __init__(
        self, name: str, help_text: str, buckets: tuple[float, ...], requests: "RequestMetrics"
    ) -> None:
        self._about = name, help_text, requests.model
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        requests.registry.register(self)

    def observe(self, value: float, times: int) -> None:
        """Notes a value so many times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        """The metrics, whenever Prometheus asks."""
        name, help_text, model = self._about
        family = HistogramMetricFamily(name, help_text, labels=["model_name"])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        counts = itertools.accumulate(self._counts)
        family.add_metric([model], [*zip(bounds, counts, strict=True)], self._sum)
        yield family


class Traffic:
    """Answers by route and status, refusals by reason, and what the book says.

    Attributes:
      registry: of all metrics of the server.
      completed: the latest requests that the model completed, the oldest first.
    """

    def __init__(self, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        self._admission = admission
        self._answers = Counter(
            "http_requests_total",
            "Requests of HTTP",
            ["method", "handler", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From a request's headers to the end of its answer",
            ["method", "handler"],
            buckets=ANSWER_SECONDS,
            registry=self.registry,
        )
        self._refused = Counter(
            "spmd:requests_refused_total",
            "Requests that got an error instead of what they asked for",
            ["reason"],
            registry=self.registry,
        )
        self._parts = Histogram(
            "spmd:first_token_part_seconds", "Parts of the time to a first token",
            ["model_name", "part"], buckets=FIRST_TOKEN_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.completed: deque[HttpExchange] = deque(maxlen=500)
        self.registry.register(self)

    def answered(self, exchange: HttpExchange, method: str, route: str) -> None:
        """Notes an answer that has ended."""
        self._answers.labels(method, route, str(exchange.status)).inc()
        self._seconds.labels(method, route).observe(exchange.ended - exchange.started)
        if exchange.stream is None:
            return
        self.completed.append(exchange)
        for record in exchange.stream.records:
            for part, (start, end) in phases(exchange, record).items():
                if part in TO_FIRST_TOKEN and record.generated:
                    self._parts.labels(exchange.model, part).observe(end - start)

    def refused(self, error: ApiError) -> None:
        """Notes an error that was the answer."""
        self._refused.labels(error.code or _REASONS.get(error.status, str(error.status))).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics, whenever Prometheus asks."""
        for name, help_text, budget in (
            ("places", "Places of requests", self._admission.places),
            ("body_bytes", "Memory of requests' bodies", self._admission.bytes),
        ):
            yield GaugeMetricFamily(f"spmd:{name}", help_text, value=budget.limit)
            yield GaugeMetricFamily(f"spmd:{name}_taken", f"{help_text}, taken", value=budget.taken)


class RequestMetrics:
    """Requests of a model, be it of text or of tensors: their times and their ends.

    Args:
      model: the model's name, a label of every metric.
      counts: returns how many requests run, and how many wait.
    """

    def __init__(
        self,
        model: str,
        counts: Callable[[], tuple[int, int]],
        registry: CollectorRegistry | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self.model = model
        self._counts = counts
        self._statistics = statistics or Statistics()
        self._total = self.histogram(
            "vllm:e2e_request_latency_seconds", "Whole requests", REQUEST_SECONDS
        )
        self._queued = self.histogram(
            "vllm:request_queue_time_seconds",
            "From a request's arrival until the model begins with it",
            REQUEST_SECONDS,
        )
        self._success = Counter(
            "vllm:request_success_total",
            "Requests that ended, by the reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        # A counter that is missing until its first event breaks rate() over that event.
        for reason in ("stop", "length", "abort", "grammar", "error"):
            self._success.labels(model, reason)
        self.registry.register(self)

    def histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram of the model."""
        labels = ["model_name"]
        made = Histogram(name, help_text, labels, buckets=buckets, registry=self.registry)
        return made.labels(self.model)

    def number(
        self, name: str, help_text: str, value: float, kind: _Family = GaugeMetricFamily
    ) -> Metric:
        """A number of the model, as it is now."""
        family = kind(name, help_text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def finished(self, record: Finished) -> None:
        """Notes the end of a request."""
        self._statistics.finished(record)
        self._success.labels(self.model, record.reason).inc()
        self._total.observe(record.total)
        self._queued.observe(record.queued)

    def collect(self) -> Iterator[Metric]:
        """The metrics, whenever Prometheus asks."""
        running, waiting = self._counts()
        yield self.number("vllm:num_requests_running", "Requests with a slot", running)
        yield self.number("vllm:num_requests_waiting", "Requests without one", waiting)
        told = self._statistics
        for name, help_text, value in (
            ("calls", "Calls of a model of tensors", told.calls.count),
            ("call_seconds", "How long they took", told.calls.seconds),
            ("rows", "Rows of these calls, without padding", told.rows),
        ):
            yield self.number(f"spmd:tensor_{name}", help_text, value, CounterMetricFamily)
