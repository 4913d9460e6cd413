"""`/v1/responses` with OpenAI's client: answers, streams, tools, thoughts, forms, refusals."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.http.live import MODEL, Live, begin, post
from tests.serving.http.test_chats import Noted
from tests.serving.http.test_openai_tools import NUMBER, TOOLS, chatting
from tests.serving.http.tools.templates import TEMPLATES

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

FLAT: list[Any] = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
CALLS = [("add", '{"a": 1, "b": 2}'), ("mul", '{"a": 3, "b": 4}')]


@pytest.fixture(scope="module")
def chat() -> Iterator[tuple[Live, Any]]:
    """A model that thinks, and calls functions, as its script says."""
    with chatting(Noted(), chat_template=TEMPLATES["qwen3_coder"]) as made:
        yield made


def script(live: Live, text: str, thought: str = "\nHm?\n") -> None:
    live.backend.script = f"{thought}</think>\n\n{text}".encode()  # type: ignore[attr-defined]


def written(live: Live) -> str:
    format = live.service.language().template.tool_format
    return "\n".join(format.written(name, json.loads(text)) for name, text in CALLS)


def ask(client: Any, **more: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": "1 + 1?", "timeout": 60, **more})


def plain(response: Any) -> Any:
    """A response without what differs from one request to the next."""
    told = response.model_dump()
    ids = {"id", "call_id", "created_at", "completed_at", "usage"}
    told["output"] = [{k: v for k, v in one.items() if k not in ids} for one in told["output"]]
    return {key: value for key, value in told.items() if key not in ids}


def test_a_text_whole_and_streamed(chat: Any) -> None:
    live, client = chat
    script(live, "It is 2.")
    more = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "store": True}
    response = ask(client, **more)
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm?")
    assert (message.status, message.content[0].text) == ("completed", "It is 2.")
    assert (response.output_text, response.status) == ("It is 2.", "completed")
    assert response.metadata == {"a": "b"} and response.temperature == 0.5
    assert response.instructions == "Be brief." and response.store is False
    assert "Be brief." in live.backend.prompt and "1 + 1?" in live.backend.prompt
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == len(live.backend.prompt)
    events = list(ask(client, stream=True, **more))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_text.delta", "output_text.done", "completed",
    ]  # fmt: skip
    assert kinds.count("output_item.added") == 2 and kinds.count("output_text.delta") >= 1
    assert plain(events[-1].response) == plain(response)
    assert events[-1].response.usage.input_tokens_details.cached_tokens > 0
    assert events[0].response.usage is None and events[0].response.output == []


def test_calls_and_their_results(chat: Any) -> None:
    live, client = chat
    script(live, f"Sums.\n{written(live)}")
    response = ask(client, tools=FLAT)
    items = response.output[2:]
    assert [(one.name, one.arguments) for one in items] == CALLS
    with client.responses.stream(model=MODEL, input="1 + 1?", tools=FLAT) as stream:
        final = stream.get_final_response()
    events = list(ask(client, tools=FLAT, stream=True))
    assert plain(events[-1].response) == plain(response)
    assert [one.type for one in final.output] == ["reasoning", "message", *["function_call"] * 2]
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [(e.name, e.arguments) for e in done] == CALLS
    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": f"= {one.name}"}
        for one in items
    ]
    script(live, "3 and 12.")
    history = [{"role": "user", "content": [{"type": "input_text", "text": "Sums?"}]}]
    answer = ask(client, input=[*history, *response.output, *results], tools=FLAT)
    assert answer.output_text == "3 and 12."
    prompt = live.backend.prompt
    assert prompt.index("Sums?") < prompt.index("Hm?") < prompt.index("Sums.\n")
    assert prompt.index("<function=mul>\n<parameter=a>") < prompt.index("= add")
    assert prompt.count("<|im_start|>assistant") == 2  # one message, and the answer's beginning
    script(live, written(live))
    assert ask(client, tools=FLAT, tool_choice="none").output_text == written(live)
    named = {"type": "function", "name": "mul"}
    (_, call) = ask(client, tools=FLAT, tool_choice=named, max_output_tokens=400).output
    assert call.name == "mul"


def test_forms(chat: Any) -> None:
    live, client = chat

    class Sum(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        total: int

    script(live, '{"total": 2}')
    assert client.responses.parse(model=MODEL, input="?", text_format=Sum).output_parsed.total == 2
    with client.responses.stream(model=MODEL, input="?", text_format=Sum) as stream:
        assert stream.get_final_response().output_parsed.total == 2
    form = {"type": "json_schema", "name": "x", "schema": NUMBER}
    assert 0 <= int(ask(client, text={"format": form}, extra_body={"seed": 3}).output_text) < 100
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema: "):
        ask(client, text={"format": {**form, "schema": {"type": "array", "uniqueItems": True}}})


def test_an_answer_that_is_cut(chat: Any) -> None:
    live, client = chat
    script(live, "It is 2.", "")
    response = ask(client, max_output_tokens=14)
    assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    last = list(ask(client, max_output_tokens=14, stream=True))[-1]
    assert last.type == "response.incomplete" and plain(last.response) == plain(response)
    live.backend.script = b"Hm"  # type: ignore[attr-defined]
    assert [one.type for one in ask(client).output] == ["reasoning"]
    off = ask(client, reasoning={"effort": "none", "summary": "auto"})
    assert off.output_text == "Hm" and off.reasoning.effort == "none"


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is kept here"),
        ({"conversation": "c"}, "conversation: nothing is kept here"),
        ({"background": True}, "background: nothing is kept here"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type: there are no built-in tools here"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name: 1 to 64 letters"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type: function is served"),
        ({"input": []}, "input: a string or a list of items is needed, not a list of 0"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, r"input\[0\].type: message, function"),
        ({"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[1\]"),
        ({"input": [{"type": "function_call", "name": 1}]}, r"input\[0\].name: a string is needed"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, r"input\[0\].call_id: a "),
        ({"input": [{"type": "reasoning", "content": 1}]}, r"input\[0\].content: a string or"),
        ({"input": "x" * 9000}, "in the messages"),
        ({"max_output_tokens": 0}, "max_output_tokens: an integer from 1 to"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: not served"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: text, json_object or"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort: one of none, "),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary: not served"),
        ({"include": ["message.output_text.logprobs"]}, "include: log-probabilities are served at"),
        ({"top_logprobs": 2}, "top_logprobs: not served"),
        ({"truncation": "auto"}, "truncation: not served"),
        ({"extra_body": {"max_tokens": 3}}, "use max_output_tokens instead of max_tokens"),
        ({"extra_body": {"n": 2}}, "n: not served"),
    ],
)
def test_what_is_not_served_is_said(chat: Any, given: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        ask(chat[1], **given)


def test_unknown_fields_failures_and_clients_that_leave(chat: Any, monkeypatch: Any) -> None:
    live, client = chat
    script(live, "x" * 4000)
    body = {"input": "?", "stream": True, "strange": 1, "max_output_tokens": 1}
    answer = post(f"{live.url}/v1/responses", json=body)
    assert answer.headers["Warning"] == '299 spmd "ignored: strange"'
    assert answer.text.startswith("event: response.created\ndata: {")
    with begin(live, "/v1/responses", {**body, "max_output_tokens": 4000}) as one:
        assert one.recv(100)
    live.wait_idle()
    assert "/v1/responses" in live.service.traffic.render().decode()

    def fail(*_: Any) -> int:
        raise RuntimeError("burnt")

    monkeypatch.setattr(live.backend, "_next", fail)
    last = list(ask(client, stream=True))[-1]
    assert last.type == "response.failed" and "burnt" in last.response.error.message
    with pytest.raises(openai.InternalServerError, match="burnt"):
        ask(client)
