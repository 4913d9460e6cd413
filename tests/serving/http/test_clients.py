"""Libraries that people build upon OpenAI's client: litellm, LangChain, instructor."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tests.serving.http.live import MODEL, serving
from tests.serving.http.test_openai_tools import TOOLS, Scripted
from tests.serving.http.tools.templates import TEMPLATES

CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
SAID = b"<tool_call>\n" + json.dumps(CALL).encode() + b"\n</tool_call>"
ASK: Any = [{"role": "user", "content": "What is 1 + 2?"}]


class Numbers(BaseModel):
    """Two numbers."""

    a: int
    b: int


def answering(script: bytes) -> Any:
    backend = Scripted()
    backend.script = script
    return serving(backend, chat_template=TEMPLATES["hermes"])


def test_litellm() -> None:
    litellm = pytest.importorskip("litellm")
    with answering(SAID) as live:
        to: Any = {"model": f"openai/{MODEL}", "api_base": f"{live.url}/v1", "api_key": "x"}
        (call,) = litellm.completion(messages=ASK, tools=TOOLS, **to).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == tuple(CALL.values())
        parts = [*litellm.completion(messages=ASK, tools=TOOLS, stream=True, **to)]
        whole = litellm.stream_chunk_builder(parts).choices[0].message.tool_calls[0]
        assert json.loads(whole.function.arguments) == CALL["arguments"]
        with pytest.raises(litellm.BadRequestError, match="temperature"):
            litellm.completion(messages=ASK, temperature=-1, **to)
    with answering(b"Three.") as live:
        to["api_base"] = f"{live.url}/v1"
        answer = litellm.completion(messages=ASK, **to)
        assert answer.choices[0].message.content == "Three." and answer.usage.completion_tokens
        assert litellm.text_completion(prompt="x", **to).choices[0].text == "Three."


def test_langchain() -> None:
    openai = pytest.importorskip("langchain_openai")
    with answering(SAID) as live:
        model = openai.ChatOpenAI(model=MODEL, base_url=f"{live.url}/v1", api_key="x")
        (call,) = model.bind_tools(TOOLS).invoke("What is 1 + 2?").tool_calls
        assert (call["name"], call["args"]) == tuple(CALL.values())
        whole: Any = None
        for part in model.bind_tools(TOOLS).stream("What is 1 + 2?"):
            whole = part if whole is None else whole + part
        assert whole.tool_calls[0]["args"] == CALL["arguments"]
    with answering(b'{"a": 1, "b": 2}') as live:
        model = openai.ChatOpenAI(model=MODEL, base_url=f"{live.url}/v1", api_key="x")
        for method in ("json_schema", "json_mode"):
            asked = model.with_structured_output(Numbers, method=method)
            assert asked.invoke("Two numbers as JSON.") == Numbers(a=1, b=2)
        assert "".join(one.content for one in model.stream("x")) == '{"a": 1, "b": 2}'


def test_instructor() -> None:
    instructor, openai = (pytest.importorskip(name) for name in ("instructor", "openai"))
    said = {"TOOLS": SAID.replace(b"add", b"Numbers"), "JSON_SCHEMA": b'{"a": 1, "b": 2}'}
    for mode, script in said.items():
        with answering(script) as live:
            plain = openai.OpenAI(base_url=f"{live.url}/v1", api_key="x")
            client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
            found = client.chat.completions.create(
                model=MODEL, messages=ASK, response_model=Numbers
            )
            assert found.model_dump() == {"a": 1, "b": 2}
