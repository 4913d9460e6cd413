"""The engine over a real model in a small pool: shared pages and preemptions change no token."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import spmd
from models.decode import ServingShape
from models.llama.config import named_config
from models.llama.weights.sources import fresh_source
from models.training.data.tokenizer import ByteTokenizer
from serving.bundle.read import load_bundle
from serving.engine.backend import Sampling
from serving.engine.choice import Job
from serving.engine.engine import Engine
from serving.engine.model_backend import generate
from serving.language_backend import first_functions, model_backend
from serving.llama_bundle import write_llama_bundle

SHAPE = ServingShape(4, 64, (4, 16), (32, 64), 8, 2, 2, "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    made: Path = tmp_path_factory.mktemp("bundles") / "tiny"
    with fresh_source(named_config("tiny"), 0) as source:
        write_llama_bundle(source, made, SHAPE, dtype="float32")
    return made


def test_tokens_are_those_of_a_request_alone(folder: Path, devices8: Any) -> None:
    mesh = spmd.make_mesh(data=2, devices=devices8[:2])
    bundle = load_bundle(folder, mesh, symbols={"pages": 9}, first=first_functions)
    backend = model_backend(bundle)

    def add() -> None:
        for name in bundle.arrivals():
            backend.add(name)

    arriving = threading.Thread(target=add)
    rng = random.Random(0)
    beginnings = [tuple(rng.choices(range(256), k=k)) for k in (8, 20, 33)]
    jobs = []
    for number in range(24):
        prompt = (*rng.choice(beginnings), *rng.choices(range(256), k=rng.randint(1, 10)))
        sampling = Sampling(
            temperature=number % 2, seed=number, repetition_penalty=1.3, frequency_penalty=0.5
        )
        jobs.append(
            Job(prompt, rng.randint(1, 64 - len(prompt)), sampling, logprobs=0,
                score_prompt=number % 5 == 0)
        )  # fmt: skip
    engine = Engine(backend, ByteTokenizer().decode, b"a", token_budget=8)
    engine.start()
    arriving.start()  # steps over shorter tables, some of them while requests run

    async def one(job: Job) -> tuple[list[float], Any]:
        deltas = [delta async for delta in engine.submit([job])]
        logprobs = [token.logprob or 0.0 for delta in deltas for token in delta.tokens]
        return logprobs, deltas[0].scores

    async def go() -> Any:
        return await asyncio.gather(*map(one, jobs))

    found = asyncio.run(go())
    counts = engine.state().counts
    engine.stop()
    arriving.join()
    assert counts.preempted and counts.repeated and counts.reused
    for job, (logprobs, scores) in zip(jobs, found, strict=True):
        _, expected = generate(backend, job.prompt, job.max_tokens, job.sampling)
        assert logprobs == pytest.approx(expected, abs=1e-3)
        if job.score_prompt:
            assert scores.ids[:-1].tolist() == list(job.prompt[1:])
