"""The engine over a real model in a small pool: shared pages and preemptions change no token."""

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import spmd
from spmd.models.decode import ServingShape
from spmd.models.training.data.tokenizer import ByteTokenizer
from spmd.serving.bundle.bundle import Bundle
from spmd.serving.bundle.folder import read_manifest
from spmd.serving.bundle.read import load_bundle
from spmd.serving.engine.actions import Counts, Job
from spmd.serving.engine.backend import Backend, Sampling
from spmd.serving.engine.choice import Delta
from spmd.serving.engine.model_backend import ModelBackend, generate
from spmd.serving.grammar.compiler import Grammars
from spmd.serving.language_backend import first_functions, model_backend
from tests.serving.conftest import write_tiny
from tests.serving.engine.test_engine import ask, running

SHAPE = ServingShape(4, 64, (16,), (32, 64), 8, 2, 2, "float32", turns=3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: Any, devices8: Any) -> Bundle:
    folder: Path = tmp_path_factory.mktemp("bundles") / "tiny"
    write_tiny(folder, SHAPE, platforms=["cpu"])
    first = first_functions(read_manifest(folder))
    assert sorted(first) == ["allow", "begin", "score_r16_t64", "step_r16_t64"]
    mesh = spmd.make_mesh(data=2, devices=devices8[:2])
    return load_bundle(folder, mesh, symbols={"pages": 9}, first=first_functions)


@pytest.fixture(scope="module")
def backend(bundle: Bundle) -> ModelBackend:
    return model_backend(bundle)


def ask_all(backend: Backend, jobs: Sequence[Job]) -> tuple[list[list[Delta]], Counts]:
    """What each of them gets, asked for all at once, and what came of it."""
    with running(backend, token_budget=8) as engine:
        deltas = ask(engine, *jobs)
        counts = engine.state().counts
    return [[delta for delta in deltas if delta.choice == i] for i in range(len(jobs))], counts


@pytest.mark.thorough
def test_tokens_are_those_of_a_request_alone(bundle: Bundle, backend: ModelBackend) -> None:
    def add() -> None:
        for name in bundle.arrivals():
            backend.add(name)

    rng = random.Random(0)
    beginnings = [tuple(rng.choices(range(256), k=k)) for k in (8, 20, 33)]
    jobs = []
    for number in range(16):
        prompt = (*rng.choice(beginnings), *rng.choices(range(256), k=rng.randint(1, 10)))
        sampling = Sampling(
            temperature=number % 2, seed=number, repetition_penalty=1.3, frequency_penalty=0.5
        )
        jobs.append(
            Job(prompt, rng.randint(1, 64 - len(prompt)), sampling, logprobs=0,
                score_prompt=number % 5 == 0)
        )  # fmt: skip
    arriving = threading.Thread(target=add)
    arriving.start()  # steps over shorter tables, some of them while requests run
    found, counts = ask_all(backend, jobs)
    arriving.join()
    assert counts.preempted and counts.repeated and counts.reused
    for job, deltas in zip(jobs, found, strict=True):
        logprobs = [token.logprob or 0.0 for delta in deltas for token in delta.tokens]
        _, expected = generate(backend, job.prompt, job.max_tokens, job.sampling)
        assert logprobs == pytest.approx(expected, abs=1e-3)
        if job.score_prompt:
            scores = deltas[0].scores
            assert scores is not None and scores.ids[:-1].tolist() == list(job.prompt[1:])


@pytest.mark.thorough
def test_several_tokens_of_each_from_one_call(bundle: Bundle, backend: ModelBackend) -> None:
    for name in bundle.arrivals():
        backend.add(name)
    jobs = [
        Job((7, 8, n), 11 + n, Sampling(n % 2, seed=n, frequency_penalty=0.5), logprobs=0)
        for n in range(4)
    ]
    with patch.object(backend, "step", wraps=backend.step) as step:
        found, counts = ask_all(backend, jobs)
    turns = [call.args[0][0].turns for call in step.call_args_list]
    assert turns.count(3) >= 3 and counts.wasted
    for job, deltas in zip(jobs, found, strict=True):
        logprobs = [token.logprob or 0.0 for delta in deltas for token in delta.tokens]
        _, expected = generate(backend, job.prompt, job.max_tokens, job.sampling)
        assert logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.thorough
def test_texts_that_have_to_fit_a_schema(backend: ModelBackend) -> None:
    """Beside others, in a pool so small that they lose their pages, and drawn anyhow."""
    tokenizer = ByteTokenizer()
    grammars = Grammars(tokenizer, backend.limits.vocab_size, {0}, 2**16)
    schema = {"type": "array", "items": {"enum": ["a", 12, None]}, "minItems": 2, "maxItems": 3}
    jobs: list[Job] = []
    for number in range(16):
        prompt, sampling = tuple([number + 1] * 23), Sampling(number % 3, seed=number)
        job = Job(prompt, 40, sampling, frozenset([0]))
        if number % 3:
            guide = grammars.schema(schema).guide()
            masks = ((0, guide.allowed()),)
            job = Job(prompt, 40, sampling, frozenset([0]), masks=masks, guide=guide)
        jobs.append(job)
    found, counts = ask_all(backend, jobs)
    assert counts.preempted
    for job, deltas in zip(jobs, found, strict=True):
        text = "".join(delta.text for delta in deltas)
        if job.guide is None:
            expected, _ = generate(backend, job.prompt, 40, job.sampling, job.stop_ids)
            assert text == tokenizer.decode(token for token in expected if token)
        elif deltas[-1].finish == "stop":
            value = json.loads(text)
            assert 2 <= len(value) <= 3 and all(x in ("a", 12, None) for x in value)
    assert sum(deltas[-1].finish == "stop" for deltas in found) > 5
