"""The messages of a chat, checked; calls of tools in them have their arguments as objects."""

import json
from typing import Any

from spmd.serving.errors import invalid
from spmd.serving.http.fields import check_text, show

ROLES = ("system", "developer", "user", "assistant", "tool")

TEXTS = ("text", "input_text", "output_text", "reasoning_text")
"""Parts that are texts: those of chats, and what OpenAI's responses call them."""

Message = dict[str, Any]
"""`role`, `content`, and perhaps `name`, `tool_calls` or `tool_call_id`, as templates want them."""


def parse_messages(value: Any) -> tuple[Message, ...]:
    """The messages of a chat.

    Raises:
      ApiError: they are none, or one does not fit; the error has its place.
    """
    if not isinstance(value, list) or not value:
        found = "nothing" if value is None else show(value)
        raise invalid(f"messages: a list of messages is needed, not {found}")
    return tuple(parse_message(one, f"messages[{i}]") for i, one in enumerate(value))


def parse_message(value: Any, place: str) -> Message:
    """One message; `place` is where the request has it. What it returns is parsed to the same."""
    if not isinstance(value, dict):
        raise invalid(f"{place}: an object is needed, not {show(value)}")
    role = value.get("role")
    if role not in ROLES:
        raise invalid(f"{place}.role: one of {', '.join(ROLES)}, not {show(role)}")
    for name in ("function_call", "audio"):
        if value.get(name):
            raise invalid(f"{place}.{name}: not served", code="unsupported_parameter")
    message: Message = {"role": str(role)}
    calls, content = value.get("tool_calls"), value.get("content")
    if calls and role != "assistant":
        raise invalid(f"{place}.tool_calls: only of assistants")
    # Assistants may call a tool, or have been cut in a thought, and say nothing.
    silent = role == "assistant" and content is None
    message["content"] = "" if silent else parse_content(content, f"{place}.content")
    thought = value.get("reasoning_content", value.get("reasoning"))
    if role == "assistant" and thought is not None:
        message["reasoning_content"] = check_text(thought, f"{place}.reasoning_content")
    if calls:
        where = f"{place}.tool_calls"
        if not isinstance(calls, list):
            raise invalid(f"{where}: a list is needed, not {show(calls)}")
        message["tool_calls"] = [parse_call(one, f"{where}[{i}]") for i, one in enumerate(calls)]
    if role == "tool":
        message["tool_call_id"] = check_text(value.get("tool_call_id"), f"{place}.tool_call_id")
    if value.get("name") is not None:
        message["name"] = check_text(value["name"], f"{place}.name")
    return message


def parse_call(value: Any, place: str) -> dict[str, Any]:
    """A call of a tool, with its arguments as an object; `place` is where the request has it."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise invalid(f"{place}.function: an object is needed, not {show(function)}")
    call: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": check_text(function.get("name"), f"{place}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{place}.function.arguments"),
        },
    }
    if value.get("id") is not None:
        call["id"] = check_text(value["id"], f"{place}.id")
    return call


def _arguments(value: Any, place: str) -> dict[str, Any]:
    """OpenAI's clients send the arguments as they got them: a text."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(check_text(value, place) or "{}")
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise invalid(f"{place}: a JSON object is needed, not {show(value)}")
    return found


def parse_content(value: Any, place: str) -> str:
    """A message's text: a string, or a list of text parts, which are joined by newlines."""
    if isinstance(value, str):
        return check_text(value, place)
    if not isinstance(value, list) or not value:
        found = "nothing" if value is None else show(value)
        raise invalid(f"{place}: a string or a list of parts is needed, not {found}")
    return "\n".join(_part(part, f"{place}[{i}]") for i, part in enumerate(value))


def _part(value: Any, place: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in TEXTS:
        raise invalid(f"{place}: parts of type text are served, not {show(kind or value)}")
    return check_text(value.get("text"), f"{place}.text")
