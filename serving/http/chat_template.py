"""Turns a conversation into the text that a chat model was trained on, with its Jinja template.

Templates come with models, which come from strangers. They run in Jinja's immutable sandbox, with
the same filters and functions as in transformers and nothing else.

    [{"role": "user", "content": "Hi"}]  ->  "<|user|>Hi<|end|><|assistant|>", for instance
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from spmd.models.training.data import chat
from spmd.serving.engine.thought import Marks
from spmd.serving.errors import ServingError, invalid
from spmd.serving.http.fields import show
from spmd.serving.http.messages import Message
from spmd.serving.http.tools.formats import BY_NAME, FORMATS, PLAIN, Format
from spmd.serving.http.tools.reader import reads

SYSTEM = """\
You can call functions. Each line describes one, with a JSON schema of its arguments:
{functions}
To call a function, write its name and its arguments in exactly this form, once for each call:
{example}
The results are in the next message."""


def described(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: Format
) -> list[Message]:
    """The same conversation without fields for tools.

    Args:
      messages: with calls and their results.
      tools: as the request has them.
      format: how calls are written.

    Returns:
      Messages of systems, users and assistants, of which the first describes the tools, if any.
    """
    made: list[Message] = []
    names: dict[str, str] = {}
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            name = names.get(message["tool_call_id"], "a function")
            text = f"Result of {name}:\n{message['content']}"
            if was_result:  # some templates want users and assistants to take turns
                made[-1]["content"] += f"\n\n{text}"
            else:
                made.append({"role": "user", "content": text})
        else:
            calls = message.get("tool_calls", ())
            names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
            called = (call["function"] for call in calls)
            written = (format.written(call["name"], call["arguments"]) for call in called)
            text = "\n".join(filter(None, [message["content"], *written]))
            made.append({**message, "content": text})
            made[-1].pop("tool_calls", None)
        was_result = is_result
    if not tools:
        return made
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    head, tail = format.around("NAME")
    values = format.parameter("ARGUMENT", "VALUE") if format.tags else '{"ARGUMENT": VALUE}'
    text = SYSTEM.format(functions=functions, example=f"{head}{values}{tail}")
    first = made[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *made]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *made[1:]]


DEFAULT = """\
{%- for message in messages -%}
{{ message.role | capitalize }}: {{ message.content | trim }}

{% endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}
"""
"""For base models, which have no template: a dialogue as such models have seen in texts."""

DEFAULT_STOPS = ("\nUser:", "\nSystem:")
"""A base model goes on with the user's next turn; these strings end the assistant's."""

THOUGHTS = (
    Marks("<think>", "</think>", False),
    Marks(
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>",
        False, "<|channel|>final<|message|>",
    ),
)  # fmt: skip
"""What is around thoughts, in models whose template begins them so, and ends them or answers so."""

OURS = ("messages", "tools", "documents", "add_generation_prompt")
"""Names that templates get of us, and requests do not set; beside these, texts of tokens."""

TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A compiled chat template.

    Args:
      source: the template; None takes a plain one, for models that have none.
      special_tokens: texts that the template may use by name, such as `bos_token`.
      tool_format: how the model writes calls of tools; None takes what the template tells.

    Attributes:
      is_default: whether it is the plain one.
      stops: strings that end the assistant's turn, beside the model's own stop ids.
      knows_tools: whether it looks at `tools`; if not, they are described in words.
      arguments: names that a request may set, such as `enable_thinking`.

    Raises:
      ServingError: the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        tool_format: str | None = None,
    ) -> None:
        environment = chat.environment()
        text, self.is_default = source or "", source is None
        self.stops = DEFAULT_STOPS if source is None else ()
        self._special = dict(special_tokens or {})
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(DEFAULT if source is None else source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ServingError(f"chat template, line {line}: {error.message}") from error
        self.knows_tools = "tools" in names
        ours = {*OURS, *TOKENS, *self._special, *environment.globals}
        self.arguments = frozenset(names - ours)
        self._thought = next(
            (m for m in THOUGHTS if m.begin in text and (m.plain or m.end) in text), None
        )
        self._format: Format | None = PLAIN if source is None else None
        self._wants_text = False
        if self.knows_tools:
            self._wants_text, self._format = self._probe()
        if tool_format is not None:
            self._format = BY_NAME[tool_format]

    @property
    def tool_format(self) -> Format:
        """How the model writes calls of tools.

        Raises:
          ApiError: that is not known.
        """
        if self._format is None:
            problem = f"writes calls in none of the formats {', '.join(BY_NAME)}"
            problem = problem if self.knows_tools else "knows no tools"
            raise invalid(
                f"tools: this model's chat template {problem}; leave them out, or serve it with "
                "--tool_format",
                code="unsupported_parameter",
            )
        return self._format

    def render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation.

        Args:
          messages: each with `role` and `content`, and perhaps calls of tools.
          generation_prompt: whether to end with the opening of the assistant's turn.
          tools: what the model may call, as the request has it.
          arguments: values for names of `self.arguments`.

        Returns:
          The text for the model.

        Raises:
          ApiError: the template refuses these messages, fails on them, or does not use an argument.
        """
        for name in arguments or ():
            if name not in self.arguments:
                known = ", ".join(sorted(self.arguments)) or "none"
                raise invalid(
                    f"chat_template_kwargs: {show(name)} is no argument of this model's chat "
                    f"template, which are: {known}"
                )
        if not self.knows_tools:
            messages, tools = described(messages, tools, self._format or PLAIN), ()
        try:
            return self._render(messages, generation_prompt, tools, self._wants_text, arguments)
        except chat.Refused as error:
            raise invalid(f"messages: the chat template refuses them: {error}") from error
        except Exception as error:  # templates can fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise invalid(f"messages: the chat template fails: {reason}") from error

    def _render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]],
        as_text: bool,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        return self._template.render(
            arguments or {},
            messages=[_copied(message, as_text) for message in messages],
            add_generation_prompt=generation_prompt,
            tools=list(tools) or None,
            documents=None,
            **self._special,
        )

    @property
    def thinks(self) -> bool:
        """Whether the model may think before it answers, as far as the template tells."""
        return self._thought is not None or "reasoning_effort" in self.arguments

    def thought(self, prompt: str, begun: str = "") -> Marks | None:
        """What is around the thought that may come behind a prompt; None if none may.

        A prompt that ends with a thought, as in `<think></think>`, asks for no other one.

        Args:
          begun: the message that the prompt ends with, where it goes on with one.
        """
        if self._thought is None:
            return None
        begin, end, *_ = self._thought
        opened = begun.rfind(begin) > begun.rfind(end) or prompt.rstrip().endswith(begin)
        ended = not opened and (begun or prompt.rstrip().endswith(end))
        return None if ended else self._thought._replace(opened=opened)

    def _probe(self) -> tuple[bool, Format | None]:
        """(whether the template wants arguments as texts: most want objects, how it writes calls).

        A call goes through the template, and what comes out is read in every format.
        """
        wants_text: bool | None = None
        for as_text in (False, True):
            try:
                written = self._render(PROBE, False, (), as_text)
            except Exception:  # perhaps since the arguments are no text
                continue
            for format in FORMATS:
                if reads(format, written, PROBE_FUNCTION):
                    return as_text, format
            if wants_text is None and repr(PROBE_ARGUMENTS) not in written:
                wants_text = as_text
        return bool(wants_text), None


PROBE_ARGUMENTS = {"number": 1, "text": "a b"}
PROBE_FUNCTION: dict[str, Any] = {"name": "probe", "arguments": PROBE_ARGUMENTS}
PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": PROBE_FUNCTION}],
    },
)


def _copied(message: Message, as_text: bool) -> Message:
    """A message of which the template may have all, with its arguments as it wants them."""
    made = copy.deepcopy(message)
    for call in made.get("tool_calls", ()) if as_text else ():
        function = call["function"]
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return made
