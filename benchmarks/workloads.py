"""The loads of benchmarks/loads.py, and the seconds that they take at least.

A word of a prompt is a token. Each prompt has a number of its own before its words, so that none
begins as another does, but for what a load gives to all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.load_client import WORDS, Answer, Ask, Load, make_asks


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

    def scaled(self, scale: float) -> Workload:
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
            words = ask.prompt.split()[1:]
            prompt = " ".join([*common, f"{number}:", *words])
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
