"""Loads our server with several loads, one after the other: one table.

A Llama with random weights is built in memory, in a server of its own process, which is the one
that scripts/serve runs. Clients in further processes put the loads on it:

    streams    256 streams, 64 at a time, prompts of about 345 tokens, answers of 64 to 256
    long       as many prompts of 4,000 tokens, with answers of 32, as of those; 32 at a time
    one        one stream alone, 345 and 256 tokens, four times
    clients    300 clients at once, short prompts and answers, four times each
    prefix     2,000 tokens that all have in common, then 50, answers of 64; 64 at a time

`device busy` is read from a trace of the devices, two seconds from the middle of the load on, which
is put on the server once more for that: a trace slows it down. The floor is what reading weights
and cache in each step and the prompts' products take at least, at the chip's bandwidth and its
measured speed of products; the last column is its share of the seconds.

Examples:
    benchmarks/run loads --model llama2-7b --slots 64 --max_length 1024 --loads streams,one,clients
    JAX_PLATFORMS=cpu benchmarks/run loads --max_length 256 --scale 0.05 --trace_seconds 0.2
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import httpx
import jax

from benchmarks.load_client import (
    WORDS,
    Answer,
    Ask,
    Asked,
    BenchError,
    Load,
    ask_from,
    client_pool,
    make_asks,
)
from benchmarks.serve import PERCENTILES, Result, check, summarize
from benchmarks.tables import print_head
from spmd.cli.flags import Parser, positive, words
from spmd.cli.specs import symbol_values
from spmd.scripts import export_llama
from spmd.scripts.jobs.local import free_port
from spmd.serving.http.limits import ServerOptions

# A word of a prompt is a token. Each prompt has a number of its own before its words, so that none
# begins as another does, but for what a load gives to all.


@dataclasses.dataclass(frozen=True)
class Workload:
    """One load, of requests of one or several kinds."""

    # the kinds; their requests alternate. They have the same concurrency and other seeds, as have
    # those of other loads, or prompts would be found in the cache.
    loads: tuple[Load, ...]
    common: int = 0  # words with which all prompts begin

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that it may ask for."""
        return self.common + max(1 + load.words[1] + load.tokens[1] for load in self.loads)

    def scaled(self, scale: float) -> "Workload":
        """With so many times as many requests, at once and in all, words and tokens; at least 1."""

        def times(count: int) -> int:
            return max(1, round(count * scale))

        def of(load: Load) -> Load:
            return dataclasses.replace(
                load,
                requests=times(load.requests),
                concurrency=times(load.concurrency),
                words=(times(load.words[0]), times(load.words[1])),
                tokens=(times(load.tokens[0]), times(load.tokens[1])),
            )

        return Workload(tuple(map(of, self.loads)), round(self.common * scale))

    def asks(self) -> list[Ask]:
        """The requests; the same ones every time."""
        common = random.Random(self.loads[0].seed).choices(WORDS, k=self.common)
        kinds = zip(*map(make_asks, self.loads), strict=True)
        asks = []
        for number, ask in enumerate(itertools.chain.from_iterable(kinds)):
            prompt = " ".join([*common, f"{number}:", *ask.prompt.split()[1:]])
            asks.append(dataclasses.replace(ask, number=number, prompt=prompt))
        return asks


def _load(
    requests: int, at_once: int, words: tuple[int, int], tokens: tuple[int, int], seed: int
) -> Load:
    return Load(requests, at_once, words=words, tokens=tokens, ignore_eos=True, seed=seed)


_WORDS, _TOKENS = (245, 445), (64, 256)

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "streams": Workload((_load(256, 64, _WORDS, _TOKENS, 1),)),
        "long": Workload(
            (_load(64, 32, (4000, 4000), (32, 32), 2), _load(64, 32, _WORDS, _TOKENS, 3))
        ),
        "one": Workload((_load(4, 1, (345, 345), (256, 256), 4),)),
        "clients": Workload((_load(1200, 300, (8, 48), (8, 32), 5),)),
        "prefix": Workload((_load(512, 64, (50, 50), (64, 64), 6),), common=2000),
    }
)
"""Name -> load. The smaller ones have as many requests as keep a GPU busy for some seconds."""


class Costs(NamedTuple):
    """What a model costs on its devices."""

    slots: int  # sequences that run together at most
    weight_bytes: float  # that a step reads on one device
    token_bytes: float  # of a token's keys and values, on one device
    bandwidth: float  # bytes/s of one device
    token_seconds: float  # of the products for one token of a prompt, split over all devices


