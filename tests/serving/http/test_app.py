"""The app over a real socket: exact answers of every endpoint, to httpx and to OpenAI's client."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from spmd.serving.engine.actions import Counts
from spmd.serving.engine.core import Core
from spmd.serving.engine.records import EngineState, StepRecord
from spmd.serving.http.metrics import Metrics
from spmd.serving.http.traffic import RequestMetrics
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.http.live import MODEL, Live
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=PATIENCE) as made:
        yield made


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(client: httpx.Client, status: int = 400, path: str = "completions", **body: Any) -> Any:
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def events(text: str) -> list[Any]:
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part[6:]) for part in parts]


def test_a_completion(live: Live, client: httpx.Client) -> None:
    before = int(time.time())
    answer = complete(client, model=MODEL, prompt="hello", max_tokens=8, seed=3)
    assert re.fullmatch("cmpl-[0-9a-f]{32}", answer.pop("id"))
    assert before <= answer.pop("created") <= time.time()
    text = live.alone("hello", 8, 3)
    assert answer["usage"].pop("prompt_tokens_details")["cached_tokens"] in (0, 4)
    assert answer == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13},
    }


def test_the_bytes_of_a_stream(live: Live, client: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "seed": 3, "stream": True}
    response = client.post("/v1/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    first = json.loads(response.text.split("\n")[0][6:])
    head = f'"id":"{first["id"]}","object":"text_completion","created":{first["created"]}'
    texts = [chunk["choices"][0]["text"] for chunk in events(response.text)]
    expected = ""  # a slow reader gets several letters at once
    for i, text in enumerate(texts):
        finish = '"length"' if i == len(texts) - 1 else "null"
        expected += (
            f'data: {{{head},"model":"{MODEL}","choices":[{{"index":0,"text":"{text}",'
            f'"logprobs":null,"finish_reason":{finish}}}]}}\n\n'
        )
    assert response.text == expected + "data: [DONE]\n\n"
    assert "".join(texts) == live.alone("hello", 3, 3)


def test_a_chat(live: Live, client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_completion_tokens": 6}
    answer = client.post("/v1/chat/completions", json=body).json()
    text = live.alone("User: hi\n\nAssistant:", 6, 1)
    message = {"role": "assistant", "content": text, "refusal": None}
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    ]
    counts = {"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26}
    assert answer["usage"].items() >= counts.items()


def test_tokens_that_the_cache_held(client: httpx.Client) -> None:
    body = {"prompt": "what nobody says but this test, 42 letters", "max_tokens": 1}
    # Pages of 4, and the last token is run in any case.
    for n, salt, cached in ((1, "", 0), (1, "", 40), (2, "", 40), (1, "a", 0), (2, "a", 40)):
        usage = complete(client, **body, n=n, cache_salt=salt)["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_a_chat_as_a_stream(live: Live, client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "seed": 1, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    chunks = events(client.post("/v1/chat/completions", json=body).text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, *deltas, last = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert (first, last) == ({"role": "assistant", "content": ""}, {})
    letters = "".join(delta["content"] for delta in deltas)
    assert letters == live.alone("User: hi\n\nAssistant:", 3, 1)
    finish = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert finish == [None] * (len(deltas) + 1) + ["length"]
    usage = {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23}
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}
    assert chunks[-1]["usage"].items() >= usage.items()
    assert chunks[-1]["choices"] == []
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.post("/v1/chat/completions", json=body).text)
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == sorted(made) and made[1] >= 1 and chunks[-1]["usage"].items() >= usage.items()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_ignored_fields_are_named(
    live: Live, client: httpx.Client, path: str, asked: dict[str, Any], stream: bool
) -> None:
    body = {**asked, "max_tokens": 2, "stream": stream, "logit_bias": None}
    assert "warning" not in client.post(f"/v1/{path}", json=body).headers
    strange = {"min_tokns": 1, "a\nb": 2, **{f"x{i}": i for i in range(8)}}
    response = client.post(f"/v1/{path}", json={**body, **strange})
    assert response.status_code == 200
    assert response.headers["warning"] == (
        '299 spmd "ignored: min_tokns, ?, x0, x1, x2, x3, x4, x5, and 2 more"'
    )


def test_many_prompts_and_choices(live: Live, client: httpx.Client) -> None:
    answer = complete(client, prompt=["ab", "cd"], n=2, max_tokens=5, seed=7)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [live.alone(prompt, 5, seed) for prompt in ("ab", "cd") for seed in (7, 8)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], ["hi"], "hi"])
def test_the_forms_of_a_prompt(live: Live, client: httpx.Client, prompt: Any) -> None:
    answer = complete(client, prompt=prompt, max_tokens=4, seed=0)
    assert answer["choices"][0]["text"] == live.alone("hi", 4)


def test_an_empty_prompt_begins_a_document(live: Live, client: httpx.Client) -> None:
    answer = complete(client, prompt="", max_tokens=4, seed=0, echo=True)
    assert answer["choices"][0]["text"] == live.alone("\0", 4)


def test_stops(live: Live, client: httpx.Client) -> None:
    whole = live.alone("hello", 30)
    for stop in (whole[5:8], [whole[5:8], "never"]):
        (choice,) = complete(client, prompt="hello", max_tokens=30, seed=0, stop=stop)["choices"]
        assert choice["text"] == whole[: whole.index(whole[5:8])]
        assert choice["finish_reason"] == "stop"
    body = {"prompt": "hello", "max_tokens": 30, "seed": 0, "stop": whole[5:8], "stream": True}
    streamed = events(client.post("/v1/completions", json=body).text)
    text = "".join(chunk["choices"][0]["text"] for chunk in streamed)
    assert text == whole[: whole.index(whole[5:8])]


def test_log_probabilities(live: Live, client: httpx.Client) -> None:
    (choice,) = complete(client, prompt="hé", max_tokens=2, seed=0, logprobs=2)["choices"]
    a, b = choice["text"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": [a, b],
        "top_logprobs": [{a: -0.5, chr(ord(a) + 1): -1.5}, {b: -0.5, chr(ord(b) + 1): -1.5}],
    }


def test_echo_with_log_probabilities(live: Live, client: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "hé", "seed": 0, "logprobs": 0, "echo": True}
    (choice,) = complete(client, **body, max_tokens=1)["choices"]
    a = live.alone("hé", 1)
    assert choice["text"] == "hé" + a
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 1, 2],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "tokens": ["h", "", "é", a],
        "top_logprobs": None,
    }
    answer = complete(client, **body, max_tokens=0)
    assert answer["choices"][0]["text"] == "hé"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["h", "", "é"]
    assert answer["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_a_chat(client: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 1,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    a = choice["message"]["content"]
    other = chr(ord(a) + 1)
    first = {"token": a, "logprob": -0.5, "bytes": [ord(a)]}
    second = {"token": other, "logprob": -1.5, "bytes": [ord(other)]}
    assert choice["logprobs"]["content"] == [{**first, "top_logprobs": [first, second]}]


BAD: dict[str, list[Any]] = {
    "prompt": [
        [], [[]], [["a"]], [256], [-1], [1.5], [True], {"a": 1}, ["a"] * 40, "\ud800",
    ],
    "max_tokens": [-1, "5", 10**100, 1.5, True],
    "temperature": [-0.1, "hot", 1e300],
    "top_p": [0, 1.1],
    "top_k": [-2],
    "min_p": [2],
    "repetition_penalty": [0],
    "presence_penalty": [2.5],
    "frequency_penalty": [-3],
    "n": [0, 33],
    "seed": [2**63],
    "stop": [["x"] * 17, "", [1], "x" * 257],
    "stop_token_ids": [[256]],
    "logprobs": [6, True],
    "prompt_logprobs": [6],
    "stream": [1],
    "stream_options": [{}],
    "user": [7],
    "best_of": [2],
    "suffix": ["b"],
    "logit_bias": [{"256": 2}, {"1": 101}, {"x": 1}, [1]],
    "allowed_token_ids": [[256]],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}],
    "guided_json": ["{", {"type": "objct"}],
    "guided_regex": ["("],
    "guided_choice": [["a", ""]],
    "guided_grammar": ["start: nothing"],
    "structured_outputs": [{"regex": "a", "json": "{}"}, {"xml": "a"}],
}  # fmt: skip
BAD_TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("n", {"prompt": ["a"] * 8, "n": 8}),
    ("stream_options", {"stream": True, "stream_options": 3}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("min_tokens", {"min_tokens": 3, "max_tokens": 2}),
    ("min_tokens", {"min_tokens": 1, "allowed_token_ids": [0]}),
    ("guided_choice", {"guided_regex": "a", "guided_choice": ["a"]}),
]


@pytest.mark.parametrize(
    ("param", "body"),
    [*((name, {name: value}) for name, values in BAD.items() for value in values), *BAD_TOGETHER],
)
def test_what_does_not_fit_is_refused_by_name(client: httpx.Client, param: str, body: Any) -> None:
    content = json.dumps(
        {"prompt": "a", **body}
    ).encode()  # httpx itself would refuse halves of surrogate pairs
    response = client.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": ["hi"]}),
        ("messages", {"messages": [{"role": "robot", "content": "hi"}]}),
        ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": [{"role": "user", "content": 3}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages", {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
        ("max_tokens", {"max_tokens": 0}),
    ],
)
def test_what_a_chat_refuses(client: httpx.Client, param: str, body: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | body
    assert refused(client, path="chat/completions", **body)["param"] == param


def test_fields_that_nobody_knows_and_those_that_ask_for_nothing(client: httpx.Client) -> None:
    complete(
        client, prompt="a", max_tokens=1, banana=3, best_of=1, tools=[], logit_bias={},
        presence_penalty=0.0, frequency_penalty=0, response_format={"type": "text"}, suffix=None,
        stop=None, stop_token_ids=[], min_tokens=0,
    )  # fmt: skip


def test_models(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 64)
    assert client.get(f"/v1/models/{MODEL}").json() == card
    assert client.get("/v1/models/other").status_code == 404
    assert refused(client, 404, model="other", prompt="a")["code"] == "model_not_found"


def test_what_is_not_there(client: httpx.Client) -> None:
    response = client.get("/v1/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/static/../app.py").status_code == 404


def test_metrics(live: Live, client: httpx.Client) -> None:
    label = '{model_name="fake-llama"}'
    live.wait_idle()
    before = live.numbers()
    complete(client, prompt="metrics", max_tokens=12, seed=0)
    live.wait_idle()
    assert client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    after = live.numbers()
    assert all(label[1:-1] in name for name in after if name.startswith("vllm:"))
    grown = {name: after[name] - before[name] for name in before}
    assert grown[f"vllm:prompt_tokens_total{label}"] == 7
    assert grown[f"vllm:generation_tokens_total{label}"] == 12
    assert grown[f"vllm:prefix_cache_queries_total{label}"] == 7
    assert grown[f"spmd:wasted_tokens_total{label}"] == 0
    reason = '{finished_reason="length",model_name="fake-llama"}'
    assert grown[f"vllm:request_success_total{reason}"] == 1
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_time_per_output_token_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    ):  # fmt: skip
        assert grown[f"vllm:{name}_count{label}"] == 1, name
    assert grown[f"vllm:inter_token_latency_seconds_count{label}"] == 11
    assert grown[f"vllm:iteration_tokens_total_count{label}"] == 12  # the prompt, and 11 tokens
    assert grown[f"vllm:num_preemptions_total{label}"] == 0
    assert grown[f"spmd:pages_cached{label}"] == 4  # of 4 tokens; 18 were run
    assert after[f"spmd:pages{label}"] == 64 and after[f"spmd:pages_held{label}"] == 0
    assert after[f"vllm:num_requests_running{label}"] == 0
    assert after[f"vllm:kv_cache_usage_perc{label}"] == 0
    assert after[f"spmd:compile_total{label}"] == 3
    assert after[f"spmd:roofline_fraction{label}"] > 0
    assert any(name.startswith("vllm:cache_config_info{") for name in after)


# OpenAI's own Python client: what it sends is taken, what it gets it parses.

openai = pytest.importorskip("openai")


def openai_client(live: Live) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=PATIENCE)


def test_openais_client(live: Live) -> None:
    more: Any = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
    asked: Any = {"model": MODEL, "max_tokens": 9, "seed": 5, "n": 2}
    messages: Any = [{"role": "user", "content": "hi"}]
    with openai_client(live) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        answer = client.completions.create(
            **asked, prompt="hello", logprobs=1, echo=True, extra_body=more
        )
        for i, choice in enumerate(answer.choices):
            assert choice.text == "hello" + live.alone("hello", 9, 5 + i)
            assert "".join(choice.logprobs.tokens) == choice.text
        texts = ["", ""]
        for chunk in client.chat.completions.create(**asked, messages=messages, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [live.alone("User: hi\n\nAssistant:", 9, 5 + i) for i in range(2)]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=MODEL, prompt="a", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="there is no 'other' here"):
            client.completions.create(model="other", prompt="a")


def metrics_of(state: EngineState) -> Metrics:
    requests = RequestMetrics("m", lambda: (state.running, state.waiting))
    return Metrics(requests, Core(FakeBackend()), lambda: state)


def test_the_roofline_counts_what_is_read() -> None:
    metrics = metrics_of(EngineState(0, 0, 64, 0, 0, Counts()))
    assert metrics.roofline_fraction() is None
    metrics.ran(step(64, 0.004))
    assert metrics.roofline_fraction() == pytest.approx(1.064e6 / 1e9 / 0.004)
    metrics.ran(step(100, 0.5, {0: (7, True)}))
    assert metrics.roofline_fraction() == pytest.approx(1.064e6 / 1e9 / 0.004)
    for _ in range(500):
        metrics.ran(step(256, 0.002))
    assert metrics.roofline_fraction() == pytest.approx(1.256e6 / 1e9 / 0.002)


def step(seen: int, seconds: float, chunks: Any = None) -> StepRecord:
    return StepRecord(1.0, 1.0 + seconds, 0.0, 0.0, 2, 0, seen, (0, 1), chunks or {})


def test_pages_are_shown() -> None:
    counts = Counts(prefilled=5, reused=7, repeated=11, preempted=2)
    metrics = metrics_of(EngineState(3, 4, 64, 16, 8, counts))
    text = generate_latest(metrics.requests.registry).decode()
    for name, value in {
        "vllm:kv_cache_usage_perc": 0.25, "spmd:pages": 64, "spmd:pages_held": 16,
        "spmd:pages_cached": 8, "vllm:num_preemptions_total": 2, "spmd:repeated_tokens_total": 11,
        "vllm:prefix_cache_hits_total": 7, "vllm:prompt_tokens_total": 12,
    }.items():  # fmt: skip
        assert f'{name}{{model_name="m"}} {float(value)}\n' in text
    assert 'block_size="4"' in text and 'num_gpu_blocks="64"' in text
