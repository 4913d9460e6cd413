"""Loads an OpenAI-compatible server with random requests, and says how it bears them.

Every answer is checked as far as one can from outside: its stream is whole and nobody else's, its
tokens are as many as asked for, and no request is lost. With --verify some prompts are asked again
alone, and their texts compared: at temperature 0 they are the same, up to what rounding does in
batches of different sizes.

Examples:
    benchmarks/run serve --url http://127.0.0.1:8000 --requests 500 --concurrency 64
    benchmarks/run serve --requests 1000 --rate 20 --disconnect 0.1 --tokens 32,256
    benchmarks/run serve --chat --requests 100 --verify 10 --json serve.json
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.load_client import (
    Answer,
    BenchError,
    Load,
    find_doubles,
    make_asks,
    open_client,
    parse_bounds,
    run_load,
)
from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, Switch, positive, words
from spmd.models.fields import taken

PERCENTILES = (50, 90, 99)


class Result(NamedTuple):
    """All answers, the seconds they took, and how many of those asked again were the same."""

    answers: list[Answer]
    seconds: float
    verified: int
    same: int


def make_load(given: argparse.Namespace) -> Load:
    """What the flags ask for."""
    if given.rate is not None and given.rate <= 0:
        raise BenchError(f"--rate: requests a second are more than 0, not {given.rate}")
    bounds = {name: parse_bounds(name, getattr(given, name)) for name in ("words", "tokens")}
    return taken(Load, given, **bounds)


async def find_model(client: httpx.AsyncClient) -> str:
    """The first model that the server has."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise BenchError(f"{client.base_url}: {type(error).__name__} {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{client.base_url} names no models: give one with --model") from error


async def run(given: argparse.Namespace, load: Load) -> Result:
    """Put the load on the server."""
    async with open_client(given.url, given.api_key) as client:
        model = given.model or await find_model(client)
        started = time.perf_counter()
        answers = await run_load(client, load, model, make_asks(load))
        seconds = time.perf_counter() - started
        done = [answer for answer in answers if answer.outcome == "done"][: given.verify]
        alone = dataclasses.replace(load, concurrency=1, rate=None)
        again = [answer.ask for answer in done]
        texts = [answer.text for answer in await run_load(client, alone, model, again)]
        same = sum(answer.text == text for answer, text in zip(done, texts, strict=True))
    return Result(answers, seconds, len(done), same)


def summarize(result: Result) -> dict[str, Any]:
    """The numbers; times in milliseconds."""
    answers = result.answers
    whole = [answer for answer in answers if answer.outcome == "done"]
    outcomes = collections.Counter(answer.outcome for answer in answers)
    tokens = sum(answer.tokens for answer in whole)
    return {
        "requests": len(answers),
        **{name: outcomes[name] for name in ("done", "left", "refused", "failed")},
        "doubles": len(find_doubles(answers)),
        "verified": result.verified,
        "same_alone": result.same,
        "seconds": result.seconds,
        "requests_per_second": len(whole) / result.seconds,
        "tokens_per_second": tokens / result.seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in whole),
        "tokens": tokens,
        "first_token_ms": _percentiles([a.first for a in whole if a.first is not None]),
        "between_tokens_ms": _percentiles([x for answer in whole for x in answer.between]),
        "whole_ms": _percentiles([answer.total for answer in whole]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = np.percentile(np.asarray(seconds), PERCENTILES) * 1e3
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}


def print_summary(summary: dict[str, Any]) -> None:
    """Two small tables."""
    counted = ("requests", "done", "left", "refused", "failed")
    print_head((*counted, "seconds", "tokens/s"))
    rates = f"{summary['seconds']:.2f}", f"{summary['tokens_per_second']:,.1f}"
    print_line([*(str(summary[name]) for name in counted), *rates])
    print()
    print_head(("milliseconds", *(f"p{p}" for p in PERCENTILES)))
    for name in ("first_token_ms", "between_tokens_ms", "whole_ms"):
        values = summary[name] or {}
        shown = [f"{values[f'p{p}']:,.1f}" if values else "-" for p in PERCENTILES]
        print_line([name.removesuffix("_ms").replace("_", " "), *shown])
    if summary["verified"]:
        print(f"\n{summary['same_alone']} of {summary['verified']} the same when alone")


def check(result: Result) -> None:
    """Raise `BenchError` if the server lost, mixed up or failed anything."""
    doubles = find_doubles(result.answers)
    if doubles:
        raise BenchError(f"{len(doubles)} ids belong to more than one answer, as {doubles[0]}")
    failed = [answer for answer in result.answers if answer.outcome == "failed"]
    if failed:
        first = failed[0]
        raise BenchError(
            f"{len(failed)} of {len(result.answers)} requests failed; "
            f"number {first.ask.number}: {first.problem}"
        )


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run serve", __doc__)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    add("--model", help="the model's name (default: the server's first)")
    add("--api_key", help="sent as the bearer token")
    add("--requests", type=positive, default=100, help="how many")
    add("--concurrency", type=positive, default=16, help="requests at once")
    add("--rate", type=float, help="requests a second instead of so many at once")
    add("--words", type=words, default="8,128", help="least and most words of a prompt")
    add("--tokens", type=words, default="16,128", help="least and most tokens of an answer")
    add("--disconnect", type=float, default=0.0, help="share of the requests that leave early")
    add("--chat", action=Switch, help="ask as chats")
    add("--ignore_eos", action=Switch, help="ask for all tokens, past the model's ends")
    add("--seed", type=int, default=0, help="of everything random")
    add("--verify", type=int, default=0, help="ask so many again, alone")
    add("--json", help="write the numbers to this file too")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the load and print what came of it."""
    given = make_parser().parse_args(arguments)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request
    try:
        result = asyncio.run(run(given, make_load(given)))
        summary = summarize(result)
        print_summary(summary)
        if given.json:
            Path(given.json).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        check(result)
    except (BenchError, OSError) as error:
        sys.exit(f"error: {error}")
