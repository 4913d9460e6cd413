r"""How models write calls of tools, as rows of data: reader and grammar know no model.

hermes    <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
llama     {"name": "add", "parameters": {"a": 1}}
mistral   [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
mistral_args    [TOOL_CALLS]add[ARGS]{"a": 1}
"""

import dataclasses
import json
import secrets
import string
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Format:
    """How calls are written."""

    name: str  # as flags have it
    # a chat template with all of one of these writes calls in this format
    signs: tuple[tuple[str, ...], ...]
    begin: str  # is before calls; a special token, perhaps
    # whether calls may stand without `begin`, at the beginning of a message alone
    bare: bool = False
    end: str = ""  # is behind each call; empty for nothing
    # whether calls are in a JSON list behind one `begin`, else each has its own
    listed: bool = False
    key: str = "arguments"  # of the arguments in the object of a call
    # what is between a call's name and its arguments, where it is no object; else empty
    named: str = ""
    # is between `begin` and the call, and between the call and `end`, where we write it
    space: str = ""
    single: bool = False  # whether a message has one call at most
    letters: int = 0  # of the ids that the templates take; 0 is any number

    def new_id(self) -> str:
        """An id for a call."""
        if not self.letters:
            return f"call_{secrets.token_hex(12)}"
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self.letters))

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as a model writes it."""
        head, tail = self.around(name)
        return head + json.dumps(arguments, ensure_ascii=False) + tail

    def around(self, name: str) -> tuple[str, str]:
        """What is before and behind the arguments of a call that stands alone."""
        if self.named:
            return f"{self.begin}{name}{self.named}", self.end
        head, tail = self.around_listed(name)
        if self.listed:
            return f"{self.begin}{self.space}[{head}", f"{tail}]{self.end}"
        begin = "" if self.bare else self.begin
        return f"{begin}{self.space}{head}", f"{tail}{self.space}{self.end}"

    def around_listed(self, name: str) -> tuple[str, str]:
        """What is before and behind the arguments in a call's object."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": ', "}"


# The first whose signs a template has is taken.
FORMATS = (
    Format(
        "hermes", (("<tool_call>", "</tool_call>"),), "<tool_call>", end="</tool_call>", space="\n"
    ),
    Format(
        "mistral_args", (("[TOOL_CALLS]", "[ARGS]"),), "[TOOL_CALLS]", named="[ARGS]", letters=9
    ),
    Format("mistral", (("[TOOL_CALLS]",),), "[TOOL_CALLS]", listed=True, space=" ", letters=9),
    Format(
        "llama",
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        "<|python_tag|>",
        bare=True,
        key="parameters",
        single=True,
    ),
)
BY_NAME = {format.name: format for format in FORMATS}
PLAIN = BY_NAME["hermes"]
"""For templates that know no tools: it is described to the model."""


def format_of(template: str) -> Format | None:
    """The format in which a chat template writes calls; None if it is none of these."""
    for format in FORMATS:
        if any(all(sign in template for sign in signs) for signs in format.signs):
            return format
    return None
