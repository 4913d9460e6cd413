"""Tools for chat templates that know none: in words, in the messages that every template knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serving.http.messages import Message
from serving.http.tools.formats import Format

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
            names.update(_names(message))
            made.append(_plain(message, format))
        was_result = is_result
    return _with_system(made, _description(tools, format)) if tools else made


def _plain(message: Message, format: Format) -> Message:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    written = (format.written(call["name"], call["arguments"]) for call in calls)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [message["content"], *written]))}


def _names(message: Message) -> dict[str, str]:
    calls = message.get("tool_calls", ())
    return {call["id"]: call["function"]["name"] for call in calls if "id" in call}


def _description(tools: Sequence[Mapping[str, Any]], format: Format) -> str:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    head, tail = format.around("NAME")
    return SYSTEM.format(functions=functions, example=f'{head}{{"ARGUMENT": VALUE}}{tail}')


def _with_system(messages: list[Message], text: str) -> list[Message]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