def floor_seconds(workload: Workload, answers: Sequence[Answer], costs: Costs) -> float:
    """Seconds that a load takes at least, as long as reading and computing take turns.

    A step reads all weights once, and of each sequence the keys and values that it has. The first
    token of an answer takes no step: it is drawn behind the prompt. Of prompts the products are
    counted, without attention; words that all have in common, once.

        prompts of 10, answers of 5 and 3, both together:
        steps 4; tokens read 10 + 11 + 12 + 13, 10 + 11; tokens of prompts 20

    Args:
      answers: whole ones.
    """
    drawn = [answer.tokens - 1 for answer in answers]
    together = min(costs.slots, workload.loads[0].concurrency)
    steps = max(math.ceil(sum(drawn) / together), *drawn, 0)
    seen = sum(
        count * answer.prompt_tokens + count * (count - 1) // 2
        for count, answer in zip(drawn, answers, strict=True)
    )
    read = (steps * costs.weight_bytes + seen * costs.token_bytes) / costs.bandwidth
    prompts = sum(answer.prompt_tokens for answer in answers)
    prompts -= workload.common * (len(answers) - 1)
    return read + prompts * costs.token_seconds


ROOT = Path(__file__).parents[1]
WARM_UP = Workload((Load(16, 16, words=(8, 8), tokens=(4, 4), ignore_eos=True, seed=99),))
COLUMNS = (
    "load", "requests", "seconds", "tokens/s", "prompt tokens/s",
    *(f"{what}, ms {' / '.join(f'p{p}' for p in PERCENTILES)}"
      for what in ("first token", "between tokens")),
    "device busy", "share of the floor",
)  # fmt: skip
COUNTERS = {
    "found_tokens": "vllm:prefix_cache_hits_total",
    "preempted": "vllm:num_preemptions_total",
    "repeated_tokens": "spmd:repeated_tokens_total",
    "wasted_tokens": "spmd:wasted_tokens_total",
}
"""What the server counts and the clients do not see -> its metric."""

CROWDED = 0.8
"""Share of a client's process above which the clients may be what is measured."""


class Server(NamedTuple):
    """A server that runs."""

    url: str  # where
    facts: Mapping[str, Any]  # what it said when the model was there
    process: subprocess.Popen[str]

    def counted(self) -> dict[str, int]:
        """`COUNTERS` up to now."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        by_name = {labelled.partition("{")[0]: value for labelled, value in values.items()}
        return {name: int(float(by_name[metric])) for name, metric in COUNTERS.items()}

    def profile(self, seconds: float) -> dict[str, Any]:
        """Traces its devices; waits until the trace is read."""
        stdin: IO[str] = self.process.stdin  # type: ignore[assignment]
        stdin.write(f"profile {seconds}\n")
        stdin.flush()
        answer = _answer(self.process)
        if "error" in answer:
            raise BenchError(f"the devices could not be traced: {answer['error']}")
        return answer


@contextlib.contextmanager
def serving(given: argparse.Namespace) -> Iterator[Server]:
    """The server in its process; at the end it is told to stop, and has to do so properly."""
    port = free_port()
    flags = json.dumps({**vars(given), "port": port})
    command = [sys.executable, "-m", "benchmarks.load_server", flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            facts = _answer(process)
            url = f"http://127.0.0.1:{port}"
            while httpx.get(f"{url}/health", trust_env=False).status_code != 200:
                time.sleep(0.02)
            yield Server(url, facts | _answer(process), process)  # nothing is compiled any more
            process.terminate()
            if status := process.wait():
                raise BenchError(f"the server ended with status {status}")
        finally:
            process.terminate()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that the server says."""
    line = process.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise BenchError("the server ended: see above")
    answer: dict[str, Any] = json.loads(line)
    return answer


def trace_of(
    server: Server, ask: Callable[[], Asked], half: float, seconds: float
) -> dict[str, Any] | None:
    """Puts a load on the server once more, and traces its devices from the middle on.

    Args:
      half: seconds until that.

    Returns:
      What the trace says; None if the load ended before it.
    """
    with ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(ask)
        time.sleep(half)
        trace = server.profile(seconds)
        return trace if trace["ended"] <= under_way.result().ended else None


def numbers_of(
    workload: Workload, asked: Asked, trace: Mapping[str, Any] | None, costs: Costs
) -> dict[str, Any]:
    """What there is to say of a load.

    Raises:
      BenchError: an answer is missing, or wrong.
    """
    result = Result(asked.answers, asked.seconds, 0, 0)
    check(result)
    found = summarize(result)
    if found["done"] < found["requests"]:
        problem = next(a.problem for a in asked.answers if a.outcome != "done")
        raise BenchError(f"{found['requests'] - found['done']} requests were refused: {problem}")
    floor = floor_seconds(workload, asked.answers, costs)
    return {
        **found,
        "prompt_tokens_per_second": found["prompt_tokens"] / asked.seconds,
        "floor_seconds": floor,
        "share_of_floor": floor / asked.seconds,
        "trace": trace,
        "clients_busy": asked.busy,
    }


