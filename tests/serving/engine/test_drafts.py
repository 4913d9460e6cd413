"""What a text goes on with is guessed from the text itself, and no guess changes it."""

import dataclasses
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.serving.engine.drafts import Said
from tests.serving.engine.fake_backend import LIMITS, FakeBackend
from tests.serving.engine.test_engine import ask, job, running, text_of


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 6))
def test_it_goes_on_as_it_did_before(text: list[int], most: int) -> None:
    said = Said()
    for tokens in (text[:end] for end in range(len(text) % 4, len(text) + 1, 4)):
        agreed, found = Said().guess(array("i", tokens), most)
        assert said.guess(array("i", tokens), most)[0] >= agreed

        def places(n: int, tokens: list[int] = tokens) -> list[int]:
            return [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]]

        assert (not agreed or places(agreed)) and not places(max(agreed + 1, 2))
        # What stands behind one of these places, and, where the text ends there, the guess itself.
        behind = [[*tokens, *found][i : i + most] for i in places(agreed)] if agreed else [[]]
        assert [*found] in behind


def test_the_longest_that_was_said_before_counts() -> None:
    text = array("i", [1, 2, 3, 9, 2, 3, 8, 7, 1, 2, 3])
    assert Said().guess(text, 2) == (3, (9, 2))
    said, new = Said(), array("i", [*range(20), *range(10)])
    assert said.guess(new, 2) == (10, (10, 11))
    assert said.guess(array("i", [*new, 99]), 2) == (2, (11, 12))  # one was replaced


@pytest.mark.parametrize("few", [1, 2])
def test_texts_are_the_same_in_fewer_steps(few: int) -> None:
    texts: dict[int, list[str]] = {0: [], 3: []}
    for drafts, found in texts.items():
        backend = FakeBackend(dataclasses.replace(LIMITS, slots=8, rows=(8,), drafts=drafts))
        backend.alphabet = b"ab"[:few]
        with running(backend) as engine:
            for count in (1, 2, 6):
                stops = ["abba" if i else "aaaaa" for i in range(count)]
                jobs = [job(b"ab" * 5, 50, stops=(stop,), min_tokens=20) for stop in stops]
                deltas = ask(engine, *jobs)
                found += [text_of(deltas, i) for i in range(count)]
            counts = engine.state().counts
        assert bool(counts.accepted) == bool(drafts)
        assert counts.accepted <= counts.drafted
    assert texts[0] == texts[3]
    if few == 1:  # of the one that is alone, 25 tokens: three steps of four save one each, or more
        assert counts.accepted > 9
