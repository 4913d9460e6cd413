"""What drafts gain, by how often they are right: the engine with and without them on one backend.

The model has random weights, so a text is made by biases: of two tokens one is drawn with a given
chance (*sameness*), whatever the model says. The guess is what followed where the last tokens stood
before, so with a chance of 1 all drafts are right, with 0.9 most. In `none` tokens are drawn from
the whole vocabulary, and nothing is guessed. Each row is the faster of two runs, taken in turns.

Examples:
    benchmarks/run drafts --model llama2-7b --max_length 1024
    JAX_PLATFORMS=cpu benchmarks/run drafts --max_length 64 --page 16 --slots 8 --tokens 40
"""

import argparse
import asyncio
import dataclasses
import math
import time
from collections.abc import Sequence

from benchmarks import loads
from benchmarks.load_server import make_bundle
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, positive
from spmd.scripts.export_llama import numbers
from spmd.serving.engine.actions import Job
from spmd.serving.engine.backend import Sampling
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.model_backend import ModelBackend
from spmd.serving.language_backend import model_backend

HEADS = ("streams", "sameness", "tokens/s without", "with drafts", "ratio", "right", "tried")
SURE = 80.0  # added to a logit: no other token is drawn
CHANCES = (1.0, 0.9, 0.7, 0.5, 0.0)


def sampling(chance: float, seed: int) -> Sampling:
    """How the tokens of a text are drawn; a chance of 0 leaves all to the model."""
    if not chance:
        return Sampling(seed=seed)
    other = SURE + math.log(max(1 - chance, 1e-30) / chance)
    return Sampling(seed=seed, logit_bias=((5, SURE), (6, other)))


def measured(backend: ModelBackend, jobs: Sequence[Job], drafts: int) -> tuple[float, int, int]:
    """Tokens/s of some requests that run together, drafts that were right, and all of them."""
    whole = backend.limits
    backend.limits = dataclasses.replace(whole, drafts=drafts)
    engine = Engine(backend, lambda ids: "x" * len(ids), (5,))
    backend.limits = whole
    engine.start()

    async def one(job: Job) -> None:
        async for _ in engine.submit([job]):
            pass

    async def every() -> None:
        await asyncio.gather(*map(one, jobs))

    start = time.perf_counter()
    asyncio.run(every())
    seconds = time.perf_counter() - start
    counts = engine.state().counts
    engine.stop()
    return sum(job.max_tokens for job in jobs) / seconds, counts.accepted, counts.drafted


def line(
    backend: ModelBackend, given: argparse.Namespace, streams: int, chance: float
) -> list[str]:
    """A row of the table."""
    jobs = [
        Job((7, 8, 9, 10, 11, number), given.tokens, sampling(chance, number))
        for number in range(streams)
    ]
    runs = [[measured(backend, jobs, drafts) for drafts in (0, given.drafts)] for _ in range(2)]
    without, (fast, right, tried) = (max(of) for of in zip(*runs, strict=True))
    return [
        str(streams), f"{chance:g}" if chance else "none", f"{without[0]:,.0f}", f"{fast:,.0f}",
        f"{fast / without[0]:.2f}", f"{right / tried:.0%}" if tried else "-", str(tried),
    ]  # fmt: skip


def make_parser() -> Parser:
    """The flags of `benchmarks/run loads`, and what is asked for here."""
    parser = loads.make_parser()
    parser.prog, parser.description = "benchmarks/run drafts", __doc__
    parser.add_argument("--streams", type=numbers, default=(1, 8, 16), help="at once")
    parser.add_argument("--tokens", type=positive, default=256, help="that each draws")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    given = make_parser().parse_args(arguments)
    bundle = make_bundle(given)
    backend = model_backend(bundle)
    backend.warm_up()
    print(f"{given.model}, {given.slots} slots, {bundle.devices[0].device_kind}")
    print_head(HEADS)
    for streams in given.streams:
        for chance in CHANCES:
            print_line(line(backend, given, streams, chance))


if __name__ == "__main__":
    main()
