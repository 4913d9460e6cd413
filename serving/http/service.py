"""What the server serves, and its status: loading, ready, draining or failed."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from models.training.data.tokenizer import Tokenizer
from serving.engine.backend import Backend
from serving.engine.batches import Batches
from serving.engine.engine import Engine
from serving.engine.infer import Infer
from serving.engine.statistics import Statistics
from serving.engine.stream import SHUTTING_DOWN, Lost
from serving.engine.workers import Workers
from serving.errors import ApiError, ServingError
from serving.grammar.compiler import Grammars
from serving.http.admission import Admission
from serving.http.bounds import Bounds
from serving.http.chat_template import ChatTemplate
from serving.http.datatypes import check_datatypes
from serving.http.fields import SHORT
from serving.http.metrics import Metrics
from serving.http.tools.formats import BY_NAME
from serving.http.traffic import RequestMetrics, Traffic

STOP_SECONDS = 10.0
"""So long calls that are under way are waited for, when their requests have failed already."""

PROCESS_LOST = "process_lost"
"""The code of what fails since a process of those that run the model was lost."""

Status = Literal["loading", "ready", "draining", "failed"]

Heed = Callable[[Exception], None]
"""Is told what the model raised, before clients are."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model that was loaded: a language model, a function of tensors, or both.

    Attributes:
      name: the model's name in requests.
      backend: the language model; None if there is none.
      tokenizer: the language model's; None if there is none.
      stop_ids: ids that end a completion, beside the tokenizer's `eos_id`.
      chat_template: in Jinja; None takes a plain one.
      special_tokens: texts that the template may use by name. `bos_token` and `eos_token` are found
        out from the tokenizer.
      infer: the function of tensors; None if there is none.
      background: a thread that makes the model faster while it is served.
    """

    name: str
    backend: Backend | None = None
    tokenizer: Tokenizer | None = None
    stop_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    infer: Infer | None = None
    background: threading.Thread | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """The server's limits and keys.

    Attributes:
      api_keys: a request needs one of them; if there are none, anybody may use the model.
      max_waiting: how many requests there may be beyond those that have slots. Those whose text is
        being tokenized count as well.
      token_budget: rows of a group in a step that has both rows that draw and chunks of prompts;
        None takes what the model's backend finds best.
      choices: the most completions that one request may ask for.
      stops: the most stop strings that one request may have.
      grammar_bytes: the largest grammar, schemas and tools included.
      tool_format: how the model writes calls of tools; None takes what its chat template tells.
      body_bytes: the largest body of a request.
      body_seconds: a body has to arrive within this time.
      bodies_bytes: how much memory all bodies together may take.
      text_threads: how many texts are tokenized at a time, of short ones and of long ones each.
      header_seconds: a client that connects has to send a request's headers within this time.
      write_seconds: an answer of which nothing is read for so long is cut off.
      connections: how many there may be.
      address_connections: how many of them may come from one address.
      stall_seconds: a call of the model that takes longer counts as hung: `/health` says 503.
      drain_seconds: how long requests may go on when the server is told to end.

    Raises:
      ServingError: a number is too small.
    """

    api_keys: tuple[str, ...] = ()
    max_waiting: int = 256
    token_budget: int | None = None
    choices: int = 32
    stops: int = 16
    grammar_bytes: int = 64 * 2**10
    tool_format: str | None = None
    body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    bodies_bytes: int = 256 * 2**20
    text_threads: int = 2
    header_seconds: float = 20.0
    write_seconds: float = 120.0
    connections: int = 4096
    address_connections: int = 1024
    stall_seconds: float = 300.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        least = {
            "max_waiting": 0, "token_budget": 1, "choices": 1, "stops": 0, "grammar_bytes": 1,
            "body_bytes": 1, "body_seconds": 0, "bodies_bytes": 1, "text_threads": 1,
            "header_seconds": 0, "write_seconds": 0, "connections": 1, "address_connections": 1,
            "stall_seconds": 0, "drain_seconds": 0,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:  # nor NaN
                raise ServingError(f"{name} is {value}; it has to be at least {low}")
        if self.tool_format is not None and self.tool_format not in BY_NAME:
            raise ServingError(
                f"tool_format is {self.tool_format!r}; it has to be one of {', '.join(BY_NAME)}"
            )


class Language:
    """A language model with its engine, chat template and metrics.

    Args:
      loaded: the model.
      options: limits and keys.
      requests: the metrics of all requests.
      heed: is told what the model raised.

    Raises:
      ServingError: the tokenizer does not belong to the model, or the chat template is broken.
    """

    def __init__(
        self,
        loaded: Loaded,
        options: Options,
        requests: RequestMetrics,
        heed: Heed = lambda error: None,
    ) -> None:
        if loaded.backend is None or loaded.tokenizer is None:
            raise ServingError("a language model needs a backend and a tokenizer")
        self.backend = loaded.backend
        self.tokenizer = loaded.tokenizer
        self.stop_ids = loaded.stop_ids | {loaded.tokenizer.eos_id}
        self.template = ChatTemplate(
            loaded.chat_template,
            {**special_tokens(loaded.tokenizer), **loaded.special_tokens},
            options.tool_format,
        )
        limits = loaded.backend.limits
        known = loaded.tokenizer.vocab_size
        if known > limits.vocab_size:
            raise ServingError(
                f"{loaded.name}: the tokenizer has {known} ids, the model {limits.vocab_size}"
            )
        self.bounds = Bounds(
            max_length=limits.longest,
            vocab_size=limits.vocab_size,
            top_logprobs=limits.top_logprobs,
            choices=min(options.choices, limits.slots + options.max_waiting),
            stops=options.stops,
        )
        self.grammars = Grammars(
            loaded.tokenizer, limits.vocab_size, self.stop_ids, options.grammar_bytes
        )
        self.metrics = Metrics(requests, loaded.backend, lambda: self.engine.state())
        self.engine = Engine(
            loaded.backend,
            self.decode,
            loaded.tokenizer.encode_batch(["a"])[0].tolist(),
            observer=self.metrics,
            token_budget=options.token_budget,
            heed=heed,
        )

    def decode(self, ids: Iterable[int]) -> str:
        """Token ids -> text.

        A model may have more ids than its tokenizer, so that its vocabulary divides evenly. Those
        have no text.
        """
        known = self.tokenizer.vocab_size
        return self.tokenizer.decode([i for i in ids if i < known])


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """The texts of the tokens that begin and end documents, under the names that templates use."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return {name: tokenizer.decode([i]) for name, i in ids.items() if i is not None}


