"""Rows of chats, of prompts with answers and of preferences, as texts of which a part is learned.

    messages                        a chat: what the assistant says is learned
    prompt, completion              the completion is learned
    prompt, chosen, rejected        two documents, of each what follows the prompt

Fields are those of TRL. A prompt and what follows are texts, or lists of messages; `prompt` may be
left out where `chosen` and `rejected` begin with it. Messages are written by the tokenizer's chat
template, in Jinja's immutable sandbox, with the same filters and functions as in transformers.
"""

import dataclasses
import datetime
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from spmd.models.training.data.tokenizer import BYTES, SETTINGS
from spmd.models.training.errors import DataError
from spmd.models.training.paths import AnyPath, as_path, json_object

Spans = tuple[tuple[int, int], ...]
"""Ranges of characters: (first, end) of each, in order."""

Messages = list[dict[str, Any]]

KINDS = (("chosen", "rejected"), ("messages",), ("prompt", "completion"))
"""Fields by which the kinds of rows are known; the first kind that a row has all fields of."""

OTHERS = ("prompt", "tools", "chat_template_kwargs")
"""What such rows may have, too."""

MARKS = ("\ufdd0", "\ufdd1")
"""What stands around answers for a moment: characters that Unicode keeps out of texts."""


class Answered(NamedTuple):
    """A text, of which some is learned."""

    text: str
    learned: Spans
    is_framed: bool  # whether a template wrote what begins and ends documents, where it wanted them


