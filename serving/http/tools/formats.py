r"""How models write calls of tools, as rows of data: reader and grammar know no model.

hermes    <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
llama     {"name": "add", "parameters": {"a": 1}}
mistral   [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
mistral_args    [TOOL_CALLS]add[ARGS]{"a": 1}
qwen3_coder
    <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>
glm45     <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
"""

import dataclasses
import functools
import json
import re
import secrets
import string
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tags:
    """What is around the parts of a call that is no JSON; values are texts, or JSON of the rest."""

    name: tuple[str, str]  # around the function's name
    key: tuple[str, str]  # around the name of an argument
    value: tuple[str, str]  # around its value
    end: str  # behind the last argument; empty if the format's `end` follows

    @functools.cached_property
    def named(self) -> re.Pattern[str]:
        """The function's name, and what is read of the next tag, where that ends the name."""
        begin, end = map(re.escape, self.name)
        return re.compile(rf"{begin}([^\n<>]+){end}()" if end else rf"{begin}([^\n<>]+)([\n<])")

    @functools.cached_property
    def opens(self) -> re.Pattern[str]:
        """All before a value, with the name of the argument."""
        begin, end, value = (re.escape(one.strip()) for one in (*self.key, self.value[0]))
        return re.compile(rf"{begin}([^\n]*?){end}\s*{value}")


@dataclasses.dataclass(frozen=True)
class Format:
    """How calls are written."""

    name: str  # as flags have it
    begin: str  # is before calls; a special token, perhaps
    # whether calls may stand without `begin`, at the beginning of a message alone
    bare: bool = False
    end: str = ""  # is behind each call; empty for nothing
    # whether calls are in a JSON list behind one `begin`, else each has its own
    listed: bool = False
    key: str = "arguments"  # of the arguments in the object of a call
    # what is between a call's name and its arguments, where it is no object; else empty
    named: str = ""
    tags: Tags | None = None  # where arguments stand between tags
    # is between `begin` and the call, and between the call and `end`, where we write it
    space: str = ""
    single: bool = False  # whether a message has one call at most
    letters: int = 0  # of the ids that the templates take; 0 is any number

    @property
    def marks(self) -> list[str]:
        """What is around calls and their parts, without blanks."""
        tags = () if self.tags is None else (*self.tags.key, *self.tags.value, self.tags.end)
        return [mark.strip() for mark in (self.named, *tags, self.end, self.begin) if mark]

    def new_id(self) -> str:
        """An id for a call."""
        if not self.letters:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self.letters))

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as a model writes it."""
        head, tail = self.around(name)
        if self.tags is None:
            return head + json.dumps(arguments, ensure_ascii=False) + tail
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            head += self.parameter(key, text)
        return head + tail

    def parameter(self, key: str, value: str) -> str:
        """An argument between tags."""
        assert self.tags is not None
        keys, values = self.tags.key, self.tags.value
        return f"{keys[0]}{key}{keys[1]}{values[0]}{value}{values[1]}\n"

    def around(self, name: str) -> tuple[str, str]:
        """What is before and behind the arguments of a call that stands alone."""
        if self.named:
            return f"{self.begin}{name}{self.named}", self.end
        if self.tags is not None:
            before, behind = self.tags.name
            end = f"{self.tags.end}{self.space}" if self.tags.end else ""
            return f"{self.begin}{self.space}{before}{name}{behind}\n", f"{end}{self.end}"
        head, tail = self.around_listed(name)
        if self.listed:
            return f"{self.begin}{self.space}[{head}", f"{tail}]{self.end}"
        begin = "" if self.bare else self.begin
        return f"{begin}{self.space}{head}", f"{tail}{self.space}{self.end}"

    def around_listed(self, name: str) -> tuple[str, str]:
        """What is before and behind the arguments in a call's object."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": ', "}"


CALL = ("<tool_call>", "</tool_call>")

FORMATS = (
    Format("hermes", CALL[0], end=CALL[1], space="\n"),
    Format(
        "qwen3_coder",
        CALL[0],
        end=CALL[1],
        space="\n",
        tags=Tags(
            ("<function=", ">"), ("<parameter=", ">"), ("\n", "\n</parameter>"), "</function>"
        ),
    ),
    Format(
        "glm45",
        CALL[0],
        end=CALL[1],
        tags=Tags(("", ""), ("<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>"), ""),
    ),
    Format("mistral_args", "[TOOL_CALLS]", named="[ARGS]", letters=9),
    Format("mistral", "[TOOL_CALLS]", listed=True, space=" ", letters=9),
    Format("llama", "<|python_tag|>", bare=True, key="parameters", single=True),
)
BY_NAME = {format.name: format for format in FORMATS}
PLAIN = BY_NAME["hermes"]
"""For templates that know no tools: it is described to the model."""
