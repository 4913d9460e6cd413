"""Drawing tokens: filters beside transformers', distributions beside their definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.models import sampling
from spmd.models.sampling import SamplingParams

SAMPLE = jax.jit(sampling.sample)
LOGITS_BV = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32) * 3


def params(rows: int, **changes: Any) -> SamplingParams:
    filled = {
        name: np.full(rows, changes.get(name, neutral), dtype)
        for name, (dtype, neutral) in sampling.FIELDS.items()
    }
    return SamplingParams(**filled)


def history(rows: Any = LOGITS_BV, **changes: Any) -> sampling.History:
    """Of sequences without tokens."""
    shape = rows.shape
    empty = sampling.History(
        np.zeros(shape, bool),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.full((shape[0], sampling.words(shape[1])), sampling.ALL, np.uint32),
    )
    return empty._replace(**changes)


def draw(given: SamplingParams, **changes: Any) -> Any:
    return np.asarray(SAMPLE(LOGITS_BV, given, history(**changes), np.zeros(6, np.int32)))


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 7}, {"top_k": 1}, {"top_p": 0.7}, {"top_p": 0.01}, {"min_p": 0.1},
     {"top_k": 20, "top_p": 0.8, "min_p": 0.05}, {"top_k": 500}],
    ids=str,
)  # fmt: skip
def test_filters_are_transformers(changes: Any) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    theirs = torch.tensor(LOGITS_BV)
    for name, made in (
        ("top_k", process.TopKLogitsWarper),
        ("top_p", process.TopPLogitsWarper),
        ("min_p", process.MinPLogitsWarper),
    ):
        if name in changes:
            theirs = made(changes[name])(None, theirs)
    ours = jax.jit(sampling.keep)(LOGITS_BV, params(6, **changes))
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_repetition_penalty_is_transformers() -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    ids = np.random.default_rng(1).integers(0, 50, (6, 9))
    theirs = process.RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor(ids), torch.tensor(LOGITS_BV)
    )
    seen = np.zeros((6, 50), bool)
    np.put_along_axis(seen, ids, True, axis=1)
    ours = draw(params(6, repetition_penalty=1.7), seen=seen)
    np.testing.assert_array_equal(ours, theirs.numpy().argmax(-1))
    assert (ours != LOGITS_BV.argmax(-1)).any()


def test_frequency_and_presence_penalties() -> None:
    """As OpenAI defines them: `logit - count * frequency - (count > 0) * presence`."""
    drawn = np.random.default_rng(2).integers(0, 4, LOGITS_BV.shape).astype(np.int32)
    given = params(6, frequency_penalty=0.75, presence_penalty=1.5)
    ours = draw(given, seen=drawn > 0, drawn=drawn)
    wanted = LOGITS_BV - 0.75 * drawn - 1.5 * (drawn > 0)
    np.testing.assert_array_equal(ours, wanted.argmax(-1))
    assert (ours != LOGITS_BV.argmax(-1)).any()


def test_biases_and_masks() -> None:
    """A bias moves a token; what a mask leaves out is not drawn, whatever its bias."""
    bias = np.zeros(LOGITS_BV.shape, np.float32)
    bias[:, 3], bias[:, 49] = 50, 100
    assert draw(params(6), bias=bias).tolist() == [49] * 6
    is_allowed = np.random.default_rng(3).random(LOGITS_BV.shape) < 0.1
    is_allowed[:, [3, 49]] = [True, False]
    bits = np.zeros((6, 64), bool)
    bits[:, :50] = is_allowed
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    assert draw(params(6), bias=bias, allowed=masks).tolist() == [3] * 6
    for given in (params(6), params(6, temperature=3.0), params(6, temperature=3.0, top_p=0.9)):
        assert is_allowed[np.arange(6), draw(given, allowed=masks)].all()


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    logits = np.tile(LOGITS_BV[:1, :8], (count, 1))
    given, positions = params(count, temperature=1.5, seed=3), np.arange(count, dtype=np.int32)
    drawn = np.asarray(SAMPLE(logits, given, history(logits), positions))
    shares = np.bincount(drawn, minlength=8) / count
    wanted = np.asarray(jax.nn.softmax(LOGITS_BV[0, :8] / 1.5))
    np.testing.assert_allclose(shares, wanted, atol=5 * 0.5 / np.sqrt(count))


def test_seed_and_position_decide_alone() -> None:
    """Not the row, nor the rows beside it; rows with other seeds differ."""
    logits = np.tile(LOGITS_BV[:1], (4, 1)) / 3
    given = params(4, temperature=1.0)._replace(seed=np.array([5, 6, 5, 7], np.uint32))
    before = history(logits)

    def drawn(rows: Any) -> Any:
        chosen, known = jax.tree.map(lambda x: x[rows], (given, before))
        places = [np.full(len(rows), position, np.int32) for position in range(30)]
        return np.stack([SAMPLE(logits[rows], chosen, known, place) for place in places])

    everything = drawn(np.arange(4))
    np.testing.assert_array_equal(everything[:, 0], everything[:, 2])
    assert (everything[:, 0] != everything[:, 1]).any()
    np.testing.assert_array_equal(drawn(np.array([2]))[:, 0], everything[:, 2])


def test_rows_are_drawn_each_in_its_own_way() -> None:
    given = params(6, temperature=1.0, top_k=0)._replace(
        temperature=np.array([0, 1, 1, 0, 1, 1], np.float32),
        top_k=np.array([0, 1, 0, 5, 2, 0], np.int32),
    )
    drawn = draw(given)
    likeliest = LOGITS_BV.argmax(-1)
    np.testing.assert_array_equal(drawn[[0, 1, 3]], likeliest[[0, 1, 3]])
    assert drawn[4] in np.argsort(LOGITS_BV[4])[-2:]


def test_report() -> None:
    ids = np.array([3, 1, 4, 1, 5, 9], np.int32)
    made = jax.jit(sampling.report, static_argnums=2)(LOGITS_BV, ids, 4)
    wanted = np.asarray(jax.nn.log_softmax(jnp.asarray(LOGITS_BV)))
    np.testing.assert_allclose(made.logprobs, wanted[np.arange(6), ids], rtol=1e-5)
    np.testing.assert_array_equal(made.top_ids, np.argsort(-wanted)[:, :4])
    np.testing.assert_allclose(made.top_logprobs, -np.sort(-wanted)[:, :4], rtol=1e-5)
    assert sampling.report(LOGITS_BV, ids, 0).top_ids.shape == (6, 0)
    asked = jax.jit(lambda wanted: sampling.report(LOGITS_BV, ids, 4, wanted))
    jax.tree.map(np.testing.assert_array_equal, asked(True), made)
    assert not asked(False).top_ids.any() and not asked(False).top_logprobs.any()


@pytest.mark.parametrize("vocab", [16 * 7, 50, 5])  # parts alike, a shorter one, mostly empty ones
def test_the_likeliest_are_those_of_top_k(vocab: int) -> None:
    """Of equal ones the first, whichever part of the row they are in."""
    logits = np.random.default_rng(4).integers(-3, 3, (7, vocab)).astype(np.float32)
    logits[1] = -np.inf
    logits[1, -4:] = [1, 2, 2, 1]
    find = jax.jit(lambda x: [sampling._largest(x, 4, by_turns=turns) for turns in (True, False)])
    wanted = jax.lax.top_k(logits, 4)
    for made in find(logits):
        jax.tree.map(np.testing.assert_array_equal, made, tuple(wanted))
