"""OpenAI's requests for completions and chat completions, checked field by field.

Unknown fields are ignored, and named in a header of the answer. Fields that would change the result
but are not supported are refused by name: an answer that silently left them out would be wrong.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.serving.engine.backend import Sampling
from spmd.serving.errors import invalid
from spmd.serving.http.fields import Fields, check_text, is_integer, show
from spmd.serving.http.limits import Bounds
from spmd.serving.http.messages import Message, parse_messages
from spmd.serving.http.structure import Structure, parse_structure
from spmd.serving.http.tools.ask import Tools, parse_tools


def _prompts(value: Any, bounds: Bounds) -> tuple[str | tuple[int, ...], ...]:
    """The prompts of `prompt`: a text, a list of texts, a list of ids, or a list of such lists."""
    if isinstance(value, str):
        return (check_text(value, "prompt"),)
    if not isinstance(value, list) or not value:
        raise invalid(
            "prompt: a string, a list of strings, a list of token ids or a list of such lists "
            f"is needed, not {'nothing' if value is None else show(value)}"
        )
    if is_integer(value[0]):
        return (token_ids(value, "prompt", bounds),)
    if len(value) > bounds.choices:
        raise invalid(f"prompt: {len(value)} prompts, {bounds.choices} are the most")
    return tuple(_prompt(one, i, bounds) for i, one in enumerate(value))


def _prompt(value: Any, index: int, bounds: Bounds) -> str | tuple[int, ...]:
    name = f"prompt[{index}]"
    if isinstance(value, str):
        return check_text(value, name)
    if not isinstance(value, list) or not value:
        raise invalid(f"{name}: a string or token ids are needed, not {show(value)}")
    return token_ids(value, name, bounds)


def token_ids(value: Any, name: str, bounds: Bounds) -> tuple[int, ...]:
    """A list of token ids of the model."""
    if not isinstance(value, list):
        raise invalid(f"{name}: a list of token ids is needed, not {show(value)}")
    # Looking at each of millions of ids takes long, too.
    if len(value) > max(bounds.max_length, bounds.vocab_size):
        raise invalid(
            f"{name}: {len(value)} token ids; this model's maximum context length is "
            f"{bounds.max_length} tokens",
            code="context_length_exceeded",
        )
    for i, one in enumerate(value):
        if not is_integer(one) or not 0 <= one < bounds.vocab_size:
            raise invalid(
                f"{name}[{i}]: token ids are integers from 0 to {bounds.vocab_size - 1}, "
                f"not {show(one)}"
            )
    return tuple(value)


OPEN_ZERO = -0.0
"""As the lower bound of `Fields.number`: the value has to be above zero."""

BIAS = 100
"""The largest of `logit_bias`, as with OpenAI."""

BAD_WORDS = 256
"""So many of them one request may have."""


def _logit_bias(value: Any, bounds: Bounds) -> tuple[tuple[int, float], ...]:
    """What is added to the logits of some ids, which are strings since JSON's names are."""
    name = "logit_bias"
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid(f"{name}: an object is needed, not {show(value)}")
    bias: dict[int, float] = {}
    for key, added in value.items():
        is_id = key.isascii() and key.isdecimal() and len(key) < 10
        if not is_id or int(key) >= bounds.vocab_size:
            raise invalid(
                f"{name}: token ids are from 0 to {bounds.vocab_size - 1}, not {show(key)}"
            )
        is_number = is_integer(added) or isinstance(added, float)
        if not is_number or not -BIAS <= added <= BIAS:
            raise invalid(
                f"{name}[{show(key)}]: a number from {-BIAS} to {BIAS} is needed, not {show(added)}"
            )
        bias[int(key)] = float(added)
    return tuple(bias.items())


def _stops(value: Any, bounds: Bounds) -> tuple[str, ...]:
    """The stop strings of `stop`: a string or several."""
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > bounds.stops:
        raise invalid(f"stop: {len(stops)} strings, {bounds.stops} are the most")
    for stop in stops:
        if not check_text(stop, "stop") or len(stop) > bounds.stop_length:
            raise invalid(
                f"stop: strings have 1 to {bounds.stop_length} characters, not {len(stop)}"
            )
    return tuple(stops)


