"""A model that was loaded; a language model, with all that its requests need."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spmd.models.training.data.tokenizer import Tokenizer
from spmd.serving.engine.backend import Backend, Sampling
from spmd.serving.engine.core import Core, Steps
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.infer import Infer
from spmd.serving.errors import ApiError, ServingError
from spmd.serving.grammar.compiler import Grammars
from spmd.serving.http.chat_template import ChatTemplate
from spmd.serving.http.fields import Fields
from spmd.serving.http.limits import Bounds, ServerOptions
from spmd.serving.http.metrics import Metrics
from spmd.serving.http.protocol import DEFAULTS, read_sampling
from spmd.serving.http.traffic import RequestMetrics

Heed = Callable[[Exception], None]
"""Is told what the model raised, before clients are."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model that was loaded: a language model, a function of tensors, or both."""

    name: str  # the model's name in requests
    backend: Backend | None = None  # the language model; None if there is none in this process
    tokenizer: Tokenizer | None = None  # the language model's; None if there is none
    # ids that end a completion, beside the tokenizer's `eos_id`
    stop_ids: frozenset[int] = frozenset()
    chat_template: str | None = None  # in Jinja; None takes a plain one
    # texts that the template may use by name. `bos_token` and `eos_token` are found out from the
    # tokenizer.
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # how the model's makers draw tokens: fields of `generation_config.json`
    generation_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    infer: Infer | None = None  # the function of tensors; None if there is none
    # a thread that makes the model faster while it is served
    background: threading.Thread | None = None
    core: Steps | None = None  # what runs the language model, if that is in another process
    # reads an adapter's folder into a place, and raises a `ValueError` if it cannot
    adapt: Callable[[int, str], None] | None = None
    adapters: Sequence[str] = ()  # names of those in the first places

    @property
    def language(self) -> Backend | Steps | None:
        """The language model, wherever it is; None if there is none."""
        return self.core or self.backend


class Language:
    """A language model with its engine, chat template and metrics.

    Args:
      heed: is told what the model raised.

    Raises:
      ServingError: the tokenizer does not belong to the model, or the chat template is broken.
    """

    def __init__(
        self,
        loaded: Loaded,
        options: ServerOptions,
        requests: RequestMetrics,
        heed: Heed = lambda error: None,
    ) -> None:
        core: Steps | None = loaded.core
        if core is None and loaded.backend is not None:
            core = Core(loaded.backend, token_budget=options.token_budget, heed=heed)
        if core is None or loaded.tokenizer is None:
            raise ServingError("a language model needs a backend and a tokenizer")
        self.tokenizer = loaded.tokenizer
        self.stop_ids = loaded.stop_ids | {loaded.tokenizer.eos_id}
        # The texts of the tokens that begin and end documents have names in templates.
        ids = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        named = {n: self.tokenizer.decode([i]) for n, i in ids.items() if i is not None}
        named |= loaded.special_tokens
        self.template = ChatTemplate(loaded.chat_template, named, options.tool_format)
        config = loaded.generation_config if options.generation_config == "auto" else {}
        self.sampling = sampling_of({**config, **options.override_generation_config})
        limits = core.limits
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
            sampling=self.sampling,
        )
        self.grammars = Grammars(
            loaded.tokenizer, limits.vocab_size, self.stop_ids, options.grammar_bytes
        )
        self.metrics = Metrics(requests, core, lambda: self.engine.state())
        letter = loaded.tokenizer.encode_batch(["a"])[0].tolist()
        self.engine = Engine(core, self.decode, letter, observer=self.metrics)

        added = json.loads(self.tokenizer.spec or "{}").get("added_tokens", ())
        self.special_ids = frozenset(one["id"] for one in added if one.get("special"))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text."""
        return [found.tolist() for found in self.tokenizer.encode_batch(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """Token ids -> text.

        A model may have more ids than its tokenizer, so that its vocabulary divides evenly. Those
        have no text.
        """
        known = self.tokenizer.vocab_size
        return self.tokenizer.decode([i for i in ids if i < known])


def sampling_of(config: Mapping[str, Any]) -> Sampling:
    """How tokens are drawn by default, by a `generation_config.json`: as with vLLM.

    `do_sample` is not looked at, as vLLM does not: a request for the likeliest tokens says
    `"temperature": 0`.

    Raises:
      ServingError: a value is none that a request could have.
    """
    fields = Fields({name: config[name] for name in DEFAULTS if name in config})
    try:
        return read_sampling(fields, Sampling())
    except ApiError as error:
        raise ServingError(
            f"generation_config: {error.message}; --override_generation_config gives another value"
        ) from error
