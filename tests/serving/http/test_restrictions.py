"""Fields that say which tokens a text may have, and what is told of prompts."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spmd.serving.engine.guide import words_of
from spmd.serving.grammar import compiler
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.engine.test_guides import brute_force
from tests.serving.http.live import MODEL, TEXT, Live, get, post, serving
from tests.waiting import PATIENCE, wait_until


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(FakeBackend(letters=False)) as running:
        yield running


def complete(live: Live, path: str = "completions", **body: Any) -> Any:
    response = post(f"{live.url}/v1/{path}", json={"max_tokens": 40, "seed": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()


def text(live: Live, **body: Any) -> str:
    (choice,) = complete(live, prompt="hello", **body)["choices"]
    made: str = choice["text"]
    return made


def test_biases(live: Live) -> None:
    assert text(live, logit_bias={"97": 100}) == "a" * 40
    assert text(live, allowed_token_ids=[97, 98], logit_bias={"97": -100.0}) == "b" * 40


WORDS = ["ab", " c", "bca", "aaa"]
BAD = [*map(tuple, (b"ab", b" ab", b"c", b" c", b"bca", b" bca", b"aaa", b" aaa"))]


@pytest.mark.parametrize(
    ("words", "bad"), [(WORDS, BAD), (["a", "c"], [(97,), (99,)]), ([], [])]
)  # fmt: skip
def test_bad_words(live: Live, words: list[str], bad: list[tuple[int, ...]]) -> None:
    """Each alone and behind a blank, beside all else that says which tokens may be drawn."""
    ids = [*b"abc d"]

    def expected(most: set[int], least: int = 0, end: int | None = None) -> str:
        def allowed(drawn: list[int]) -> Any:
            ends = {end} if len(drawn) < least else set()
            return words_of(most - ends - brute_force(bad, drawn), 256)

        return TEXT(live.backend.alone(b"hello", 40, 1, allowed))

    assert text(live, bad_words=words, allowed_token_ids=ids) == expected(set(ids))
    found = text(live, bad_words=words, allowed_token_ids=ids, stop_token_ids=[100], min_tokens=9)
    assert found == expected(set(ids), 9, 100).partition("d")[0]
    found = text(live, bad_words=words, guided_regex="[abc d]{40}")
    assert found == expected(set(ids)) and not any(word.strip() in found for word in words)
    answer = complete(live, prompt="hello", bad_words=words, allowed_token_ids=ids, n=3)
    assert answer["choices"][0]["text"] == expected(set(ids))
    chat: Any = {"messages": [{"role": "user", "content": "hi"}], "allowed_token_ids": ids}
    (choice,) = complete(live, "chat/completions", **chat, bad_words=words)["choices"]
    assert not any(word.strip() in choice["message"]["content"] for word in words)


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ({"bad_words": "ab"}, "bad_words: a list of at most 256 strings is needed", None),
        ({"bad_words": ["a"] * 257}, "bad_words: a list of at most 256 strings", None),
        ({"bad_words": ["a", " "]}, 'bad_words[1]: a word of at most 256 characters', None),
        ({"bad_words": [7]}, "bad_words[0]: a string is needed, not 7", None),
        ({"bad_words": ["a"], "allowed_token_ids": [97]}, "bad_words leave no token", None),
        (
            {"bad_words": ["aa"], "allowed_token_ids": [97]},
            "the text cannot go on: bad_words leave no token", "grammar_failed",
        ),
        (
            {"bad_words": ["yes"], "guided_choice": ["yes"]},
            "the text cannot go on: bad_words leave no token", "grammar_failed",
        ),
    ],
)  # fmt: skip
def test_bad_words_that_cannot_be(live: Live, body: Any, message: str, code: str | None) -> None:
    answer = post(f"{live.url}/v1/completions", json={"prompt": "a", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(message) and error["code"] == code


def test_log_probabilities_of_prompts(live: Live) -> None:
    """In vLLM's form, once for each prompt, whatever the texts have."""

    def row(token: str, others: int) -> Any:
        made = {}
        for i in range(max(others, 1)):
            letter = chr(ord(token) + i)
            made[str(ord(letter))] = {
                "logprob": -0.5 - i, "rank": i + 1, "decoded_token": letter,
            }  # fmt: skip
        return made

    answer = complete(live, prompt=["ab", "xyz"], n=2, max_tokens=1, prompt_logprobs=2)
    first, second = [None, row("b", 2)], [None, row("y", 2), row("z", 2)]
    assert [one["prompt_logprobs"] for one in answer["choices"]] == [first, first, second, second]
    assert all(one["logprobs"] is None for one in answer["choices"])
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0}
    answer = complete(live, "chat/completions", **chat, max_tokens=1)
    rows = answer["prompt_logprobs"]
    assert rows[1:] == [row(letter, 0) for letter in "ser: hi\n\nAssistant:"]
    assert "prompt_logprobs" not in complete(live, prompt="a")["choices"][0]
    answer = complete(live, prompt="ab", echo=True, logprobs=0, prompt_logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["prompt_logprobs"] == [None, row("b", 0)]
    assert choice["logprobs"]["tokens"] == ["a", "b"]


def test_a_grammar_that_becomes_too_hard_is_to_blame(monkeypatch: Any) -> None:
    """It is ambiguous in ever more ways; who sends it is told so, and nobody else is harmed."""
    monkeypatch.setitem(compiler.MOST_ITEMS, False, 40)
    body = {"prompt": "hello", "max_tokens": 40, "min_tokens": 40, "seed": 1}
    hard = {**body, "guided_grammar": 'start: s\ns: s s | "a" | "b"?'}
    with serving(FakeBackend(letters=False)) as live:
        whole = post(f"{live.url}/v1/completions", json=hard)
        assert whole.status_code == 400
        error = whole.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "grammar_failed")
        assert error["message"].startswith("the text cannot go on: Parser Error: Current row has")
        events = post(f"{live.url}/v1/completions", json={**hard, "stream": True}).text
        assert json.loads(events.split("data: ")[-2])["error"] == error
        told = get(f"{live.url}/metrics").text
        assert 'spmd:requests_refused_total{reason="grammar_failed"} 1.0' in told
        assert f'finished_reason="grammar",model_name="{MODEL}"}} 2.0' in told
        assert f'finished_reason="error",model_name="{MODEL}"}} 0.0' in told
        assert len(text(live, allowed_token_ids=[97])) == 40


def test_grammars_that_are_compiled_delay_nobody_else(live: Live) -> None:
    done, began = threading.Event(), threading.Event()

    def compile_for_long() -> None:
        began.set()
        assert done.wait(PATIENCE)

    grammars = live.service.grammars
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(lambda: asyncio.run(grammars.run(compile_for_long)))
        assert began.wait(PATIENCE)
        guided = threads.submit(text, live, guided_regex="abc")
        wait_until(lambda: grammars.waiting)
        for _ in range(9):
            assert len(text(live, allowed_token_ids=[97])) == 40
        assert not guided.done()
        done.set()
        slow.result()
        assert guided.result() == "abc"
