"""Clients of an OpenAI-compatible server: ask, read the stream, time it, and doubt every answer."""

import asyncio
import dataclasses
import json
import logging
import multiprocessing
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any, Literal, NamedTuple

import httpx

Outcome = Literal["done", "left", "refused", "failed"]
"""Answered whole; we went away; 429 or 503; anything else."""

_WORDS = """
mesh axis tensor shard slice row column gather scatter reduce layer head token cache slot batch step
weight bias norm gate query key value mask loss gradient device host link ring plan rule factor dim
"""
WORDS = _WORDS.split()


class BenchError(RuntimeError):
    """The load cannot be run, or the server failed it; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request."""

    number: int
    prompt: str  # its text; begins with the number, so that no two are the same
    max_tokens: int  # to draw
    leave_after: int | None  # go away after so many pieces; None reads to the end
    delay: float  # seconds after the start at which it is sent; 0 where concurrency decides


@dataclasses.dataclass
class Answer:
    """What came of a request; times in seconds."""

    ask: Ask
    outcome: Outcome = "failed"
    problem: str = ""  # what is wrong, if something is
    id: str = ""
    text: str = ""
    finish: str | None = None
    began: float = 0.0  # when it was asked, on a clock that all processes of the machine share
    first: float | None = None  # until the first token; None if there was none
    between: list[float] = dataclasses.field(default_factory=list)  # between two pieces of text
    total: float = 0.0  # until the end
    # prompt_tokens, tokens: as the server counts them
    prompt_tokens: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Load:
    """What to put on a server."""

    requests: int  # how many
    concurrency: int = 16  # at once, where no rate is given
    # requests a second, at times as of a Poisson process; None goes by concurrency
    rate: float | None = None
    words: tuple[int, int] = (8, 128)  # least and most words of a prompt
    tokens: tuple[int, int] = (16, 128)  # least and most tokens of an answer
    disconnect: float = 0.0  # share of the requests that leave before the end
    chat: bool = False  # as chats rather than completions
    # ask for all tokens even if the model would end before (not every server knows it)
    ignore_eos: bool = False
    seed: int = 0  # of everything random


