"""How tokens are drawn, and what ends a text: fields of a request, checked."""

from __future__ import annotations

from typing import Any

from serving.engine.backend import Sampling
from serving.errors import invalid
from serving.http.bounds import Bounds
from serving.http.fields import Fields, check_text, is_integer, show

OPEN_ZERO = -0.0
"""As the lower bound of `Fields.number`: the value has to be above zero."""

BIAS = 100
"""The largest of `logit_bias`, as with OpenAI."""

BAD_WORDS = 256
"""So many of them one request may have."""


def parse_sampling(fields: Fields, bounds: Bounds) -> Sampling:
    """How tokens are drawn.

    Raises:
      ApiError: a field does not fit.
    """
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    top_k = fields.integer("top_k", -1, 2**31 - 1) or 0
    return Sampling(
        temperature=fields.number("temperature", 1.0, 0.0, 100.0),
        top_k=max(top_k, 0),
        top_p=fields.number("top_p", 1.0, OPEN_ZERO, 1.0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, OPEN_ZERO, 100.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        seed=(seed or 0) % 2**32,
        logit_bias=_logit_bias(fields.get("logit_bias"), bounds),
    )


def _logit_bias(value: Any, bounds: Bounds) -> tuple[tuple[int, float], ...]:
    """What is added to the logits of some ids, which are strings since JSON's names are."""
    name = "logit_bias"
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid(f"{name}: an object is needed, not {show(value)}", name)
    bias: dict[int, float] = {}
    for key, added in value.items():
        is_id = key.isascii() and key.isdecimal() and len(key) < 10
        if not is_id or int(key) >= bounds.vocab_size:
            raise invalid(
                f"{name}: token ids are from 0 to {bounds.vocab_size - 1}, not {show(key)}", name
            )
        is_number = is_integer(added) or isinstance(added, float)
        if not is_number or not -BIAS <= added <= BIAS:
            raise invalid(
                f"{name}[{show(key)}]: a number from {-BIAS} to {BIAS} is needed, "
                f"not {show(added)}",
                name,
            )
        bias[int(key)] = float(added)
    return tuple(bias.items())


def parse_stops(value: Any, bounds: Bounds) -> tuple[str, ...]:
    """The stop strings of `stop`: a string or several.

    Raises:
      ApiError: it is something else, or there are too many.
    """
    stops = [] if value is None else value if isinstance(value, list) else [value]
    if len(stops) > bounds.stops:
        raise invalid(f"stop: {len(stops)} strings, {bounds.stops} are the most", "stop")
    for stop in stops:
        if not check_text(stop, "stop") or len(stop) > bounds.stop_length:
            raise invalid(
                f"stop: strings have 1 to {bounds.stop_length} characters, not {len(stop)}", "stop"
            )
    return tuple(stops)


def parse_bad_words(value: Any, bounds: Bounds) -> tuple[str, ...]:
    """The texts of `bad_words`, without the blanks that they begin with.

    Raises:
      ApiError: it is no list of words, or too long.
    """
    name = "bad_words"
    words = [] if value is None else value
    if not isinstance(words, list) or len(words) > BAD_WORDS:
        raise invalid(
            f"{name}: a list of at most {BAD_WORDS} strings is needed, not {show(value)}", name
        )
    for i, word in enumerate(words):
        if not check_text(word, f"{name}[{i}]").strip(" ") or len(word) > bounds.stop_length:
            raise invalid(
                f"{name}[{i}]: a word of at most {bounds.stop_length} characters is needed, "
                f"not {show(word)}",
                name,
            )
    return tuple(word.lstrip(" ") for word in words)