class Service:
    """What all handlers share.

    Args:
      options: limits and keys.
      heed: is told what the model raised.

    Attributes:
      status: loading, ready, draining or failed.
      lost: why the process is about to end without having drained; None if it is not.
      loaded: the model, once it is there.
      created: when the server started, in seconds since 1970.
      admission: the book of all requests.
      traffic: the metrics.
      statistics: what the model has done since the start.
      batches: makes calls of the model of tensors; None if there is none.
      grammars: what compiles the grammars of requests.
    """

    def __init__(self, options: Options | None = None, heed: Heed = lambda error: None) -> None:
        self.options = options or Options()
        self.status: Status = "loading"
        self.lost: str | None = None
        self._heed = heed
        self.loaded: Loaded | None = None
        self.created = int(time.time())
        self.admission = Admission(self.options.bodies_bytes)
        self.traffic = Traffic(self.admission)
        # A long text takes seconds, in which short ones must not wait.
        threads = self.options.text_threads
        self._short = Workers("short texts", threads)
        self._long = Workers("long texts", threads)
        self.grammars = Workers("grammars")  # those of strangers take seconds, too
        self.statistics = Statistics()
        self._tensors: Workers | None = None
        self.batches: Batches | None = None
        self._language: Language | None = None
        for workers in (self._short, self._long, self.grammars):
            workers.start()

    def become_ready(self, loaded: Loaded) -> None:
        """Serves a model from now on.

        Raises:
          ServingError: it cannot be served.
        """
        if loaded.backend is None and loaded.infer is None:
            raise ServingError(f"{loaded.name}: neither a language model nor one of tensors")
        if loaded.infer is not None:
            check_datatypes(loaded.infer)
        requests = RequestMetrics(loaded.name, self._counts, self.traffic.registry, self.statistics)
        slots = 0
        if loaded.backend is not None:
            self._language = Language(loaded, self.options, requests, self._heed)
            self._language.engine.start()
            slots += loaded.backend.limits.slots
        if loaded.infer is not None:
            # `Infer` is called by one thread at a time.
            self._tensors = Workers("tensors", finished=requests.finished, heed=self._heed)
            self._tensors.start()
            self.batches = Batches(loaded.infer, self.statistics)
            slots += 1
        self.admission.places.limit = slots + self.options.max_waiting
        self.loaded = loaded
        if self.status == "loading":
            self.status = "ready"

    def problem(self) -> str | None:
        """Why requests are not served now; None if they are."""
        if self.lost is not None:
            return self.lost
        if self.status == "draining":
            return SHUTTING_DOWN
        if self.loaded is None:
            return "the model is still loading" if self.status == "loading" else "loading failed"
        return self.broken()

    def broken(self) -> str | None:
        """Why the process has to be started anew; None if it need not."""
        if self.lost is not None:
            return self.lost
        if self._language is not None and self._language.engine.error is not None:
            return self._language.engine.error
        stalled = max((model.stalled() for model in self._models), default=0.0)
        if stalled > self.options.stall_seconds:
            return f"a call of the model has been under way for {stalled:.0f} seconds"
        return None

    def require(self, model: str | None = None) -> Loaded:
        """The model, if it is ready.

        Args:
          model: the name that the request asks for; None accepts any.

        Raises:
          ApiError: it is not ready, or has another name.
        """
        if self.loaded is None or self.lost is not None or self.status == "draining":
            problem = self.problem()
            code = self.status if self.lost is None else PROCESS_LOST
            raise ApiError(503, f"not now: {problem}", code=code, retry_after=5)
        self.check_name(self.loaded, model)
        return self.loaded

    def check_name(self, loaded: Loaded, model: str | None) -> None:
        """Checks that a request asks for the model that there is; None accepts any.

        Raises:
          ApiError: it has another name.
        """
        if model is not None and model != loaded.name:
            raise ApiError(
                404,
                f"model: there is no {model!r} here; this server has {loaded.name!r}",
                param="model",
                code="model_not_found",
            )

    def language(self) -> Language:
        """The language model.

        Raises:
          ApiError: there is none.
        """
        if self._language is None:
            raise ApiError(404, "this is no language model: use /v2/models/.../infer")
        return self._language

    def tensors(self) -> Workers:
        """What runs the model of tensors.

        Raises:
          ApiError: there is none.
        """
        if self._tensors is None:
            raise ApiError(404, "this is no model of tensors: use /v1/completions")
        return self._tensors

    def texts(self, size: int) -> Workers:
        """What reads a body of so many bytes: long ones have threads of their own."""
        return self._short if size <= SHORT else self._long

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""
        engine_idle = self._language is None or self._language.engine.idle
        return not self.admission.places.taken and engine_idle

    def drain(self) -> None:
        """Refuses new requests from now on; those that have a place go on to their ends."""
        self.status = "draining"

    def lose(self, why: str) -> None:
        """Ends all requests at once, and refuses new ones: the model will not answer any more.

        Args:
          why: what all of them are told.
        """
        self.lost, self.status = why, "failed"
        for part in self._parts:
            part.stop(timeout=0, why=functools.partial(Lost, why))

    def stop(self) -> None:
        """Ends all threads; requests that are not finished fail at once."""
        self.drain()
        for part in self._parts:
            part.stop(timeout=0)
        end = time.monotonic() + STOP_SECONDS
        for part in self._parts:
            part.stop(timeout=max(0.0, end - time.monotonic()))

    @property
    def ended(self) -> bool:
        """Whether no thread runs: a call may take longer than `stop` waits."""
        background = None if self.loaded is None else self.loaded.background
        if background is not None and background.is_alive():
            return False
        return all(part.ended for part in self._parts)

    @property
    def _parts(self) -> list[Engine | Workers]:
        return [self._short, self._long, self.grammars, *self._models]

    @property
    def _models(self) -> list[Engine | Workers]:
        engine = None if self._language is None else self._language.engine
        return [model for model in (engine, self._tensors) if model is not None]

    def _counts(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        tensors = self._tensors
        running, waiting = (0, 0) if tensors is None else (tensors.running, tensors.waiting)
        if self._language is not None:
            state = self._language.engine.state()
            running, waiting = running + state.running, waiting + state.waiting
        return running, waiting
