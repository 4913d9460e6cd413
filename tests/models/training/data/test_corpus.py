import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training.data import corpus
from models.training.errors import DataError


def make(lengths, shards=1):
    """A corpus whose tokens are 0, 1, 2, ...: documents of these lengths, spread over shards."""
    total = sum(lengths)
    tokens = np.arange(total, dtype=np.uint32)
    ends = np.cumsum([0, *lengths])
    groups = np.array_split(np.arange(len(lengths)), shards)
    made = []
    for group in groups:
        if not len(group):
            continue
        index = ends[group[0] : group[-1] + 2]
        made.append(corpus.Shard(tokens[index[0] : index[-1]], index - index[0]))
    return corpus.Corpus(tuple(made), total, "numbers", "fingerprint")


def everything(part):
    return part.read(0, len(part))


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@given(LENGTHS, st.integers(1, 4), st.data())
def test_reads_across_shards(lengths, shards, draw):
    whole = make(lengths, shards)
    start = draw.draw(st.integers(0, len(whole) - 1))
    stop = draw.draw(st.integers(start + 1, len(whole)))
    tokens, is_first = whole.read(start, stop)
    np.testing.assert_array_equal(tokens, np.arange(start, stop))
    begins = np.cumsum([0, *lengths])[:-1]
    np.testing.assert_array_equal(is_first, np.isin(np.arange(start, stop), begins))


@given(LENGTHS, st.integers(1, 4), st.integers(2, 6), st.data())
def test_held_out_tokens_are_the_rest(lengths, shards, every, draw):
    whole = make(lengths, shards)
    parts = corpus.split_held_out(whole, every)
    tokens = [everything(part)[0] if len(part) else np.zeros(0, np.int32) for part in parts]
    np.testing.assert_array_equal(np.sort(np.concatenate(tokens)), np.arange(len(whole)))
    for part, all_of_it in zip(parts, tokens, strict=True):
        if not len(part):
            continue
        start = draw.draw(st.integers(0, len(part) - 1))
        stop = draw.draw(st.integers(start + 1, len(part)))
        np.testing.assert_array_equal(part.read(start, stop)[0], all_of_it[start:stop])


@pytest.mark.parametrize("length", [100, 5_000_000])
def test_a_twentieth_is_held_out(length):
    train, held_out = corpus.split_held_out(make([length]))
    assert len(train) + len(held_out) == length
    assert 0.03 < len(held_out) / length < 0.07
    assert train.fingerprint != held_out.fingerprint


def test_only_documents_longer_than_a_chunk_are_cut():
    lengths = [7, 40, 3, 11, 5, 9, 8, 6, 11]  # 100 tokens: chunks of 10 when every tenth
    train, held_out = corpus.split_held_out(make(lengths, 3), every=10)
    begins = set(np.cumsum([0, *lengths]).tolist())
    borders = {int(place) for part in (train, held_out) for place in part.ranges.ravel()}
    assert borders <= begins | set(range(7, 47)) | set(range(50, 61)) | set(range(89, 100))
    assert len(held_out) > 0


def test_first_token_of_a_range_begins_a_document():
    part = corpus.Part(make([10]), np.array([[2, 4], [7, 9]]))
    tokens, is_first = everything(part)
    assert tokens.tolist() == [2, 3, 7, 8]
    assert is_first.tolist() == [True, False, True, False]
    assert part.read(1, 3)[1].tolist() == [False, True]


def test_no_documents():
    with pytest.raises(DataError, match="numbers: there is no document"):
        corpus.from_documents([], 8, "numbers")


def test_pickles():
    again = pickle.loads(pickle.dumps(make([3, 4], 2)))
    assert again.read(1, 6)[0].tolist() == [1, 2, 3, 4, 5]
