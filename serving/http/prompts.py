"""Prompts and other token ids of a request, checked."""

from __future__ import annotations

from typing import Any

from serving.errors import invalid
from serving.http.bounds import Bounds
from serving.http.fields import check_text, is_integer, show


def parse_prompts(value: Any, bounds: Bounds) -> tuple[str | tuple[int, ...], ...]:
    """The prompts of `prompt`: a text, a list of texts, a list of ids, or a list of such lists.

    Raises:
      ApiError: it is none of these.
    """
    if isinstance(value, str):
        return (check_text(value, "prompt"),)
    if not isinstance(value, list) or not value:
        raise invalid(
            "prompt: a string, a list of strings, a list of token ids or a list of such lists "
            f"is needed, not {'nothing' if value is None else show(value)}",
            "prompt",
        )
    if is_integer(value[0]):
        return (parse_ids(value, "prompt", bounds),)
    if len(value) > bounds.choices:
        raise invalid(f"prompt: {len(value)} prompts, {bounds.choices} are the most", "prompt")
    return tuple(_prompt(one, i, bounds) for i, one in enumerate(value))


def _prompt(value: Any, index: int, bounds: Bounds) -> str | tuple[int, ...]:
    name = f"prompt[{index}]"
    if isinstance(value, str):
        return check_text(value, name)
    if not isinstance(value, list) or not value:
        raise invalid(f"{name}: a string or token ids are needed, not {show(value)}", "prompt")
    return parse_ids(value, name, bounds)


def parse_ids(value: Any, name: str, bounds: Bounds) -> tuple[int, ...]:
    """A list of token ids of the model.

    Raises:
      ApiError: it is none; the error has the name.
    """
    if not isinstance(value, list):
        raise invalid(f"{name}: a list of token ids is needed, not {show(value)}", name)
    # Looking at each of millions of ids takes long, too.
    if len(value) > max(bounds.max_length, bounds.vocab_size):
        raise invalid(
            f"{name}: {len(value)} token ids; this model's maximum context length is "
            f"{bounds.max_length} tokens",
            name.partition("[")[0],
            "context_length_exceeded",
        )
    for i, one in enumerate(value):
        if not is_integer(one) or not 0 <= one < bounds.vocab_size:
            raise invalid(
                f"{name}[{i}]: token ids are integers from 0 to {bounds.vocab_size - 1}, "
                f"not {show(one)}",
                name.partition("[")[0],
            )
    return tuple(value)
