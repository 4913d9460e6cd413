"""Guesses of a draft model, over real models: they are tried, and change no draw."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

from spmd.serving.engine.actions import Counts, Job
from spmd.serving.engine.backend import Backend, Sampling
from spmd.serving.engine.draft_model import DraftedBackend
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.model_backend import ModelBackend
from tests.models.llama.made import forward
from tests.models.llama.test_decode import FEW, Plain, limits, random_model

SHAPE = FEW._replace(
    slots=24, groups=1, rows=(48,), max_length=64, lengths=(64,), drafts=3, top_logprobs=0
)
PAGES = 60
AT_ONCE = 6
"""Requests: so many have room for three drafts each."""

ABC = (6, 10, 48)
SAID = (38, 98, 7, 96, 10, 29, 110)
REPEATED = (*SAID, 6, 48, 48, *SAID, 10, 48, 6, *SAID, 48, 48, 6, *SAID)
"""Whichever of them is drawn next, it stands behind these tokens earlier."""


@functools.cache
def backends() -> tuple[ModelBackend, ModelBackend]:
    """A model of two layers, and the first of them alone."""
    params, config = random_model(2)
    shallow = dataclasses.replace(config, num_hidden_layers=1)
    sizes = dataclasses.replace(limits(SHAPE), pages=PAGES, drafts=SHAPE.drafts)
    made = []
    for given, of in (
        (params, config),
        ({**params, "layers": {"0": params["layers"]["0"]}}, shallow),
    ):
        made.append(ModelBackend(Plain(given, of, SHAPE, PAGES), sizes))
    return made[0], made[1]


def backend_of(kind: str) -> Backend:
    model, draft = backends()
    if kind != "draft model":
        drafts = SHAPE.drafts if kind == "lookup" else 0
        model.limits = dataclasses.replace(model.limits, drafts=drafts)
        return model
    model.limits = dataclasses.replace(model.limits, drafts=SHAPE.drafts)
    drafted = DraftedBackend(model, draft)
    drafted.limits = dataclasses.replace(drafted.limits, draft_cost=0.01)
    return drafted


def text_of(ids: Iterable[int]) -> str:
    return "".join(chr(0x100 + i) for i in ids)


def draw(backend: Backend, jobs: Sequence[Job]) -> tuple[list[str], Counts]:
    """The texts, a letter for each token; a few requests run together."""
    engine = Engine(backend, text_of, (0,))
    engine.start()

    async def every() -> list[str]:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(job: Job) -> str:
            async with places:
                return "".join([delta.text async for delta in engine.submit([job])])

        return await asyncio.gather(*map(one, jobs))

    texts = asyncio.run(every())
    counts = engine.state().counts
    engine.stop()
    return texts, counts


def probabilities(prompt: Sequence[int]) -> dict[str, float]:
    """What the model gives each text of three letters, by its forward pass."""
    params, config = random_model(2)
    pairs = list(itertools.product(ABC, repeat=2))
    logits = forward(config)(params, np.asarray([[*prompt, *pair] for pair in pairs]))
    chances = softmax(np.asarray(logits, np.float64)[:, -3:, ABC], axis=-1)
    return {
        text_of((*pair, ABC[last])): float(first[ABC.index(pair[0])] * second[ABC.index(pair[1])])
        * float(third[last])
        for pair, (first, second, third) in zip(pairs, chances, strict=True)
        for last in range(3)
    }


@pytest.mark.parametrize(("kind", "prompt"), [("lookup", REPEATED), ("draft model", range(50, 90))])
def test_drafts_leave_the_distribution_as_it_is(kind: str, prompt: Sequence[int]) -> None:
    """Texts are the model's, by their frequencies over many seeds, and one by one."""
    bias = tuple((token, 60.0) for token in ABC)
    jobs = [Job((*prompt,), 4, Sampling(1.0, seed=n, logit_bias=bias)) for n in range(600)]
    greedy = [Job((n, *prompt), 12, Sampling(0.0)) for n in range(9)]
    texts, counts = draw(backend_of(kind), jobs)
    assert 100 < counts.accepted < counts.drafted - 100
    expected = probabilities(prompt)
    found = Counter(text[:3] for text in texts)
    assert found.keys() <= expected.keys()
    often = [text for text, chance in expected.items() if chance * len(jobs) > 5]
    counted = np.array([(found[text], len(jobs) * expected[text]) for text in often])
    rest = len(jobs) - counted.sum(axis=0)  # all others together
    assert stats.chisquare(*np.vstack([counted, rest]).T).pvalue > 0.01
    some = [*jobs[::20], *greedy]
    assert draw(backend_of(kind), some)[0] == draw(backend_of("none"), some)[0]
