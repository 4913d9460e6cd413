"""Turns a conversation into the text that a chat model was trained on, with its Jinja template.

Templates come with models, which come from strangers. They run in Jinja's immutable sandbox, with
the same filters and functions as in transformers and nothing else.

    [{"role": "user", "content": "Hi"}]  ->  "<|user|>Hi<|end|><|assistant|>", for instance
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from serving.errors import ServingError, invalid

DEFAULT = """\
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content | trim }}

{% endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}
"""
"""For base models, which have no template: a dialogue as such models have seen in texts."""

DEFAULT_STOPS = ("\nUser:", "\nSystem:")
"""A base model goes on with the user's next turn; these strings end the assistant's."""


class _Refused(Exception):
    """The template called `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's tokens for training: nothing to do here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> Any:
        return caller()


def _raise(message: str) -> None:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes `<`, `>` and `&` for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: the template; None takes a plain one, for models that have none.
      special_tokens: texts that the template may use by name, such as `bos_token`.

    Attributes:
      is_default: whether it is the plain one.
      stops: strings that end the assistant's turn, beside the model's own stop ids.

    Raises:
      ServingError: the source is not valid Jinja.
    """

    def __init__(
        self, source: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self.is_default = source is None
        self.stops = DEFAULT_STOPS if source is None else ()
        self._special = dict(special_tokens or {})
        try:
            self._template = environment.from_string(DEFAULT if source is None else source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ServingError(f"chat template, line {line}: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, str]], generation_prompt: bool = True) -> str:
        """Renders a conversation.

        Args:
          messages: each with `role` and `content`.
          generation_prompt: whether to end with the opening of the assistant's turn.

        Returns:
          The text for the model.

        Raises:
          ApiError: the template refuses these messages, or fails on them.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=generation_prompt,
                tools=None,
                documents=None,
                **self._special,
            )
        except _Refused as error:
            raise invalid(
                f"messages: the chat template refuses them: {error}", "messages"
            ) from error
        except Exception as error:  # templates can fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise invalid(f"messages: the chat template fails: {reason}", "messages") from error
