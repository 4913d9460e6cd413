"""Calls are found in texts, however these are cut; what is none stays text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.serving.http.tools.ask import Tool, Tools
from spmd.serving.http.tools.formats import BY_NAME, FORMATS, Format
from spmd.serving.http.tools.reader import MessageReader
from spmd.serving.http.tools.values import NAMES as NAMES_OF

NAMES = ("add", "get_weather")
ARGUMENTS = st.dictionaries(
    st.text('a"{\\é[', max_size=3),
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text('x"{}[]\\\n,:é<', max_size=6),
        lambda one: st.lists(one, max_size=2) | st.dictionaries(st.text("k:", max_size=2), one),
        max_leaves=4,
    ),
    max_size=3,
)  # fmt: skip
TEXTS = st.text("ab <[{\n", max_size=8).map(str.strip)


def tools(parallel: bool = True, schemas: Any = {}) -> Tools:  # noqa: B006
    made = tuple(Tool(name, schemas.get(name, {}), False, {}) for name in NAMES)
    return Tools(made, made, False, parallel)


def read(text: str, format: str, finish: Any = "stop", parallel: Any = True, **schemas: Any) -> Any:
    """(content, calls, finish) of a whole text."""
    reader = MessageReader(tools(parallel, schemas), BY_NAME[format])
    message = reader.message(text, finish)
    assert all(call["type"] == "function" for call in message.get("tool_calls", ()))
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message["content"], calls, reader.finish(finish)


def streamed(pieces: list[str], format: Format, **schemas: Any) -> Any:
    """The same from the deltas of a stream."""
    reader, content, calls = MessageReader(tools(True, schemas), format), "", list[list[str]]()
    deltas = [d for piece in pieces for d in reader.deltas(piece, None)]
    for delta in [*deltas, *reader.deltas("", "stop")]:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls) and part["type"] == "function"
                calls.append([part["function"]["name"], ""])
            assert part["index"] == len(calls) - 1
            calls[-1][1] += part["function"]["arguments"]
    return content, [tuple(call) for call in calls], reader.finish("stop")


def kind(value: Any) -> str:
    return NAMES_OF.get(type(value), "integer")


def written(format: Format, calls: list[tuple[str, Any]]) -> str:
    if format.listed:
        objects = [f'{{"name": "{name}", "arguments": {json.dumps(a)}}}' for name, a in calls]
        return f"{format.begin} [{', '.join(objects)}]"
    joint = "; " if format.bare else "\n"
    return joint.join(format.written(name, arguments) for name, arguments in calls)


@given(
    st.sampled_from(FORMATS), TEXTS,
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3), st.data(),
)  # fmt: skip
def test_calls_are_found_however_the_text_is_cut(
    format: Format, before: str, calls: list[tuple[str, Any]], data: Any
) -> None:
    before = "" if format.bare else before
    # Between tags the schema tells texts from the rest.
    calls = [*dict(calls).items()] if format.tags else calls
    schemas = {
        name: {
            "properties": {
                key: {"type": [kind(one), "null"][: 1 + len(key) % 2]}
                for key, one in arguments.items()
            }
        }
        for name, arguments in calls
    }
    text = f"{before}\n{written(format, calls)}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = before, calls, "tool_calls"
    content, found, finish = streamed(pieces, format, **schemas)
    assert (content, [(name, json.loads(raw)) for name, raw in found], finish) == expected
    content, found, finish = read(text, format.name, **schemas)
    assert (content or "", [(name, json.loads(raw)) for name, raw in found], finish) == expected


ADD = '"name": "add", "arguments": {"a": 1}'
ADDED = [("add", '{"a": 1}')]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "nothing at all "),
        ("hermes", " <tool_cal"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call> {"),
        ("hermes", "<tool_call>\nadd(1)\n</tool_call>"),
        ("hermes", f"<tool_call>{{{ADD.replace('add', 'unknown')}}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", 'so: <tool_call>{"name": "add", "arguments": {"a": }}</tool_call> '),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("llama", '{"name": "unknown", "parameters": {}}'),
        ("llama", '{"city": {"name": "add"}}'),
        ("llama", 'It is {"name": "add", "parameters": {}}'),
        ("llama", "<|python_tag|>print(1)"),
        ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "add"}'),
        ("qwen3_coder", "<tool_call>\n<function=add>\n1</function>"),
        ("glm45", "<tool_call>unknown\n</tool_call>"),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n1"),
        ("mistral", "[TOOL_CALLS] add"),
        ("mistral", "[TOOL_CALLS] [1]"),
        ("mistral_args", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral_args", '[TOOL_CALLS]{"name": "add"}'),
        ("mistral_args", "[TOOL_CALLS]add[ARGS]{1}"),
    ],
)
def test_what_is_no_call_is_text(format: str, text: str) -> None:
    assert read(text, format) == (text, [], "stop")


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        ("hermes", f"<tool_call>{{{ADD}}}", ADDED),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', [("add", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}', ADDED),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', ADDED),
        ("qwen3_coder", "<tool_call><function=add></function></tool_call>", [("add", "{}")]),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></function>", ADDED),
        ("glm45", "<tool_call>add\n</tool_call>", [("add", "{}")]),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", ADDED),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {}}', [("add", "{}")]),
        ("llama", '\n {"name": "add", "parameters": {}}\n', [("add", "{}")]),
        ("mistral", f"[TOOL_CALLS][{{{ADD}}}, {{{ADD}}}]", ADDED * 2),
        ("mistral_args", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', ADDED),
    ],
)  # fmt: skip
def test_other_ways_to_write_calls(format: str, text: str, calls: Any) -> None:
    assert read(text, format) == (None, calls, "tool_calls")


def test_ends() -> None:
    cut = '<tool_call>{"name": "add", "arguments": {"a": 1'
    assert read(cut, "hermes", "length") == (None, [("add", '{"a": 1')], "length")
    both = f"<tool_call>{{{ADD}}}</tool_call>"
    content, calls, _ = read(f"A\n{both} B {both}", "hermes", parallel=False)
    assert (content, len(calls)) == ("A\n B", 1)
    assert len({format.new_id() for format in FORMATS for _ in range(9)}) == 9 * len(FORMATS)
    assert {len(BY_NAME["mistral"].new_id()) for _ in range(9)} == {9}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": ["string", "null"]}, "1", "1"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", 1),
        ({"$ref": "#/$defs/digit"}, "1", "1"),
        ({"type": "boolean"}, "True", True),
        ({}, '{"b": [1]}', {"b": [1]}),
        ({}, "x y", "x y"),
    ],
)
def test_schemas_tell_texts_from_the_rest(schema: Any, text: str, value: Any) -> None:
    whole = {"properties": {"a": schema}, "$defs": {"digit": {"enum": ["1", "2"]}}}
    call = f"<tool_call><function=add><parameter=a>{text}</parameter></function></tool_call>"
    _, ((_, arguments),), _ = read(call, "qwen3_coder", add=whole)
    assert json.loads(arguments) == {"a": value}
