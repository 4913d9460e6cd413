"""What the server serves, and its status: loading, ready, draining or failed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Literal

from models.training.data.tokenizer import Tokenizer
from serving.engine.backend import Backend
from serving.engine.engine import Engine
from serving.engine.infer import Infer
from serving.errors import ApiError, ServingError
from serving.http.chat_template import ChatTemplate
from serving.http.datatypes import check_datatypes
from serving.http.metrics import Metrics
from serving.http.protocol import Bounds

Status = Literal["loading", "ready", "draining", "failed"]


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
    """

    name: str
    backend: Backend | None = None
    tokenizer: Tokenizer | None = None
    stop_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    infer: Infer | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """The server's limits and keys.

    Attributes:
      api_keys: a request needs one of them; if there are none, anybody may use the model.
      max_waiting: how many requests there may be beyond those that have slots.
      token_budget: rows of a group in a step that has both rows that draw and chunks of prompts;
        None takes what the model's backend finds best.
      choices: the most completions that one request may ask for.
      stops: the most stop strings that one request may have.
      body_bytes: the largest body of a request.
      body_seconds: a body has to arrive within this time.
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
    body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    stall_seconds: float = 300.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        least = {
            "max_waiting": 0, "token_budget": 1, "choices": 1, "stops": 0, "body_bytes": 1,
            "body_seconds": 0, "stall_seconds": 0, "drain_seconds": 0,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not value >= low:  # nor NaN
                raise ServingError(f"{name} is {value}; it has to be at least {low}")


class Language:
    """A language model with its engine, chat template and metrics.

    Args:
      loaded: the model.
      options: limits and keys.

    Raises:
      ServingError: the tokenizer does not belong to the model, or the chat template is broken.
    """

    def __init__(self, loaded: Loaded, options: Options) -> None:
        if loaded.backend is None or loaded.tokenizer is None:
            raise ServingError("a language model needs a backend and a tokenizer")
        self.backend = loaded.backend
        self.tokenizer = loaded.tokenizer
        self.stop_ids = loaded.stop_ids | {loaded.tokenizer.eos_id}
        self.template = ChatTemplate(
            loaded.chat_template, {**special_tokens(loaded.tokenizer), **loaded.special_tokens}
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
        self.metrics = Metrics(loaded.name, loaded.backend, lambda: self.engine.state())
        self.engine = Engine(
            loaded.backend,
            self.decode,
            loaded.tokenizer.encode_batch(["a"])[0].tolist(),
            observer=self.metrics,
            max_waiting=options.max_waiting,
            token_budget=options.token_budget,
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

    Attributes:
      status: loading, ready, draining or failed.
      loaded: the model, once it is there.
      created: when the server started, in seconds since 1970.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.status: Status = "loading"
        self.loaded: Loaded | None = None
        self.created = int(time.time())
        self._language: Language | None = None

    def become_ready(self, loaded: Loaded) -> None:
        """Serves a model from now on.

        Raises:
          ServingError: it cannot be served.
        """
        if loaded.backend is None and loaded.infer is None:
            raise ServingError(f"{loaded.name}: neither a language model nor one of tensors")
        if loaded.infer is not None:
            check_datatypes(loaded.infer)
        if loaded.backend is not None:
            self._language = Language(loaded, self.options)
            self._language.engine.start()
        self.loaded = loaded
        if self.status == "loading":
            self.status = "ready"

    def problem(self) -> str | None:
        """Why requests are not served now; None if they are."""
        if self.status == "draining":
            return "the server is shutting down"
        if self.loaded is None:
            return "the model is still loading" if self.status == "loading" else "loading failed"
        return self.broken()

    def broken(self) -> str | None:
        """Why the process has to be started anew; None if it need not."""
        if self._language is None:
            return None
        engine = self._language.engine
        if engine.error is not None:
            return engine.error
        stalled = engine.stalled()
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
        if self.loaded is None or self.status == "draining":
            problem = self.problem()
            raise ApiError(503, f"not now: {problem}", code=self.status, retry_after=5)
        if model is not None and model != self.loaded.name:
            raise ApiError(
                404,
                f"model: there is no {model!r} here; this server has {self.loaded.name!r}",
                param="model",
                code="model_not_found",
            )
        return self.loaded

    def language(self) -> Language:
        """The language model, if it is ready.

        Raises:
          ApiError: it is not ready, or there is none.
        """
        loaded = self.require()
        if self._language is None:
            raise ApiError(404, f"{loaded.name} is no language model: use /v2/models/.../infer")
        return self._language

    @property
    def metrics(self) -> Metrics | None:
        """The language model's metrics; None if there is none."""
        return None if self._language is None else self._language.metrics

    @property
    def idle(self) -> bool:
        """Whether the engine has no requests."""
        return self._language is None or self._language.engine.idle

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.status = "draining"
        if self._language is not None:
            self._language.engine.drain()

    def stop(self) -> None:
        """Ends the engine; requests that are not finished fail."""
        self.drain()
        if self._language is not None:
            self._language.engine.stop()