class Refused(Exception):
    """The template called `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which is around the assistant's words: puts marks there."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> Any:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


def _raise(message: str) -> None:
    raise Refused(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **more: Any) -> str:
    """Jinja's own `tojson` escapes `<`, `>` and `&` for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def environment(marks: tuple[str, str] = ("", "")) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Where chat templates run.

    Args:
        marks: written around `{% generation %}`.
    """
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    made.extend(marks=marks)
    return made


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    return environment(MARKS).from_string(source)


@dataclasses.dataclass(frozen=True)
class Template:
    """A chat template, and the texts of special tokens that it may use by name."""

    source: str
    special: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Messages, row: Mapping[str, Any], opens: bool = False) -> str:
        """The text of messages, with `MARKS` around `{% generation %}`.

        Args:
            row: what it has beside messages.
            opens: whether to end with the opening of the assistant's next message.

        Raises:
            ValueError: the template fails on them.
        """
        tools = row.get("tools") or None
        try:
            return _compiled(self.source).render(
                row.get("chat_template_kwargs") or {},
                messages=messages,
                tools=json.loads(tools) if isinstance(tools, str) else tools,
                documents=None,
                add_generation_prompt=opens,
                **dict(self.special),
            )
        except Exception as error:  # templates can fail in any way
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _text(self, messages: Messages, row: Mapping[str, Any], opens: bool = False) -> str:
        return _unmarked(self.render(messages, row, opens))[0] if messages else ""

    def chat(self, messages: Messages, row: Mapping[str, Any]) -> Answered:
        """A chat, of which the assistant's messages are learned.

        Where the template marks these, what is marked, as transformers' `apply_chat_template` masks
        it. Else what each adds to the messages before it and the opening of the assistant's.

        Raises:
            ValueError: nothing is learned, or a message is written otherwise where others follow.
        """
        text, marked = _unmarked(self.render(messages, row))
        spans = list(marked)
        for place, message in enumerate(messages if not marked else ()):
            if message["role"] == "assistant":
                head = self._text(messages[:place], row, opens=True)
                whole = self._text(messages[: place + 1], row)
                if not (whole.startswith(head) and text.startswith(whole)):
                    raise ValueError(
                        f"the chat template writes the first {place + 1} messages otherwise where "
                        "others follow, so answers cannot be told from the rest; put {% generation "
                        "%} and {% endgeneration %} around the assistant's words in a copy, and "
                        "give that with --chat_template"
                    )
                spans.append((len(head), len(whole)))
        if not any(start < stop for start, stop in spans):
            raise ValueError("no message of the assistant has a word: nothing can be learned")
        return Answered(text, tuple(spans), True)

    def answered(self, prompt: Messages, answer: Messages, row: Mapping[str, Any]) -> Answered:
        """A prompt and what follows it, which is learned.

        Raises:
            ValueError: the answer has no word, or changes how the prompt is written.
        """
        text = self._text(prompt + answer, row)
        if not text.startswith(self._text(prompt, row)):
            raise ValueError("the chat template writes prompts otherwise where an answer follows")
        # An opening may have what this answer has not, such as an empty thought.
        start = _alike(self._text(prompt, row, opens=True), text)
        if start == len(text):
            raise ValueError("the answer is empty")
        return Answered(text, ((start, len(text)),), True)


def _unmarked(text: str) -> tuple[str, Spans]:
    """A text without marks, and what was between them."""
    pieces = re.split("[{}{}]".format(*MARKS), text)
    ends = list(itertools.accumulate(map(len, pieces)))
    return "".join(pieces), tuple(zip(ends[::2], ends[1::2], strict=False))


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def fields(names: Sequence[str]) -> list[str]:
    """The fields that are read of rows with these; none if they are of no kind."""
    kind = next((kind for kind in KINDS if set(kind) <= set(names)), ())
    return [name for name in names if name in (*kind, *OTHERS)] if kind else []


def read(row: Mapping[str, Any], template: Template | None) -> list[Answered]:
    """The documents of a row: two of preferences, else one.

    Raises:
        ValueError: something in it is not as it should be.
    """
    if "chosen" in row:
        chosen, rejected = (_value(row, name) for name in ("chosen", "rejected"))
        prompt = _value(row, "prompt") if row.get("prompt") is not None else None
        if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
            prompt = chosen[: _alike(chosen, rejected)]
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        return [_answered(prompt or "", answer, row, template) for answer in (chosen, rejected)]
    if "messages" not in row:
        return [_answered(_value(row, "prompt"), _value(row, "completion"), row, template)]
    messages = _value(row, "messages")
    if not isinstance(messages, list):
        raise ValueError("field 'messages' is no list of messages")
    return [_needed(template).chat(messages, row)]


def _answered(prompt: Any, answer: Any, row: Mapping[str, Any], template: Any) -> Answered:
    if isinstance(answer, list) and (not prompt or isinstance(prompt, list)):
        return _needed(template).answered(prompt or [], answer, row)
    if isinstance(answer, list) or isinstance(prompt, list):
        raise ValueError("a prompt and what follows are both texts, or both messages")
    if not answer:
        raise ValueError("the answer is empty")
    return Answered(prompt + answer, ((len(prompt), len(prompt + answer)),), False)


def _value(row: Mapping[str, Any], name: str) -> str | Messages:
    """A text, or a list of messages without the nulls that columns of Parquet fill up with."""
    value = row.get(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"field {name!r} is no text and no list of messages")
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"field {name!r}: message {place} has no text as its role")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"field {name!r}: message {place} has no content")
    return [{key: x for key, x in message.items() if x is not None} for message in value]


def _needed(template: Template | None) -> Template:
    if template is None:
        raise ValueError(
            "these are messages, and the tokenizer has no chat template; name the tokenizer of a "
            "chat model with --tokenizer, or a file with a template with --chat_template"
        )
    return template


# Templates in files.


def template_source(folder: AnyPath, settings: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja`, or what `tokenizer_config.json` has: a text, or several by name."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


@functools.lru_cache(maxsize=4)
def find_template(tokenizer: str, file: str | None = None) -> Template | None:
    """The chat template of a tokenizer; None if it has none.

    Args:
        tokenizer: a `tokenizer.json`, a folder with one, or `bytes`.
        file: has the template instead.

    Raises:
        DataError: the file cannot be read, or is no template.
    """
    folder = as_path(tokenizer)
    settings: dict[str, Any] = {}
    if tokenizer != BYTES:
        folder = folder if folder.is_dir() else folder.parent
        settings = json_object(folder / SETTINGS)
    try:
        chosen = as_path(file).read_text(encoding="utf-8") if file else None
        source = chosen or (template_source(folder, settings) if tokenizer != BYTES else None)
        if source is None:
            return None
        if file:  # else rows say what is wrong, where they need it
            _compiled(source)
    except OSError as error:
        raise DataError(f"--chat_template: {file}: {error.strerror}") from error
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{file}, line {error.lineno}: {error.message}") from error
    return Template(source, tuple(sorted(special_tokens(settings).items())))


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `bos_token` and the like in a `tokenizer_config.json`."""
    named = {name: x for name, x in settings.items() if name.endswith("_token")}
    texts = {n: x.get("content") if isinstance(x, dict) else x for n, x in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