def row(name: str, numbers: Mapping[str, Any]) -> str:
    """A row of the table."""

    def times(of: str) -> str:
        found = numbers[of]
        return " / ".join(f"{found[f'p{p}']:,.1f}" for p in PERCENTILES) if found else ""

    trace = numbers["trace"]
    return (
        f"| {name} | {numbers['requests']} | {numbers['seconds']:.2f} | "
        f"{numbers['tokens_per_second']:,.0f} | {numbers['prompt_tokens_per_second']:,.0f} | "
        f"{times('first_token_ms')} | {times('between_tokens_ms')} | "
        f"{format(trace['share'], '.1%') if trace else ''} | {numbers['share_of_floor']:.1%} |"
    )


def remarks(name: str, numbers: Mapping[str, Any]) -> list[str]:
    """Sentences for which the table has no room."""
    said = [
        f"{name}: {numbers['found_tokens']:,} tokens of prompts were found in the cache, "
        f"{numbers['preempted']} requests preempted"
    ]
    if trace := numbers["trace"]:
        longest = f", the longest {trace['longest'] * 1e3:.1f} ms" if trace["gaps"] else ""
        said.append(f"{name}: {trace['gaps']} gaps above 0.2 ms between kernels{longest}")
    if numbers["clients_busy"] > CROWDED:
        said.append(
            f"{name}: a client's process computed {numbers['clients_busy']:.0%} of the time, so it "
            "may be what was measured: use more --client_processes"
        )
    return said


def bench(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Prints the table, row by row; name -> numbers."""
    workloads = {name: WORKLOADS[name].scaled(given.scale) for name in given.loads}
    found: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    count = given.client_processes
    with serving(given) as server, client_pool(count) as pool:

        def ask(workload: Workload) -> Asked:
            load, asks = workload.loads[0], workload.asks()
            return ask_from(pool, count, server.url, given.model, load, asks)

        ask(WARM_UP)
        if given.trace_seconds:
            server.profile(0.1)  # the first one loads libraries
        facts = server.facts
        print(
            f"jax {jax.__version__}, {facts['device']}; {given.model}, {given.slots} slots of "
            f"{given.max_length} tokens in {facts['pages']} pages of {given.page}, steps of "
            f"{facts['budget']} rows, weights {given.quantize}, greedy; ready after "
            f"{facts['seconds']:.0f} s, all functions after {facts['all_seconds']:.0f} s"
        )
        print_head(COLUMNS)
        for name, workload in workloads.items():
            if workload.longest > facts["longest"]:
                print(
                    f"{name}: skipped, as it asks for {workload.longest} tokens and a sequence has "
                    f"at most {facts['longest']}",
                    file=sys.stderr,
                )
                continue
            before = server.counted()
            asked = ask(workload)
            counted = server.counted()
            trace = None
            if given.trace_seconds:
                again = functools.partial(ask, workload)
                trace = trace_of(server, again, asked.seconds / 2, given.trace_seconds)
            try:
                found[name] = numbers_of(workload, asked, trace, Costs(**facts["costs"]))
            except BenchError as error:  # the other loads may still tell something
                problems.append(f"{name}: {error}")
                continue
            found[name] |= {of: count - before[of] for of, count in counted.items()}
            print(row(name, found[name]), flush=True)
            for sentence in remarks(name, found[name]):
                print(sentence, file=sys.stderr)
    if problems:
        raise BenchError("; ".join(problems))
    return found


def load_names(text: str) -> tuple[str, ...]:
    """Names of loads joined by commas."""
    names = words(text)
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not among {', '.join(WORKLOADS)}")
    return names


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run loads", __doc__)
    add = parser.add_argument
    add("--loads", type=load_names, default=",".join(WORKLOADS), help="which, in this order")
    add("--scale", type=float, default=1.0, help="of requests, at once and in all, and of lengths")
    add("--client_processes", type=positive, default=4, help="that ask and read")
    add("--trace_seconds", type=float, default=2.0, help="of each load; 0: no trace")
    add("--json", type=Path, help="write the numbers to this file too")
    add("--model", default="quickstart", help="named config")
    add("--layers", type=int, default=0, help="overrides the number of layers; 0 keeps it")
    add("--model_axis", type=positive, default=1, help="devices that share a layer")
    export_llama.add_shape_flags(parser)
    parser.set_defaults(max_length=4352)
    add("--token_budget", type=positive, help="as of scripts/serve")
    add("--max_waiting", type=int, default=ServerOptions().max_waiting, help="as of scripts/serve")
    add("--symbols", type=symbol_values, default={}, help="as of scripts/serve")
    add("--memory_share", type=float, help="as of scripts/serve")
    add("--bandwidth", type=float, help="bytes/s of a device, for the floor (default: the chip's)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    json_file, given.json = given.json, None
    try:
        found = bench(given)
    except (BenchError, OSError, httpx.HTTPError) as error:
        sys.exit(f"error: {error}")
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
