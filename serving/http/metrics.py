"""Metrics for Prometheus, under vLLM's names where vLLM has them, so that its dashboards fit."""

from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from spmd.serving.engine.core import Steps
from spmd.serving.engine.records import EngineState, Finished, Observer, StepRecord
from spmd.serving.http.traffic import (
    FIRST_TOKEN_SECONDS,
    REQUEST_SECONDS,
    RequestMetrics,
    Weighted,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BETWEEN_TOKENS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)  # fmt: skip
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_BATCH = tuple(2**power for power in range(15))


class Metrics(Observer):
    """What `/metrics` shows of a language model; it is the engine's observer.

    Args:
      core: what runs the model; `info` has its bandwidth and sizes.

    Attributes:
      steps: the latest ones that are done, the oldest first; of 256 requests each they take 17 MB.
    """

    def __init__(
        self, requests: RequestMetrics, core: Steps, state: Callable[[], EngineState]
    ) -> None:
        self.requests = requests
        self._core = core
        self._state = state
        self.steps: deque[StepRecord] = deque(maxlen=8192)
        self._first_token = requests.histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token",
            FIRST_TOKEN_SECONDS,
        )  # fmt: skip
        self._between = Weighted(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request", _BETWEEN_TOKENS,
            requests,
        )  # fmt: skip
        self._per_token = requests.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first",
            _BETWEEN_TOKENS,
        )
        self._prefill = requests.histogram(
            "vllm:request_prefill_time_seconds", "From the slot to the first token", REQUEST_SECONDS
        )
        self._decode = requests.histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last", REQUEST_SECONDS
        )
        self._prompt_tokens = requests.histogram(
            "vllm:request_prompt_tokens", "Tokens of a request's prompt", _TOKENS
        )
        self._generated = requests.histogram(
            "vllm:request_generation_tokens", "Tokens drawn for a request", _TOKENS
        )
        self._batch = requests.histogram(
            "vllm:iteration_tokens_total", "Rows of one step of the model", _BATCH
        )
        self._totals = [0.0] * 5  # of all steps: what `ran` adds
        requests.registry.register(self)

    # The engine's observer.

    def ran(self, step: StepRecord) -> None:
        """Notes a step; see `Observer.ran`."""
        self._batch.observe(step.rows)
        self.steps.append(step)
        added = step.rows, step.padded, step.done - step.begun, step.waited, step.gap
        self._totals = [total + one for total, one in zip(self._totals, added, strict=True)]

    def first_token(self, seconds: float) -> None:
        """Notes a request's first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, times: int) -> None:
        """Notes later tokens of requests."""
        self._between.observe(seconds, times)

    def finished(self, record: Finished) -> None:
        """Notes the end of a request."""
        self.requests.finished(record)
        self._prompt_tokens.observe(record.prompt_tokens)
        self._generated.observe(record.generated)
        if record.generated:
            self._prefill.observe(record.prefill)
            self._decode.observe(record.decode)
        if record.generated > 1:
            self._per_token.observe(record.decode / (record.generated - 1))

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read from the engine whenever Prometheus asks."""
        state = self._state()
        counts = state.counts
        yield self.requests.number(
            "vllm:kv_cache_usage_perc",
            "Share of the pages that running requests hold, 1 is all",
            state.held / state.pages,
        )
        yield self.requests.number("spmd:pages", "Pages of the pool", state.pages)
        yield self.requests.number("spmd:pages_held", "Pages of running requests", state.held)
        yield self.requests.number(
            "spmd:pages_cached", "Pages of ended requests whose tokens are known", state.cached
        )
        rows, padded, seconds, waited, gap = self._totals
        looked_up = counts.prefilled + counts.reused
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts", looked_up),
            ("vllm:generation_tokens", "Tokens drawn for requests", counts.drawn),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache", looked_up),
            ("vllm:prefix_cache_hits", "Prompt tokens that the cache held", counts.reused),
            ("vllm:num_preemptions", "Times that a request lost its pages", counts.preempted),
            ("vllm:spec_decode_num_draft_tokens", "Guesses of next tokens", counts.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Right guesses", counts.accepted),
            ("spmd:repeated_tokens", "Tokens run once more after that", counts.repeated),
            ("spmd:wasted_tokens", "Tokens drawn behind the end of a request", counts.wasted),
            ("spmd:requests_cancelled", "Requests whose reader went away", counts.cancelled),
            ("spmd:step_rows", "Rows of steps, without padding", rows),
            ("spmd:step_padded_rows", "Rows that were padding", padded),
            ("spmd:step_seconds", "How long steps took on the devices", seconds),
            ("spmd:step_wait_seconds", "How long the host waited for steps", waited),
            ("spmd:host_gap_seconds", "How long requests ran, but no step did", gap),
            ("spmd:compile", "Programs compiled", self._core.compile_total),
        ):
            yield self.requests.number(name, text, value, CounterMetricFamily)
        limits = self._core.limits
        labels = {
            "model_name": self.requests.model,
            "block_size": str(limits.page),
            "num_gpu_blocks": str(limits.groups * limits.pages),
            "enable_prefix_caching": "True",
        }
        about = "vllm:cache_config_info", "What the cache is like"
        cache = GaugeMetricFamily(*about, labels=list(labels))
        cache.add_metric(list(labels.values()), 1)
        yield cache
        fraction = self.roofline_fraction()
        if fraction is not None:
            yield self.requests.number(
                "spmd:roofline_fraction",
                "Least time of a step that only draws, by the bytes that it reads, over its time",
                fraction,
            )

    def roofline_fraction(self) -> float | None:
        """How close steps that only draw are to the limit of the memory's bandwidth, at most 1.

        It is (bytes read / bandwidth) / (seconds of a step). A step has to read all weights and the
        pages of its sequences, so the first part is the least time that it can take.

        Returns:
          None if the bandwidth is unknown or there has been no such step.
        """
        info = self._core.info
        bandwidth, weights = info.get("bandwidth"), info.get("read_weight_bytes", 0)
        # With chunks of prompts or drafts arithmetic takes longer than reading.
        drew = [x for x in list(self.steps)[-200:] if not x.chunks and x.rows == len(x.keys)]
        seconds = sum(step.done - step.begun for step in drew)
        read = sum(weights + info.get("token_bytes", 0) * step.seen for step in drew)
        if not bandwidth or not seconds or not read:
            return None
        return float(read / bandwidth / seconds)
