"""`/v1/messages` with Anthropic's client: answers, streams, tools, thoughts, forms, refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spmd.serving.http.limits import ServerOptions
from tests.serving.http.live import MODEL, Live, begin, post, serving
from tests.serving.http.test_chats import Noted
from tests.serving.http.test_openai_responses import CALLS, written
from tests.serving.http.test_openai_tools import NUMBER, TOOLS
from tests.serving.http.tools.templates import NONE, TEMPLATES
from tests.waiting import PATIENCE

anthropic = pytest.importorskip("anthropic")

FUNCTIONS = [tool["function"] for tool in TOOLS]
FLAT: list[Any] = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
ON: Any = {"type": "enabled", "budget_tokens": 2000}
USER: Any = {"role": "user", "content": "1 + 1?"}


@contextmanager
def messaging(template: str, **more: Any) -> Iterator[tuple[Live, Any]]:
    with (
        serving(Noted(), chat_template=template, **more) as live,
        anthropic.Anthropic(
            base_url=live.url, api_key="x", max_retries=0, timeout=PATIENCE
        ) as client,
    ):
        yield live, client


@pytest.fixture(scope="module")
def chat() -> Iterator[tuple[Live, Any]]:
    """A model that thinks if it is asked to, and calls functions, as its script says."""
    with messaging(TEMPLATES["qwen3_coder"]) as made:
        yield made


def script(live: Live, text: str, thought: str = "") -> None:
    live.backend.script = f"{thought}{text}".encode()  # type: ignore[attr-defined]


def ask(client: Any, **more: Any) -> Any:
    given = {"model": MODEL, "messages": [USER], "max_tokens": 1000, **more}
    return client.messages.create(**given)


def streamed(client: Any, **more: Any) -> Any:
    """The message that the client makes of a stream."""
    given = {"model": MODEL, "messages": [USER], "max_tokens": 1000, **more}
    with client.messages.stream(**given) as stream:
        return stream.get_final_message()


def plain(message: Any) -> Any:
    told = message.model_dump(exclude={"id", "usage"})
    told["content"] = [
        {key: value for key, value in block.items() if key not in ("id", "parsed_output")}
        for block in told["content"]
    ]
    return told


def test_a_text_whole_and_streamed(chat: Any) -> None:
    live, client = chat
    script(live, "It is 2. END Not 3.")
    more = {"system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["x", " END"]}
    drawn = {
        "top_k": 3,
        "temperature": 0.5,
        "top_p": 0.5,
    }  # the client's newest release has no names
    message = ask(client, **more, metadata={"user_id": "me"}, extra_body=drawn)
    assert [(one.type, one.text) for one in message.content] == [("text", "It is 2.")]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " END")
    assert "Be brief." in live.backend.prompt and "1 + 1?" in live.backend.prompt
    assert (live.backend.noted.top_k, live.backend.noted.temperature) == (3, 0.5)
    again = streamed(client, **more)
    assert plain(again) == plain(message) and again.usage.cache_read_input_tokens > 0
    size = len(live.backend.prompt)
    assert again.usage.cache_read_input_tokens + again.usage.input_tokens == size
    counted = client.messages.count_tokens(model=MODEL, messages=[USER], system="Be brief.")
    assert counted.input_tokens == size
    assert list(dict.fromkeys([event.type for event in ask(client, stream=True)])) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    for answer in (ask(client, max_tokens=4), streamed(client, max_tokens=4)):
        assert (answer.stop_reason, answer.content[0].text) == ("max_tokens", "It i")
    script(live, " and 4.")
    begun = {"role": "assistant", "content": "2"}
    assert ask(client, messages=[USER, begun]).content[0].text == " and 4."
    assert live.backend.prompt.endswith("2")


def test_thoughts_where_they_are_asked_for(chat: Any) -> None:
    live, client = chat
    script(live, "2", "\nHm?\n</think>\n\n")
    for message in (ask(client, thinking=ON), streamed(client, thinking=ON)):
        thought, text = message.content
        assert (thought.thinking, thought.signature, text.text) == ("Hm?", "", "2")
    history = [USER, {"role": "assistant", "content": message.content}, USER]
    ask(client, messages=history, thinking=ON)
    hidden = {"type": "adaptive", "display": "omitted"}
    assert [one.type for one in ask(client, thinking=hidden).content] == ["text"]
    few = ask(client, thinking={**ON, "budget_tokens": 1}).content
    assert few[0].type == "thinking" or few[0].text
    script(live, "2")
    for off in ({}, {"thinking": {"type": "disabled"}}):
        assert [one.type for one in ask(client, **off).content] == ["text"]
        assert live.backend.prompt.endswith("</think>\n\n")


def test_calls_and_their_results(chat: Any) -> None:
    live, client = chat
    script(live, f"Sums.\n{written(live)}")
    message = ask(client, tools=FLAT)
    assert message.stop_reason == "tool_use" and message.content[0].text == "Sums."
    calls = message.content[1:]
    assert [(one.name, one.input) for one in calls] == [
        ("add", {"a": 1, "b": 2}), ("mul", {"a": 3, "b": 4}),
    ]  # fmt: skip
    assert plain(streamed(client, tools=FLAT)) == plain(message)
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": f"= {one.name}", "is_error": True}
        for one in calls
    ]
    script(live, "3 and 12.")
    after = {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]}
    history = [USER, {"role": "assistant", "content": message.content}, after]
    assert ask(client, messages=history, tools=FLAT).content[0].text == "3 and 12."
    prompt = live.backend.prompt
    assert prompt.index("Sums.") < prompt.index("<function=mul>\n<parameter=a>")
    assert prompt.index("Error: = add") < prompt.index("Error: = mul") < prompt.index("Well?")
    script(live, written(live))
    assert ask(client, tools=FLAT, tool_choice={"type": "none"}).content[0].text == written(live)
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(client, tools=FLAT, tool_choice=alone).content) == 1
    for choice in ({"type": "any"}, {"type": "tool", "name": "mul"}):
        assert ask(client, tools=FLAT, tool_choice=choice).content[-1].name == CALLS[1][0]
    cut = ask(client, tools=FLAT, max_tokens=60)
    assert cut.stop_reason == "max_tokens" and cut.content[0].input == {}


def test_a_form(chat: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": NUMBER}}
    assert 0 <= int(ask(chat[1], output_config=form).content[0].text) < 100


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\].type: there are no "),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"tools\[0\].name: 1 to 64 letters"),
        ({"tools": [{**FLAT[0], "defer_loading": True}]}, r"tools\[0\].defer_loading: not served"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: auto, any, tool or none"),
        ({"messages": []}, "messages: a list of messages is needed"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content\[0\]: text, "),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            r"messages\[0\].content\[0\].tool_use_id: a string is needed",
        ),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "maximum context length"),
        ({"max_tokens": 0}, "max_tokens: an integer from 1 to"),
        ({"stop_sequences": [""]}, "stop_sequences: strings have 1 to"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: enabled, disabled or adaptive"),
        ({"output_config": {"task_budget": 1}}, "output_config.task_budget: not served"),
        ({"output_config": {"effort": "low"}}, "output_config.effort: only with thinking"),
        ({"extra_body": {"context_management": {}}}, "context_management: not served"),
        ({"extra_body": {"stop": "x"}}, "use stop_sequences instead of stop"),
    ],
)
def test_what_is_not_served_is_said(chat: Any, given: Any, said: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said) as caught:
        ask(chat[1], **given)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_models_without_thoughts_keys_and_names() -> None:
    with messaging(NONE, options=ServerOptions(api_keys=("x",))) as (live, client):
        with pytest.raises(anthropic.BadRequestError, match="thinking: this model has no thoughts"):
            ask(client, thinking=ON)
        with pytest.raises(anthropic.NotFoundError, match="there is no 'other' here"):
            ask(client, model="other")
        script(live, "2")
        assert ask(client, thinking={"type": "disabled"}).content[0].text == "2"
        with pytest.raises(anthropic.AuthenticationError, match="an API key is needed"):
            ask(client.with_options(api_key="y"))


def test_failures_and_clients_that_leave(chat: Any, monkeypatch: Any) -> None:
    live, client = chat
    script(live, "x" * 4000)
    body = {"messages": [USER], "stream": True, "max_tokens": 1, "strange": 1}
    answer = post(f"{live.url}/v1/messages", json=body)
    assert answer.headers["Warning"] == '299 spmd "ignored: strange"'
    assert answer.text.startswith("event: message_start\ndata: {")
    del body["max_tokens"]
    error = post(f"{live.url}/v1/messages", json=body).json()
    assert error["type"] == "error" and error["request_id"]
    with begin(live, "/v1/messages", {**body, "max_tokens": 4000}) as one:
        assert one.recv(100)
    live.wait_idle()

    def fail(*_: Any) -> int:
        raise RuntimeError("burnt")

    monkeypatch.setattr(live.backend, "_next", fail)
    for call in (ask, streamed):
        with pytest.raises(anthropic.APIStatusError, match="burnt"):
            call(client)
