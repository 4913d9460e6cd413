"""Tools in prompts: what templates get of them, and how formats are found out."""

from typing import Any

import pytest

from spmd.serving.errors import ApiError, ServingError
from spmd.serving.http.chat_template import ChatTemplate
from spmd.serving.http.limits import ServerOptions
from spmd.serving.http.messages import parse_messages
from tests.serving.http.tools.templates import NONE, TEMPLATES, UNKNOWN

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "id": "abc123DEF",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": "é<"}'},
}
HISTORY: list[Any] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "abc123DEF"},
    {"role": "user", "content": "Thanks"},
]
MESSAGES = parse_messages(HISTORY)


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_those_of_templates(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name])
    assert template.knows_tools
    assert template.tool_format.name == name


@pytest.mark.parametrize(
    ("format", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é<"}}\n</tool_call>'),
        ("llama", '{"name": "add", "parameters": {"a": 1, "b": "é<"}}<|eot_id|>'),
        ("mistral", '[{"name": "add", "arguments": {"a": 1, "b": "é<"}, "id": "abc123DEF"}]</s>'),
        ("mistral_args", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "é<"}[TOOL_RESULTS]2'),
    ],
)
def test_calls_and_results_are_rendered(format: str, call: str) -> None:
    """Arguments are objects to templates that write JSON of them, and texts to the others."""
    template = ChatTemplate(TEMPLATES[format])
    text = template.render(MESSAGES, tools=[TOOL])
    assert call in text and '"name": "add"' in text
    assert "function" not in template.render(MESSAGES[:1])


@pytest.mark.parametrize("format", ["hermes", "llama", "mistral"])
def test_texts_are_those_of_transformers(format: str) -> None:
    pytest.importorskip("transformers")
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template
    ((theirs,), _) = render([list(MESSAGES)], tools=[TOOL], chat_template=TEMPLATES[format])
    assert ChatTemplate(TEMPLATES[format]).render(MESSAGES, False, [TOOL]) == theirs


def test_tools_are_described_to_templates_that_know_none() -> None:
    plain = ChatTemplate()
    assert plain.render(MESSAGES, tools=[TOOL]) == (
        "System: You can call functions. Each line describes one, with a JSON schema of its "
        'arguments:\n{"name": "add", "parameters": {"type": "object"}}\n'
        "To call a function, write its name and its arguments in exactly this form, once for each "
        'call:\n<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>\n'
        "The results are in the next message.\n\nUser: 1 + 1?\n\n"
        'Assistant: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é<"}}\n</tool_call>'
        "\n\nUser: Result of add:\n2\n\nUser: Thanks\n\nAssistant:"
    )
    told = ChatTemplate(NONE, tool_format="mistral_args")
    assert "[TOOL_CALLS]NAME[ARGS]{" in told.render(MESSAGES, tools=[TOOL])
    kind = parse_messages([{"role": "system", "content": "Be kind."}, *HISTORY])
    assert plain.render(kind, tools=[TOOL]).startswith("System: Be kind.\n\nYou can call")
    text = plain.render(parse_messages([*HISTORY[:3], {**HISTORY[2], "tool_call_id": "?"}]))
    assert "User: Result of add:\n2\n\nResult of a function:\n2\n\nAssistant:" in text


def test_formats_that_nobody_knows() -> None:
    with pytest.raises(ApiError, match=r"in none of the formats hermes.*; leave them out"):
        _ = ChatTemplate(UNKNOWN).tool_format
    with pytest.raises(ApiError, match="knows no tools; leave them out"):
        _ = ChatTemplate(NONE).tool_format
    assert ChatTemplate(UNKNOWN, tool_format="llama").tool_format.name == "llama"
    assert "{'type'" in ChatTemplate(UNKNOWN, tool_format="llama").render(MESSAGES, tools=[TOOL])
    with pytest.raises(ServingError, match=r"tool_format is 'x'; it has to be one of hermes, "):
        ServerOptions(tool_format="x")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("tool_calls: only of", {"role": "user", "content": "", "tool_calls": [CALL]}),
        (r"tool_calls\[0\].function: an", {"role": "assistant", "tool_calls": [1]}),
        ("tool_calls: a list", {"role": "assistant", "tool_calls": CALL}),
        ("content: a string", {"role": "user", "content": None}),
        ("tool_call_id: a string", {"role": "tool", "content": "2"}),
        (
            r"tool_calls\[0\].function.arguments: a JSON object is needed, not \"\[1\]\"",
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "add", "arguments": "[1]"}}],
            },
        ),
    ],
)
def test_messages_that_do_not_fit(place: str, message: Any) -> None:
    with pytest.raises(ApiError, match=rf"^messages\[0\]\.{place}"):
        parse_messages([message])
