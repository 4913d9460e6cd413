"""Drafts of both kinds leave the texts of a real model as they are, and so their distribution."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

from spmd.serving.engine.actions import Job
from spmd.serving.engine.backend import Sampling
from spmd.serving.engine.draft_model import DraftedBackend
from spmd.serving.engine.model_backend import ModelBackend
from tests.models.llama.made import forward
from tests.models.llama.test_decode import FEW, Plain, limits, random_model
from tests.serving.test_engine_on_model import ask_all

SHAPE = FEW._replace(
    slots=24, groups=1, rows=(48,), max_length=64, lengths=(64,), drafts=3, top_logprobs=0
)
AT_ONCE = 6  # so many have room for three drafts each
SEEDS = 300
ABC = (6, 10, 48)
SAID = (38, 98, 7, 96, 10, 29, 110)
REPEATED = (*SAID, 6, 48, 48, *SAID, 10, 48, 6, *SAID, 48, 48, 6, *SAID)
"""Whichever of ABC is drawn next, it stands behind these tokens earlier."""


@functools.cache
def model(layers: int) -> ModelBackend:
    """A model of two layers, or the first of them alone."""
    params, config = random_model(2)
    params = {**params, "layers": {str(i): params["layers"][str(i)] for i in range(layers)}}
    config = dataclasses.replace(config, num_hidden_layers=layers)
    sizes = dataclasses.replace(limits(SHAPE), pages=60, drafts=SHAPE.drafts)
    return ModelBackend(Plain(params, config, SHAPE, 60), sizes)


def drawn(drafts: int, has_model: bool, jobs: Sequence[Job]) -> tuple[list[str], int, int]:
    """Texts, drafts that were right, and all of them."""
    backend: ModelBackend | DraftedBackend = model(2)
    if has_model:
        backend = DraftedBackend(backend, model(1))
    backend.limits = dataclasses.replace(
        backend.limits, drafts=drafts, draft_cost=0.01 if has_model else None
    )
    runs = [ask_all(backend, jobs[i : i + AT_ONCE]) for i in range(0, len(jobs), AT_ONCE)]
    texts = ["".join(delta.text for delta in deltas) for found, _ in runs for deltas in found]
    return texts, *(sum(getattr(c, n) for _, c in runs) for n in ("accepted", "drafted"))


@pytest.mark.parametrize(("has_model", "prompt"), [(False, REPEATED), (True, range(50, 90))])
def test_drafts_leave_texts_as_they_are(has_model: bool, prompt: Sequence[int]) -> None:
    bias = tuple((token, 60.0) for token in ABC)
    jobs = [Job((*prompt,), 4, Sampling(1.0, seed=n, logit_bias=bias)) for n in range(SEEDS)]
    texts, right, tried = drawn(3, has_model, jobs)
    assert 50 < right < tried - 50
    # The first three tokens are distributed as the forward pass says.
    params, config = random_model(2)
    pairs = [(*prompt, *pair) for pair in itertools.product(ABC, repeat=2)]
    logits = np.asarray(forward(config)(params, np.asarray(pairs)), np.float64)[:, -3:, ABC]
    p = softmax(logits, axis=-1).reshape(3, 3, 3, 3)
    expected = SEEDS * p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]
    found = np.zeros((3, 3, 3))
    for text in texts:
        found[tuple(ABC.index(ord(letter)) for letter in text[:3])] += 1
    often = expected > 5
    counts = [[*x[often], x[~often].sum()] for x in (found, expected)]
    assert stats.chisquare(*counts).pvalue > 0.01
    greedy = [Job((n, *prompt), 12, Sampling(0.0, repetition_penalty=1 + n % 2)) for n in range(9)]
    some = [*jobs[::20], *greedy]
    assert drawn(3, has_model, some)[0] == drawn(0, False, some)[0]