def _bad_words(value: Any, bounds: Bounds) -> tuple[str, ...]:
    """The texts of `bad_words`, without the blanks that they begin with."""
    name = "bad_words"
    words = [] if value is None else value
    if not isinstance(words, list) or len(words) > BAD_WORDS:
        raise invalid(f"{name}: a list of at most {BAD_WORDS} strings is needed, not {show(value)}")
    for i, word in enumerate(words):
        if not check_text(word, f"{name}[{i}]").strip(" ") or len(word) > bounds.stop_length:
            raise invalid(
                f"{name}[{i}]: a word of at most {bounds.stop_length} characters is needed, "
                f"not {show(word)}"
            )
    return tuple(word.lstrip(" ") for word in words)


COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

Values = Mapping[str, tuple[Any, ...]]

# What would change an answer and is not served -> values that change nothing, which clients may
# send all the same. OpenAI's fields, vLLM's, and what other servers call things that have another
# name here. docs/serving_requests.md lists all of them.
_NEVER = (
    "adapter_id", "audio", "do_sample", "ebnf", "ec_transfer_params", "grammar",
    "json_schema", "kv_transfer_params", "logprob_token_ids", "lora_path", "max_new_tokens",
    "n_predict", "regex", "repetition_detection", "thinking", "truncate", "truncate_prompt_tokens",
    "truncation_side", "web_search_options",
)  # fmt: skip
_OFF = (
    "include_stop_str_in_output", "no_stop_trim", "return_prompt_text",
    "return_tokens_as_token_ids", "use_beam_search", "watermarking",
)  # fmt: skip
REFUSED: Values = {
    **dict.fromkeys(_NEVER, ()),
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(("documents", "functions", "prompt_embeds"), ([],)),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"), ({},)),
    **dict.fromkeys(("length_penalty", "num_beams", "typical_p"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "routed_experts_prompt_start"), (0,)),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "verbosity": ("medium",),
}
REFUSED_IN_COMPLETIONS: Values = {
    **dict.fromkeys(("enable_thinking", "reasoning_effort"), ()),
    "chat_template_kwargs": ({},),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
REFUSED_IN_CHATS: Values = {
    "add_special_tokens": (False,),
    "chat_template": ("",),
    "echo": (False,),
}

NO_EFFECT = frozenset({
    "metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "request_id", "return_mm_kwargs", "return_token_offsets",
    "safety_identifier", "service_tier", "session_id", "store", "stream_interval",
})  # fmt: skip
"""Fields of OpenAI's and vLLM's clients that change no answer: no `Warning` names them."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """What requests for completions and for chats have in common."""

    model: str | None  # the name that was asked for; None accepts any
    max_tokens: int | None  # None draws as many tokens as there is room for
    min_tokens: int  # so many are drawn before the completion may end
    sampling: Sampling  # how tokens are drawn; its seed is `seed`, or 0 if that is None
    seed: int | None  # None takes a new seed for each request
    n: int  # completions for each prompt
    stops: tuple[str, ...]  # strings that end a completion
    stop_ids: frozenset[int]  # ids that end a completion, beside the model's own
    skip_special: bool  # whether special tokens have no text
    token_ids: bool  # whether the answer has the ids of the prompt and of the drawn tokens
    ignore_eos: bool  # whether the model's own stop ids do not end it
    allowed_ids: tuple[int, ...]  # the ids that may be drawn; none are all
    bad_words: tuple[str, ...]  # texts that must not come up
    structure: Structure | None  # what the text has to be; None for anything
    logprobs: int | None  # alternatives to report with each token; None for no log-probabilities
    # alternatives to report with each token of the prompt; None for no log-probabilities of the
    # prompt
    prompt_logprobs: int | None
    stream: bool  # whether to answer with server-sent events
    include_usage: bool  # whether the last event of a stream has the token counts
    usage_always: bool  # whether every event has them
    user: str  # the name of the end user, as the request gives it
    salt: str  # what requests have in common that may use each other's cached prompts
    priority: int  # of the requests of its client, those with the lowest are first
    # names of fields that have no meaning here
    ignored: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)


@dataclasses.dataclass(frozen=True)
class CompletionAsk(Ask):
    """A request to `/v1/completions`."""

    prompts: tuple[str | tuple[int, ...], ...]  # texts or token ids
    echo: bool  # whether the answer begins with the prompt
    special: bool  # whether what the tokenizer itself puts before a text is put there


@dataclasses.dataclass(frozen=True)
class ChatAsk(Ask):
    """A request to `/v1/chat/completions`."""

    messages: tuple[Message, ...]  # as templates want them
    generation_prompt: bool  # whether the assistant's turn is opened at the end
    continues: bool  # whether the last message goes on instead: the prompt ends with its text
    tools: Tools | None  # what the model may call; None for nothing
    arguments: Mapping[str, Any]  # for the chat template, by name
    # how much to think; None is the template's own choice, "none" not at all
    effort: str | None
    thoughts: bool  # whether the answer shows them
    budget: int | None  # the most tokens of a thought; None is any number


def parse_completion(body: Mapping[str, Any], bounds: Bounds) -> CompletionAsk:
    """Checks a request for completions.

    Args:
      bounds: the most that it may ask for.

    Raises:
      ApiError: a field does not fit; the error has its name.
    """
    fields = Fields(body)
    refuse(fields, {**REFUSED, **REFUSED_IN_COMPLETIONS})
    prompts = _prompts(fields.get("prompt"), bounds)
    max_tokens = fields.integer("max_tokens", 0, bounds.max_length)
    ask = CompletionAsk(
        **_common(fields, bounds, len(prompts)),
        max_tokens=COMPLETION_TOKENS if max_tokens is None else max_tokens,
        logprobs=_logprobs(fields, "logprobs", bounds),
        prompts=prompts,
        echo=fields.flag("echo"),
        special=fields.flag("add_special_tokens", True),
    )
    best_of = fields.integer("best_of", 1, bounds.choices)
    if best_of not in (None, ask.n):
        raise invalid("best_of: not served; leave it out")
    return dataclasses.replace(ask, ignored=_ignored(fields))


def parse_chat(body: Mapping[str, Any], bounds: Bounds) -> ChatAsk:
    """Checks a request for chat completions.

    Args:
      bounds: the most that it may ask for.

    Raises:
      ApiError: a field does not fit; the error has its name.
    """
    fields = Fields(body)
    refuse(fields, {**REFUSED, **REFUSED_IN_CHATS})
    limits = [
        fields.integer(name, 1, bounds.max_length)
        for name in ("max_completion_tokens", "max_tokens")
    ]
    top = _logprobs(fields, "top_logprobs", bounds)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        raise invalid("top_logprobs: needs logprobs to be true")
    ask = ChatAsk(
        **_common(fields, bounds, 1),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        logprobs=(top or 0) if wanted else None,
        messages=parse_messages(fields.get("messages")),
        continues=fields.flag("continue_final_message"),
        generation_prompt=fields.flag(
            "add_generation_prompt", not fields.flag("continue_final_message")
        ),
        tools=parse_tools(fields),
        arguments=_arguments(fields),
        effort=fields.get("reasoning_effort"),
        thoughts=fields.flag("include_reasoning", True),
        budget=fields.integer("thinking_token_budget", -1, bounds.max_length),
    )
    if ask.effort is not None and ask.effort not in EFFORTS:
        needed = f"one of {', '.join(EFFORTS)} is needed"
        raise invalid(f"reasoning_effort: {needed}, not {show(ask.effort)}")
    budget = None if ask.budget == -1 else ask.budget
    if budget is not None and ask.allowed_ids:
        raise invalid("thinking_token_budget: not together with allowed_token_ids")
    if ask.continues and (ask.generation_prompt or not ask.messages[-1]["content"].strip()):
        raise invalid(
            "continue_final_message: needs a text in the last message, and no add_generation_prompt"
        )
    structure = ask.structure
    if ask.tools is not None and structure is not None and structure.kind != "json":
        raise invalid(f"{structure.place}: not together with tools")
    return dataclasses.replace(ask, budget=budget, ignored=_ignored(fields))


ARGUMENTS_BYTES = 4096
"""Of `chat_template_kwargs`, as JSON: switches, not documents."""


def _arguments(fields: Fields) -> dict[str, Any]:
    """What the chat template gets, by name; `enable_thinking` may stand in the request itself."""
    name = "chat_template_kwargs"
    given = fields.get(name) or {}
    if not isinstance(given, dict):
        raise invalid(f"{name}: an object is needed, not {show(given)}")
    if len(json.dumps(given)) > ARGUMENTS_BYTES:
        raise invalid(f"{name}: more than {ARGUMENTS_BYTES} bytes of JSON")
    if fields.get("enable_thinking") is not None:
        return {"enable_thinking": fields.flag("enable_thinking"), **given}
    return given


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _ignored(fields: Fields) -> tuple[str, ...]:
    return tuple(name for name in fields.left() if name not in NO_EFFECT)


def refuse(
    fields: Fields, table: Values, why: str = "not served; leave it out", place: str = ""
) -> None:
    """Refuses fields of which the answer would not heed what they say.

    Args:
      table: name -> the values that change nothing.
      place: where in the request these fields are; empty for the request itself.

    Raises:
      ApiError: a field has another value; the error has its name.
    """
    for name, harmless in table.items():
        value = fields.get(name)
        if value is not None and not any(value == one for one in harmless):
            name = f"{place}{name}"
            raise invalid(f"{name}: {why}", code="unsupported_parameter")


def _common(fields: Fields, bounds: Bounds, prompts: int) -> dict[str, Any]:
    """The fields of `Ask` that both kinds of requests read in the same way."""
    n = fields.integer("n", 1, bounds.choices) or 1
    if n * prompts > bounds.choices:
        raise invalid(
            f"n: {n} completions of {prompts} prompts are {n * prompts}; "
            f"one request may ask for {bounds.choices}"
        )
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    stream = fields.flag("stream")
    include_usage, usage_always = _usage(fields, stream)
    structure = parse_structure(fields)
    allowed = token_ids(fields.get("allowed_token_ids") or [], "allowed_token_ids", bounds)
    if allowed and structure is not None:
        raise invalid(f"allowed_token_ids: not together with {structure.place}")
    prompt_logprobs = _logprobs(fields, "prompt_logprobs", bounds)
    if prompt_logprobs is not None and stream:
        raise invalid("prompt_logprobs: not together with stream")
    return {
        "model": fields.text("model") or None,
        "sampling": dataclasses.replace(
            read_sampling(fields, bounds.sampling),
            seed=(seed or 0) % 2**32,
            logit_bias=_logit_bias(fields.get("logit_bias"), bounds),
        ),
        "seed": None if seed is None else seed % 2**32,
        "n": n,
        "stops": _stops(fields.get("stop"), bounds),
        "stop_ids": frozenset(
            token_ids(fields.get("stop_token_ids") or [], "stop_token_ids", bounds)
        ),
        "skip_special": fields.flag("skip_special_tokens", True),
        "token_ids": fields.flag("return_token_ids"),
        "salt": fields.text("cache_salt"),
        "priority": fields.integer("priority", -(2**31), 2**31 - 1) or 0,
        "ignore_eos": fields.flag("ignore_eos"),
        "min_tokens": fields.integer("min_tokens", 0, bounds.max_length) or 0,
        "allowed_ids": allowed,
        "bad_words": _bad_words(fields.get("bad_words"), bounds),
        "structure": structure,
        "prompt_logprobs": prompt_logprobs,
        "stream": stream,
        "include_usage": include_usage,
        "usage_always": usage_always,
        "user": fields.text("user"),
    }


DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of a request whose defaults a model may bring along."""


def read_sampling(fields: Fields, default: Sampling) -> Sampling:
    """How tokens are drawn, but for the seed; what is absent of `DEFAULTS` is as in `default`."""
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    penalty = fields.number("repetition_penalty", default.repetition_penalty, OPEN_ZERO, 100.0)
    return Sampling(
        temperature=fields.number("temperature", default.temperature, 0.0, 100.0),
        top_k=default.top_k if top_k is None else max(top_k, 0),
        top_p=fields.number("top_p", default.top_p, OPEN_ZERO, 1.0),
        min_p=fields.number("min_p", default.min_p, 0.0, 1.0),
        repetition_penalty=penalty,
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
    )


def _logprobs(fields: Fields, name: str, bounds: Bounds) -> int | None:
    if isinstance(fields.get(name), bool):
        raise invalid(f"{name}: an integer is needed, not {show(fields.get(name))}")
    return fields.integer(name, 0, bounds.top_logprobs)


def _usage(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """(whether the last event of a stream has token counts, whether every event has them)."""
    options = fields.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise invalid(f"stream_options: an object is needed, not {show(options)}")
    if not stream:
        raise invalid("stream_options: only together with stream")
    wanted = Fields(options).flag("include_usage")
    return wanted, Fields(options).flag("continuous_usage_stats") and wanted


def seeds(ask: Ask, fresh: int) -> Sequence[int]:
    """The seed of each of a prompt's `n` completions: consecutive, so that they differ.

    Args:
      fresh: a random seed, for requests without one.
    """
    first = fresh if ask.seed is None else ask.seed
    return [(first + i) % 2**32 for i in range(ask.n)]
