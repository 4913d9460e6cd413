"""Loads: what is asked, in which words, the seconds that it takes at least, and unused ones."""

from pathlib import Path

import pytest

from benchmarks.load_client import Answer, Ask, Load
from benchmarks.load_server import write_tokenizer
from benchmarks.loads import WORKLOADS, Costs, Workload, floor_seconds
from spmd.models.training.data.tokenizer import load_tokenizer
from spmd.serving.engine.text import Detokenizer

COSTS = Costs(slots=2, weight_bytes=1000, token_bytes=10, bandwidth=100, token_seconds=0.5)
LOAD = Load(2, concurrency=8)


def answers(*sizes: tuple[int, int]) -> list[Answer]:
    ask = Ask(0, "", 1, None, 0)
    return [Answer(ask, prompt_tokens=prompt, tokens=tokens) for prompt, tokens in sizes]


@pytest.mark.parametrize(
    ("workload", "sizes", "steps", "seen", "prompts"),
    [
        # As in the docstring: the longer answer takes four steps behind its prompt.
        (Workload((LOAD,)), [(10, 5), (10, 3)], 4, 46 + 21, 20),
        # Three answers in two slots: 2 + 2 + 1 tokens behind prompts take three steps.
        (Workload((LOAD,)), [(4, 3), (5, 3), (6, 2)], 3, 4 + 5 + 5 + 6 + 6, 15),
        # One at a time.
        (Workload((Load(2, concurrency=1),)), [(10, 5), (10, 3)], 6, 46 + 21, 20),
        # What all have in common is run once.
        (Workload((LOAD,), common=7), [(10, 2), (10, 1), (10, 1)], 1, 10, 30 - 14),
        # One token is drawn behind the prompt, and takes no step.
        (Workload((LOAD,)), [(3, 1)], 0, 0, 3),
    ],
)
def test_the_floor(
    workload: Workload, sizes: list[tuple[int, int]], steps: int, seen: int, prompts: int
) -> None:
    floor = floor_seconds(workload, answers(*sizes), COSTS)
    assert floor == pytest.approx((steps * 1000 + seen * 10) / 100 + prompts * 0.5)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_sizes_of_what_is_asked(name: str, scale: float) -> None:
    whole, workload = WORKLOADS[name], WORKLOADS[name].scaled(scale)
    asks = workload.asks()
    for load, scaled in zip(whole.loads, workload.loads, strict=True):
        for of in ("requests", "concurrency"):
            assert getattr(scaled, of) == max(1, round(scale * getattr(load, of)))
        for of in ("words", "tokens"):
            assert getattr(scaled, of) == tuple(max(1, round(scale * n)) for n in getattr(load, of))
    assert len(asks) == sum(load.requests for load in workload.loads)
    assert [ask.number for ask in asks] == list(range(len(asks)))
    sizes = [len(ask.prompt.split()) for ask in asks]
    for i, load in enumerate(workload.loads):
        every = slice(i, None, len(workload.loads))
        least, most = (workload.common + 1 + words for words in load.words)
        assert least <= min(sizes[every]) <= max(sizes[every]) <= most
        low, high = load.tokens
        assert all(low <= ask.max_tokens <= high for ask in asks[every])
    lengths = [size + ask.max_tokens for size, ask in zip(sizes, asks, strict=True)]
    assert max(lengths) <= workload.longest


def test_no_prompt_begins_as_another_but_for_what_all_have_in_common() -> None:
    begins = []
    for workload in WORKLOADS.values():
        prompts = [ask.prompt.split() for ask in workload.asks()]
        count = workload.common
        assert len({tuple(prompt[:count]) for prompt in prompts}) == 1
        begins += [tuple(prompt[count : count + 8]) for prompt in prompts]
    assert len(set(begins)) == len(begins)


@pytest.mark.parametrize("vocab_size", [256, 32_000])
def test_words_are_tokens(vocab_size: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", vocab_size)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (vocab_size, 0, None)
    texts = [ask.prompt for ask in WORKLOADS["prefix"].scaled(0.2).asks()]
    prompts = tokenizer.encode_batch(texts)
    for ids, text in zip(prompts, texts, strict=True):
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text
    drawn = Detokenizer(tokenizer.decode, prompts[0].tolist())
    assert all(drawn.push(token) for token in range(vocab_size))
