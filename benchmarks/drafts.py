"""What drafts gain, by how often they are right: the engine with and without them on one backend.

The model has random weights, so a text is made by biases: of two tokens one is drawn with a given
chance (*sameness*), whatever the model says. The guess is what followed where the last tokens stood
before, so with a chance of 1 all drafts are right, with 0.9 most. In `none` tokens are drawn from
the whole vocabulary, and nothing is guessed. Each row is the faster of two runs, taken in turns.

With `--texts` no model runs: the scheduler draws texts of this repository, as if a model wrote
them, and guesses from what they said before. Right guesses and tokens a step follow from the text
alone; words and signs are its tokens, as byte-level tokenizers split before they merge. The ratio
of times is predicted: a step that waited for the results of the last one takes longer, `WAITING`.

Examples:
    benchmarks/run drafts --texts --streams 1,4
    benchmarks/run drafts --model llama2-7b --max_length 1024
    JAX_PLATFORMS=cpu benchmarks/run drafts --max_length 64 --page 16 --slots 8 --tokens 40
"""

import argparse
import asyncio
import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence

from tokenizers.pre_tokenizers import ByteLevel

from benchmarks import loads
from benchmarks.load_server import make_bundle
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, positive
from spmd.scripts.export_llama import numbers
from spmd.serving.engine.actions import EngineStep, Job
from spmd.serving.engine.backend import Limits, Sampling
from spmd.serving.engine.core import Core
from spmd.serving.engine.engine import Engine
from spmd.serving.engine.model_backend import ModelBackend
from spmd.serving.engine.scheduler import Scheduler
from spmd.serving.language_backend import model_backend

HEADS = ("streams", "sameness", "tokens/s without", "with drafts", "ratio", "right", "tried")
SURE = 80.0  # added to a logit: no other token is drawn
CHANCES = (1.0, 0.9, 0.7, 0.5, 0.0)

SERVED = ("examples/serve_torch.py", "examples/serve_gpt2.py")
TEXTS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "code": (["serving/engine/scheduler.py"], []),
    "quoted source": (SERVED, ["docs/examples_serving.md"]),
    "prose": (["docs/design.md"], []),
}
"""Kind -> files of the prompt, and of the answer; without one half of the prompt is the answer."""

TEXT_HEADS = ("text", "streams", "tokens", "tried", "right", "tokens a step", "waited", "ratio")
WAITING = 7.4 / 5.05  # steps of 7B on one H100: one that waits over one that ran ahead


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
    engine = Engine(Core(backend), lambda ids: "x" * len(ids), (5,))
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


def text_line(given: argparse.Namespace, kind: str, streams: int) -> list[str]:
    """A row of the table of texts: every stream draws the same one."""
    split, numbers = ByteLevel(add_prefix_space=False), dict[str, int]()
    texts = ["".join((loads.ROOT / path).read_text("utf-8") for path in of) for of in TEXTS[kind]]
    pieces = [[piece for piece, _ in split.pre_tokenize_str(text)] for text in texts]
    tokens = [numbers.setdefault(piece, len(numbers)) for of_text in pieces for piece in of_text]
    prompt = len(pieces[0]) if pieces[1] else len(tokens) // 2
    count, pages = len(tokens) - prompt, -(-len(tokens) // given.page)
    limits = Limits(
        given.slots, pages * given.page, (given.slots, 4 * given.slots), 1, given.page,
        (streams + 1) * pages, 0, len(numbers), given.drafts,
    )  # fmt: skip
    scheduler = Scheduler(limits, limits.rows[-1])
    scheduler.submit([Job(tuple(tokens[:prompt]), count, key=number) for number in range(streams)])
    under_way = deque[EngineStep]()
    ahead = waited = 0
    while not scheduler.idle:
        if (step := scheduler.next()) is not None:
            ahead += step.decoding > 0 and bool(under_way)
            waited += step.decoding > 0 and not under_way
            under_way.append(step)
            continue
        parts, ids = under_way.popleft().parts, list[int]()
        for part in parts:
            end = part.start + part.rows
            ids += tokens[end - part.drawn + 1 : end + 1]
        scheduler.stepped(ids, [part.drafts for part in parts])
    counts, steps = scheduler.counts, ahead + waited
    return [
        kind, str(streams), str(count), str(counts.drafted),
        f"{counts.accepted / counts.drafted:.0%}" if counts.drafted else "-",
        f"{count / steps:.2f}", f"{waited / steps:.0%}",
        f"{count / (ahead + WAITING * waited):.2f}",
    ]  # fmt: skip


def make_parser() -> Parser:
    """The flags of `benchmarks/run loads`, and what is asked for here."""
    parser = loads.make_parser()
    parser.prog, parser.description = "benchmarks/run drafts", __doc__
    parser.add_argument("--streams", type=numbers, default=(1, 8, 16), help="at once")
    parser.add_argument("--tokens", type=positive, default=256, help="that each draws")
    parser.add_argument("--texts", action=Switch, default=False, help="real texts, and no model")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    given = make_parser().parse_args(arguments)
    if given.texts:
        print_head(TEXT_HEADS)
        for streams, kind in itertools.product(given.streams, TEXTS):
            print_line(text_line(given, kind, streams))
        return
    bundle = make_bundle(given)
    list(bundle.arrivals())
    backend = model_backend(bundle)
    backend.warm_up()
    print(f"{given.model}, {given.slots} slots, {bundle.devices[0].device_kind}")
    print_head(HEADS)
    for streams in given.streams:
        for chance in CHANCES:
            print_line(line(backend, given, streams, chance))