def make_asks(load: Load) -> list[Ask]:
    """The requests; the same ones for the same load."""
    rng = random.Random(load.seed)
    asks, now = [], 0.0
    for number in range(load.requests):
        words = rng.choices(WORDS, k=rng.randint(*load.words))
        tokens = rng.randint(*load.tokens)
        leaves = rng.random() < load.disconnect
        now += rng.expovariate(load.rate) if load.rate else 0.0
        leave_after = rng.randint(1, max(1, tokens // 2)) if leaves else None
        asks.append(Ask(number, " ".join([f"{number}:", *words]), tokens, leave_after, now))
    return asks


def make_body(ask: Ask, load: Load, model: str) -> dict[str, Any]:
    """What is sent."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "seed": ask.number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.chat:
        body["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        body["prompt"] = ask.prompt
    if load.ignore_eos:
        body["ignore_eos"] = True
    return body


def open_client(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """A client that opens as many connections as are asked for; one read may take 600 s."""
    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(600.0, connect=30.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def run_load(
    client: httpx.AsyncClient, load: Load, model: str, asks: Sequence[Ask]
) -> list[Answer]:
    """Ask everything and wait for all of it; the answers are in the order of the asks."""
    gate = asyncio.Semaphore(load.concurrency if load.rate is None else len(asks) or 1)
    started = time.perf_counter()

    async def enter(ask: Ask) -> Answer:
        await asyncio.sleep(max(0.0, started + ask.delay - time.perf_counter()))
        async with gate:
            return await ask_one(client, load, model, ask)

    return await asyncio.gather(*map(enter, asks))


async def ask_one(client: httpx.AsyncClient, load: Load, model: str, ask: Ask) -> Answer:
    """Ask once; whatever happens is in the answer."""
    started = time.perf_counter()
    answer = Answer(ask, began=started)
    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=make_body(ask, load, model)) as response:
            if response.status_code == 200:
                await _read(response, answer, started)
            else:
                text = (await response.aread()).decode(errors="replace")
                answer.outcome = "refused" if response.status_code in (429, 503) else "failed"
                answer.problem = f"HTTP {response.status_code}: {text[:200]}"
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        answer.outcome, answer.problem = "failed", f"{type(error).__name__}: {error}"
    answer.total = time.perf_counter() - started
    if answer.outcome == "done":
        answer.problem = find_problem(answer, load)
        answer.outcome = "failed" if answer.problem else "done"
    return answer


async def _read(response: httpx.Response, answer: Answer, started: float) -> None:
    """Follow a stream to its end, or until it is time to leave."""
    pieces, last, ended = 0, started, False
    async for event in _events(response):
        if event is None:
            ended = True
            break
        if "error" in event:
            answer.problem = str(event["error"])[:200]
            return
        text = _take(event, answer)
        if not text:
            continue
        now = time.perf_counter()
        if answer.first is None:
            answer.first = now - started
        else:
            answer.between.append(now - last)
        last, pieces = now, pieces + 1
        if pieces == answer.ask.leave_after:
            answer.outcome = "left"
            return
    answer.outcome = "done" if ended else "failed"
    answer.problem = "" if ended else "the stream broke off"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream; None is its proper end."""
    async for line in response.aiter_lines():
        if not line or line.startswith(":"):
            continue
        if line == "data: [DONE]":
            yield None
            return
        if not line.startswith("data:"):
            raise ValueError(f"no event: {line[:100]}")
        yield json.loads(line[5:])


def _take(event: dict[str, Any], answer: Answer) -> str:
    """Note what an event says; its text."""
    if answer.id and event["id"] != answer.id:
        raise ValueError(f"answers are mixed up: {event['id']} in {answer.id}")
    answer.id = event["id"]
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    text = ""
    for choice in event["choices"]:
        if answer.finish is not None:
            raise ValueError("more came after the end")
        text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        answer.finish = choice.get("finish_reason") or answer.finish
    answer.text += text
    return text


def find_problem(answer: Answer, load: Load) -> str:
    """What is wrong with a whole answer, by its own account; nothing if all is well."""
    wanted = answer.ask.max_tokens
    if answer.finish not in ("length", "stop"):
        return f"it ended because of {answer.finish}"
    if not answer.prompt_tokens or not answer.tokens:
        return "no usage came"
    is_whole = answer.finish == "length" or load.ignore_eos
    if answer.tokens > wanted or (is_whole and answer.tokens != wanted):
        return f"{answer.tokens} tokens instead of {wanted}"
    return ""


def find_doubles(answers: Sequence[Answer]) -> list[str]:
    """Ids that more than one answer had."""
    ids = [answer.id for answer in answers if answer.id]
    return sorted({one for one in ids if ids.count(one) > 1}) if len(set(ids)) < len(ids) else []


def parse_bounds(name: str, value: Sequence[str]) -> tuple[int, int]:
    """Two numbers, or one that is both."""
    try:
        low, high = (int(value[0]), int(value[-1]))
    except (ValueError, IndexError):
        low, high = 0, 0
    if not 1 <= low <= high or len(value) > 2:
        raise BenchError(f"--{name}: least and most are needed, as in 8,128, not {','.join(value)}")
    return low, high


# Clients in processes of their own: reading streams must not cost the server's time, nor ours.
#
# A process reads about 13,000 events a second, 80 us each. So 64 streams that get a token at the
# same moment keep one process for 5 ms, and the last of them looks that much later; four see it in
# 1.3 ms.


class Asked(NamedTuple):
    """What came of a load."""

    answers: list[Answer]  # in the order of the requests
    seconds: float  # from the first request to the end of the last answer
    # share of that time for which the busiest of the processes computed; near 1 the clients are
    # what is measured
    busy: float

    @property
    def ended(self) -> float:
        """When the last answer was there, on the clock of `Answer.began`."""
        return max(answer.began + answer.total for answer in self.answers)


def client_pool(processes: int) -> ProcessPoolExecutor:
    """Processes for `ask_from`, which end with this one."""
    context = multiprocessing.get_context("spawn")  # a fork would have our threads' locks
    return ProcessPoolExecutor(processes, context, _set_up)


def ask_from(
    pool: Executor, processes: int, url: str, model: str, load: Load, asks: Sequence[Ask]
) -> Asked:
    """Asks a server from several processes: each has its share of the requests, also at once."""
    count = min(processes, load.concurrency, len(asks))
    parts = []
    for i in range(count):
        share = dataclasses.replace(load, concurrency=len(range(i, load.concurrency, count)))
        parts.append(pool.submit(_ask_all, url, model, share, asks[i::count]))
    done = [part.result() for part in parts]
    answers = [done[n % count][0][n // count] for n in range(len(asks))]
    began = min(answer.began for answer in answers)
    seconds = max(answer.began + answer.total for answer in answers) - began
    return Asked(answers, seconds, max(computed for _, computed in done) / seconds)


def _set_up() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _ask_all(url: str, model: str, load: Load, asks: Sequence[Ask]) -> tuple[list[Answer], float]:
    """The answers, and the seconds for which this process computed."""

    async def ask() -> tuple[list[Answer], float]:
        async with open_client(url) as client:
            before = time.process_time()
            answers = await run_load(client, load, model, asks)
            return answers, time.process_time() - before

    return asyncio.run(ask())
