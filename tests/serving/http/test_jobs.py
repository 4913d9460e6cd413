"""Requests become jobs: beginnings, ends, seeds and room, with a tokenizer that has a beginning."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from spmd.models.training.data.tokenizer import ByteTokenizer
from spmd.serving.errors import ApiError, ServingError
from spmd.serving.http.jobs import Work, bad_words, chat_work, completion_work
from spmd.serving.http.language import Language, Loaded
from spmd.serving.http.limits import Bounds, ServerOptions
from spmd.serving.http.protocol import parse_chat, parse_completion
from spmd.serving.http.service import Service
from spmd.serving.http.traffic import RequestMetrics
from tests.serving.engine.fake_backend import LIMITS, FakeBackend
from tests.serving.http.live import post, serving

BOS = 1
BOUNDS = Bounds(max_length=64, vocab_size=256, top_logprobs=5)
CHAT: Any = [{"role": "user", "content": "hi"}]


class Beginner(ByteTokenizer):
    """Documents begin with the byte 1."""

    bos_id = BOS
    begins: tuple[int, ...] = (BOS,)


def language(**more: Any) -> Language:
    loaded = Loaded("fake", FakeBackend(), more.pop("tokenizer", Beginner()), **more)
    return Language(loaded, ServerOptions(), RequestMetrics("fake", lambda: (0, 0)))


@pytest.fixture(scope="module")
def beginner() -> Iterator[Language]:
    yield language(stop_ids=frozenset([3]))


def complete(spoken: Language, **body: Any) -> Work:
    return completion_work(parse_completion(body, spoken.bounds), spoken)


def chat(spoken: Language, **body: Any) -> Work:
    return chat_work(parse_chat({"messages": CHAT, **body}, spoken.bounds), spoken)


def test_texts_get_a_beginning_and_ids_do_not(beginner: Language) -> None:
    assert complete(beginner, prompt="ab").jobs[0].prompt == (BOS, 97, 98)
    assert complete(beginner, prompt=[97, 98]).jobs[0].prompt == (97, 98)
    assert complete(beginner, prompt="").jobs[0].prompt == (BOS,)
    assert complete(beginner, prompt="ab", add_special_tokens=False).jobs[0].prompt == (97, 98)


def test_a_tokenizer_may_name_a_beginning_that_it_does_not_put_there() -> None:
    class Namer(Beginner):
        begins = ()

    namer = language(tokenizer=Namer())
    assert complete(namer, prompt="ab").jobs[0].prompt == (97, 98)
    assert complete(namer, prompt="").jobs[0].prompt == (BOS,)
    assert complete(language(tokenizer=ByteTokenizer()), prompt="").jobs[0].prompt == (0,)


def test_chats_get_a_beginning_unless_their_template_writes_it(beginner: Language) -> None:
    assert chat(beginner).jobs[0].prompt[:2] == (BOS, ord("U"))
    own = language(chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert chat(own).jobs[0].prompt == (BOS, *b"hi")
    named = language(chat_template="{{ eos_token }}", special_tokens={"eos_token": "E"})
    assert chat(named).jobs[0].prompt == (ord("E"),)


def test_ends(beginner: Language) -> None:
    assert complete(beginner, prompt="a").jobs[0].stop_ids == {ByteTokenizer.eos_id, 3}
    assert complete(beginner, prompt="a", ignore_eos=True).jobs[0].stop_ids == set()
    own = complete(beginner, prompt="a", ignore_eos=True, stop_token_ids=[7])
    assert own.jobs[0].stop_ids == {7}
    assert chat(beginner, stop="x").jobs[0].stops == ("x", "\nUser:", "\nSystem:")
    assert complete(beginner, prompt="a", stop="x").jobs[0].stops == ("x",)


def test_seeds(beginner: Language) -> None:
    work = complete(beginner, prompt=["a", "b"], n=2, seed=2**32 - 1)
    assert [job.sampling.seed for job in work.jobs] == [2**32 - 1, 0, 2**32 - 1, 0]
    assert complete(beginner, prompt="a", seed=-1).jobs[0].sampling.seed == 2**32 - 1
    assert len({complete(beginner, prompt="a").jobs[0].sampling.seed for _ in range(5)}) == 5


def test_room(beginner: Language) -> None:
    assert complete(beginner, prompt="a").jobs[0].max_tokens == 16
    assert chat(beginner).jobs[0].max_tokens == LIMITS.max_length - 21
    assert chat(beginner, max_tokens=5).jobs[0].max_tokens == 5
    assert chat(beginner, max_tokens=5, max_completion_tokens=6).jobs[0].max_tokens == 6
    assert complete(beginner, prompt="a" * 59, max_tokens=4).jobs[0].max_tokens == 4
    with pytest.raises(ApiError, match="65 were asked for: 60 in the prompt and 5 in the compl"):
        complete(beginner, prompt="a" * 59, max_tokens=5)
    with pytest.raises(ApiError, match="in the messages and 1 in the completion"):
        chat(beginner, messages=[{"role": "user", "content": "a" * 50}])


def test_bad_words_are_tokens_with_a_blank_and_without() -> None:
    class Words(ByteTokenizer):
        """As those whose words begin with a blank."""

        def encode_batch(self, texts: Any) -> Any:
            known = {"bad": [1, 2], " bad": [3], "none": [], " none": [4]}
            return [np.array(known[text], np.uint32) for text in texts]

    words, ask = language(), parse_completion({"prompt": "a", "bad_words": ["  bad"]}, BOUNDS)
    words.tokenizer = Words()
    bad = bad_words(ask, words)
    assert bad is not None
    assert (bad.behind([1]), bad.behind([2]), bad.reach) == ([3, 2], [3], 1)
    with pytest.raises(ApiError, match=r"bad_words\[1\]: the tokenizer makes no token of it"):
        bad_words(dataclasses.replace(ask, bad_words=("bad", "none")), words)
    assert bad_words(dataclasses.replace(ask, bad_words=()), words) is None


def test_sampling(beginner: Language) -> None:
    body = {
        "temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "frequency_penalty": -0.5, "presence_penalty": 2.0, "seed": 3,
    }  # fmt: skip
    sampling = complete(beginner, prompt="a", **body).jobs[0].sampling
    assert dataclasses.asdict(sampling) == {**body, "top_k": 0, "logit_bias": ()}
    assert dataclasses.asdict(complete(beginner, prompt="a", seed=0).jobs[0].sampling) == {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": 0, "logit_bias": (),
    }  # fmt: skip


def test_an_echo_leaves_the_beginning_out() -> None:

    with serving(tokenizer=Beginner()) as live:
        body = {"prompt": "hé", "max_tokens": 1, "seed": 0, "echo": True, "logprobs": 0}
        answer = post(f"{live.url}/v1/completions", json=body).json()
        (choice,) = answer["choices"]
        assert choice["logprobs"]["tokens"][:3] == ["h", "", "é"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
        assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
        assert answer["usage"]["prompt_tokens"] == 4


def test_ids_that_the_tokenizer_does_not_know_have_no_text() -> None:
    with serving(FakeBackend(dataclasses.replace(LIMITS, vocab_size=300), letters=False)) as live:
        body = {"prompt": [299, 97], "max_tokens": 40, "seed": 0, "echo": True, "logprobs": 5}
        answer = post(f"{live.url}/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"].startswith("a")


def test_what_cannot_be_served() -> None:
    with pytest.raises(ServingError, match="the tokenizer has 256 ids, the model 100"):
        Language(
            Loaded("x", FakeBackend(dataclasses.replace(LIMITS, vocab_size=100)), ByteTokenizer()),
            ServerOptions(),
            RequestMetrics("x", lambda: (0, 0)),
        )
    with pytest.raises(ServingError, match="neither a language model nor one of tensors"):
        Service().become_ready(Loaded("x"))
    with pytest.raises(ServingError, match="needs a backend and a tokenizer"):
        Service().become_ready(Loaded("x", FakeBackend()))
