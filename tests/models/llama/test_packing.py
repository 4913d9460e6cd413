"""Documents that share a row, kept apart: the same loss as each of them by itself."""

import functools

import jax
import numpy as np
import pytest

from spmd.models.llama.named import CONFIGS
from spmd.models.llama.objective import batch_loss
from spmd.models.training.data import source as data
from tests.models.llama.made import fresh_params

TINY = CONFIGS["tiny"]
SEQ_LEN = 16


@functools.cache
def documents():
    rng = np.random.default_rng(0)
    return [
        np.append(rng.integers(1, TINY.vocab_size, n), 0).astype(np.uint8)
        for n in (6, 3, 9, 20, 11, 1, 30, 5, 17, 8, 2, 14)
    ]


@functools.cache
def batch(seq_len=SEQ_LEN):
    corpus = data.whole(data.from_documents(documents(), 256))
    return data.PackedTokens([corpus], seq_len=seq_len, batch_size=4, seed=2, boundaries=True)(0)


@functools.cache
def loss_and_gradients():
    return jax.jit(jax.value_and_grad(functools.partial(batch_loss, config=TINY)))


@functools.cache
def loss_apart():
    """Mean over the targets of all stretches of documents, each run in a row of its own."""
    loss = jax.jit(functools.partial(batch_loss, config=TINY))
    total, count = 0.0, 0
    for row in range(4):
        segments, inputs, targets, weights = (
            batch()[name][row] for name in ("segment_ids", "inputs", "targets", "weights")
        )
        for segment in range(1, segments[-1] + 1):
            (places,) = np.nonzero(segments == segment)
            used = int(weights[places].sum())
            if not used:
                continue
            length = len(places)
            padding = (0, SEQ_LEN - length)  # of one length, so that one compilation does
            given = {"inputs": inputs, "targets": targets, "weights": weights}
            alone = {name: np.pad(leaf[places], padding)[None] for name, leaf in given.items()}
            total += float(loss(params(), alone)) * used
            count += used
    assert count == batch()["weights"].sum() and 40 < count < 64
    return total / count


def params():
    return fresh_params(TINY, seed=1)


@pytest.mark.thorough
def test_packed_is_the_mean_over_documents_apart():
    assert batch()["segment_ids"].max() > 2
    packed, _ = loss_and_gradients()(params(), batch())
    assert float(packed) == pytest.approx(loss_apart(), rel=1e-5)


def test_positions_turn_queries_and_keys():
    """Rotations are relative: where counting starts is all the same, how far it goes is not."""
    strong = jax.tree.map(lambda leaf: 10 * leaf, params())
    places = batch()["positions"]
    wanted, shifted, stretched = (
        float(loss_and_gradients()(strong, {**batch(), "positions": a * places + b})[0])
        for a, b in ((1, 0), (1, 7), (3, 0))
    )
    assert shifted == pytest.approx(wanted, rel=1e-4)
    assert abs(stretched - wanted) > 1e-3 * wanted


def test_nothing_that_weighs():
    weightless = {**batch(), "weights": np.zeros((4, SEQ_LEN), np.float32)}
    loss, grads = loss_and_gradients()(params(), weightless)
    assert float(loss) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))
