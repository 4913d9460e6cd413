import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.models.training.data import corpus, samples
from spmd.models.training.data.samples import PackedTokens
from spmd.models.training.errors import DataError


def numbers(count, first=0, documents=1):
    """A corpus of the tokens `first`, `first + 1`, ..."""
    tokens = np.arange(first, first + count, dtype=np.uint32)
    return corpus.whole(corpus.from_documents(np.array_split(tokens, documents), 10**6, "numbers"))


def packed(count=1000, **more):
    return PackedTokens([numbers(count)], **{"seq_len": 16, "batch_size": 4, "seed": 3, **more})


def test_targets_are_the_inputs_one_token_on_and_depend_on_seed_and_step_alone():
    batch = packed()(0)
    assert batch["inputs"].shape == batch["targets"].shape == (4, 16)
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)
    again = packed()
    for step in (5, 0, 10**9):
        np.testing.assert_array_equal(packed()(step)["inputs"], again(step)["inputs"])
    assert not np.array_equal(packed()(0)["inputs"], packed()(1)["inputs"])
    assert not np.array_equal(packed()(0)["inputs"], packed(seed=4)(0)["inputs"])


@given(st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 5))
def test_every_epoch_is_a_permutation(count, seed, epoch):
    rows = packed(16 * count + 1, seed=seed).rows(range(epoch * count, (epoch + 1) * count))
    assert sorted(rows["inputs"][:, 0]) == [16 * i for i in range(count)]


def test_epochs_have_different_orders():
    first, second = (packed(1601).rows(range(e * 100, e * 100 + 100))["inputs"] for e in (0, 1))
    assert (first[:, 0] == second[:, 0]).mean() < 0.1


def test_smallest_corpus():
    assert packed(17)(0)["targets"][3].tolist() == list(range(1, 17))
    with pytest.raises(DataError, match=r"numbers: 16 tokens are too few.*at least 17"):
        packed(16)
    with pytest.raises(DataError, match="numbers: there is no document"):
        corpus.from_documents([], 8, "numbers")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seed": -1}, "seed must not be negative"),
        ({"batch_size": 0}, "no batch"),
        ({"shares": [1.0, 2.0]}, "1 parts cannot be mixed"),
        ({"shares": [0.0]}, "cannot be mixed"),
    ],
)
def test_what_makes_no_batches(more, message):
    with pytest.raises(DataError, match=message):
        packed(**more)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), max_size=5))
def test_batches_of_any_sizes_have_each_sample_once(parts):
    """As a run that is resumed with other batches asks for them."""
    dataset, step, seen = packed(), 0, []
    for batch, steps in parts:
        dataset = dataclasses.replace(dataset, batch_size=batch).going_on(step, dataset.first(step))
        for _ in range(steps):
            seen += list(dataset(step)["inputs"])
            step += 1
    wanted = packed().rows(range(len(seen) + 1))["inputs"]
    assert [row.tolist() for row in seen] == wanted[:-1].tolist()


# Mixtures


@pytest.mark.thorough
@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=4), st.integers(0, 100))
def test_mixtures_keep_their_shares(shares, seed):
    parts = [numbers(80_001, first=100_000 * i) for i in range(len(shares))]
    dataset = PackedTokens(parts, seq_len=16, batch_size=4, seed=seed, shares=shares)
    which = dataset.rows(range(1000))["inputs"][:, 0] // 100_000
    found = np.bincount(which, minlength=len(shares)) / 1000
    np.testing.assert_allclose(found, np.array(shares) / sum(shares), atol=0.02)


def test_parts_of_a_mixture_are_seen_whole_before_they_repeat():
    parts = [numbers(161), numbers(81, first=1000)]
    dataset = PackedTokens(parts, seq_len=16, batch_size=4, shares=[2, 1])
    inputs = dataset.rows(range(15))["inputs"][:, 0]
    assert sorted(inputs) == [16 * i for i in range(10)] + [1000 + 16 * i for i in range(5)]


# Boundaries


def test_documents_of_a_sample():
    is_first, learned = np.array([0, 0, 1, 1, 0, 0, 1], bool), np.array([1, 1, 1, 1, 1, 0, 1], bool)
    found = samples.describe_documents(is_first, True, learned)
    assert found["segment_ids"].tolist() == [1, 1, 2, 3, 3, 3]
    assert found["positions"].tolist() == [0, 1, 0, 0, 1, 2]
    assert found["weights"].tolist() == [1, 0, 0, 1, 0, 0]
    unmasked = samples.describe_documents(is_first, False, learned)
    assert unmasked["weights"].tolist() == [1, 1, 1, 1, 0, 1]


@given(st.lists(st.integers(1, 40), min_size=8, max_size=20), st.integers(0, 9))
def test_boundaries_are_those_of_the_documents(lengths, step):
    lengths = [*lengths, 40]
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    ends = np.cumsum(lengths)
    text = corpus.from_documents(np.split(tokens, ends[:-1]), 10**6)
    batch = PackedTokens([corpus.whole(text)], seq_len=16, batch_size=2, boundaries=True)(step)
    document = np.searchsorted(ends, batch["inputs"], "right")
    target_document = np.searchsorted(ends, batch["targets"], "right")
    np.testing.assert_array_equal(
        np.diff(batch["segment_ids"], axis=1), np.diff(document, axis=1) > 0
    )
    np.testing.assert_array_equal(batch["weights"], document == target_document)
    begins = np.maximum(np.append(0, ends)[document], batch["inputs"][:, :1])
    np.testing.assert_array_equal(batch["positions"], batch["inputs"] - begins)


def test_struct_and_fingerprint_are_those_of_batches():
    for boundaries in (False, True):
        dataset = packed(boundaries=boundaries)
        batch, struct = dataset(0), dataset.struct()
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == {
            name: (leaf.shape, leaf.dtype) for name, leaf in struct.items()
        }
        assert len(struct) == (5 if boundaries else 2)
    same, other = packed(), packed(999)
    assert packed(seed=9).fingerprint == same.fingerprint
    assert len({same.fingerprint, other.fingerprint, packed(boundaries=True).fingerprint}) == 3


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
    tokens, is_first, learned = whole.read(start, stop)
    assert learned.all()
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


def test_first_token_of_a_range_begins_a_document_and_pickles():
    part = corpus.CorpusPart(make([10]), np.array([[2, 4], [7, 9]]))
    tokens, is_first, _ = everything(part)
    assert tokens.tolist() == [2, 3, 7, 8]
    assert is_first.tolist() == [True, False, True, False]
    assert part.read(1, 3)[1].tolist() == [False, True]
    assert pickle.loads(pickle.dumps(make([3, 4], 2))).read(1, 6)[0].tolist() == [1, 2, 3, 4, 5]
