"""Bad words never come up, and nothing else is forbidden: by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.actions import Job
from serving.engine.backend import Words
from serving.engine.guide import BadWords, GuideError, WithoutBadWords, counted_masks, words_of
from tests.serving.engine.fake_backend import FakeBackend
from tests.serving.engine.test_engine import DECODE, ask, job, running, text_of
from tests.serving.engine.test_guides import Spelled
from tests.serving.engine.test_scheduler import SMALL_POOL

VOCABULARY = 5
TOKENS = st.integers(0, VOCABULARY - 1)
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=6)


def ids(mask: Words) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def brute_force(sequences: Any, drawn: list[int]) -> set[int]:
    """The tokens with which the text would end with one of the sequences."""
    return {s[-1] for s in sequences if [*drawn, s[-1]][-len(s) :] == list(s)}


@given(SEQUENCES, st.lists(TOKENS, max_size=8))
def test_what_would_complete_a_sequence(sequences: Any, drawn: list[int]) -> None:
    bad = BadWords(sequences, VOCABULARY)
    assert set(bad.behind(drawn)) == brute_force(sequences, drawn)
    assert set(bad.behind(drawn[-bad.reach :] if bad.reach else [])) == set(bad.behind(drawn))


@given(SEQUENCES, st.lists(TOKENS, max_size=8), st.sets(TOKENS), st.integers(0, 3))
def test_beside_masks_by_count(
    sequences: Any, drawn: list[int], allowed: set[int], least: int
) -> None:
    bad = BadWords(sequences, VOCABULARY)
    guide = WithoutBadWords(bad, counted_masks(VOCABULARY, allowed, [0], least))
    for i in range(len(drawn) + 1):
        expected = (allowed or set(range(VOCABULARY))) - brute_force(sequences, drawn[:i])
        expected -= {0} if i < least else set()
        if expected:
            assert ids(guide.allowed()) == expected
        else:
            with pytest.raises(GuideError, match="bad_words leave no token"):
                guide.allowed()
        for token in drawn[i : i + 1]:
            guide.take(token)


def test_beside_another_guide() -> None:
    bad = BadWords([(97, 98), (99,)], 256)
    guide = WithoutBadWords(bad, (), Spelled(b"aab"))
    for token in b"aa":
        assert ids(guide.allowed()) == {token}
        guide.take(token)
    with pytest.raises(GuideError):
        guide.allowed()


def test_sequences_of_one_token_need_no_guide() -> None:
    bad = BadWords([(1,), (3,)], VOCABULARY)
    assert bad.reach == 0
    ((count, mask),) = bad.from_all(())
    assert (count, ids(mask)) == (0, {0, 2, 4})
    masks = bad.from_all(counted_masks(VOCABULARY, (), [0], 2))
    assert [(count, ids(mask)) for count, mask in masks] == [(0, {2, 4}), (2, {0, 2, 4})]
    with pytest.raises(GuideError):
        bad.from_all(counted_masks(VOCABULARY, [1, 3], (), 0))


def test_texts_in_a_small_pool() -> None:
    """Requests that lose their pages go on as before."""
    backend = FakeBackend(SMALL_POOL)
    sequences = [(a, b) for a in range(97, 123) for b in (*b"aeiou ",)] + [(*b"the",)]
    bad = BadWords(sequences, 256)

    def allowed(drawn: list[int]) -> Words:
        return words_of(set(range(256)) - brute_force(sequences, drawn), 256)

    def without(prompt: bytes) -> Job:
        guide = WithoutBadWords(bad, ())
        return job(prompt, 40, masks=((0, guide.allowed()),), guide=guide)

    prompts = [bytes([i]) * 9 for i in range(8)]
    with running(backend) as engine:
        deltas = ask(engine, *map(without, prompts))
        assert engine.state().counts.preempted
    for i, prompt in enumerate(prompts):
        assert text_of(deltas, i) == DECODE(backend.alone(prompt, 40, 0, allowed))
