"""OpenAI's own Python client against the server: what it sends is taken, what it gets it parses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serving.http.limits import Options
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, Live, serving
from tests.waiting import PATIENCE

openai = pytest.importorskip("openai")

ASK: Any = [{"role": "user", "content": "hi"}]
PROMPT = "User: hi\n\nAssistant:"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(options=Options(api_keys=("secret",))) as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    url = f"{live.url}/v1"
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=PATIENCE) as made:
        yield made


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completions(live: Live, client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=9, seed=5, n=2, logprobs=1, echo=True,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )  # fmt: skip
    for i, choice in enumerate(answer.choices):
        assert choice.text == "hello" + live.alone("hello", 9, 5 + i)
        assert "".join(choice.logprobs.tokens) == choice.text
    assert answer.usage.completion_tokens == 18


def test_a_stream_of_completions(live: Live, client: Any) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=9, seed=5, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
    assert text == live.alone("hello", 9, 5)
    assert chunks[-1].usage.total_tokens == 14


def test_chats(live: Live, client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_completion_tokens=9, seed=5, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.message.content == live.alone(PROMPT, 9, 5)
    assert choice.finish_reason == "length"
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert all(len(one.top_logprobs) == 3 for one in choice.logprobs.content)


def test_a_stream_of_chats(live: Live, client: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=9, seed=5, stream=True, n=2
    )
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [live.alone(PROMPT, 9, 5), live.alone(PROMPT, 9, 6)]


def test_leaving_a_stream_frees_the_slot(live: Live, client: Any) -> None:
    with client.completions.create(
        model=MODEL, prompt="hello", max_tokens=50, stream=True
    ) as stream:
        next(iter(stream))
    live.wait_idle()


def test_errors_are_of_its_own_kinds(live: Live, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="there is no 'other' here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError, match="an API key is needed"):
        client.with_options(api_key="wrong").models.list()


def test_an_error_in_the_midst_of_a_stream() -> None:
    with serving(FakeBackend(fail_after=4)) as live:
        url = f"{live.url}/v1"
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE) as client:
            stream = client.completions.create(model=MODEL, prompt="a", max_tokens=40, stream=True)
            with pytest.raises(openai.APIError, match="the device is gone"):
                list(stream)
