"""The tools of a request: `tools`, `tool_choice`, `parallel_tool_calls`."""

import dataclasses
import re
from typing import Any

from spmd.serving.errors import invalid
from spmd.serving.http.fields import Fields, show

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str  # of the function
    schema: Any  # of its arguments; a JSON schema
    strict: bool  # whether calls have to fit the schema
    given: dict[str, Any]  # the tool as the request has it, for the template


@dataclasses.dataclass(frozen=True)
class Tools:
    """What the model may call, and whether it has to."""

    all: tuple[Tool, ...]  # at least one
    callable: tuple[Tool, ...]  # those that it may call
    must: bool  # whether it has to call one
    parallel: bool  # whether it may call several


def parse_tools(fields: Fields) -> Tools | None:
    """The tools of a request; None if it has none, or wants none to be called.

    Raises:
      ApiError: a field does not fit.
    """
    tools, choice = fields.get("tools") or [], fields.get("tool_choice")
    parallel = fields.flag("parallel_tool_calls", True)
    if not isinstance(tools, list):
        raise invalid(f"tools: a list is needed, not {show(tools)}")
    made = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in made]
    if len(set(names)) < len(names):
        raise invalid("tools: two have the same name")
    if choice == "none" or (not made and choice in (None, "auto")):
        return None
    if not made:
        raise invalid(f"tool_choice: {show(choice)} needs tools")
    if choice in (None, "auto", "required"):
        return Tools(made, made, choice == "required", parallel)
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    function = choice.get("function") if is_named else None
    if not isinstance(function, dict) or "name" not in function:
        raise invalid(
            'tool_choice: "none", "auto", "required" or {"type": "function", "function": '
            f'{{"name": ...}}}} is needed, not {show(choice)}'
        )
    name = function["name"]
    chosen = tuple(tool for tool in made if tool.name == name)
    if not chosen:
        raise invalid(f"tool_choice: no tool has the name {show(name)}")
    return Tools(made, chosen, True, False)


def _tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise invalid(f"{place}.type: function is served, nothing else")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{place}.function: an object is needed, not {show(function)}")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            f"{place}.function.name: 1 to 64 letters, digits, or any of _.- are needed, "
            f"not {show(name)}"
        )
    if schema is not None and not isinstance(schema, dict):
        raise invalid(f"{place}.function.parameters: a schema is needed, not {show(schema)}")
    for key, kind in (("properties", dict), ("required", list)):
        if not isinstance((schema or {}).get(key, kind()), kind):
            kinds = "an object" if kind is dict else "a list"
            raise invalid(f"{place}.function.parameters.{key}: {kinds} is needed")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{place}.function.strict: true or false, not {show(strict)}")
    if schema is None:  # as with OpenAI
        schema = {"properties": {}, "additionalProperties": False}
    # Arguments are an object, whatever the schema leaves open.
    return Tool(name, {"type": "object", **schema}, bool(strict), tool)
