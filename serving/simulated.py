"""What clients would see of a server that is not there: its scheduler, on a clock of its own.

The engine's scheduler gets requests as they come and says which steps there are. They take the
seconds that somebody predicted, and nobody waits for them: an hour of traffic takes seconds.

    clients -> door (HTTP, one after the other) -> scheduler -> steps of the devices -> clients
"""

import heapq
import itertools
import json
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spmd.errors import ArgumentError
from spmd.serving.engine.actions import EngineStep, Job
from spmd.serving.engine.backend import Limits, SlotPart
from spmd.serving.engine.model_backend import budget
from spmd.serving.engine.scheduler import Scheduler


class HostSeconds(NamedTuple):
    """What the host takes, fitted to loads on one H200 (docs/benchmarks/plan.md)."""

    reading: float = 3.0e-3  # of a request's text, until it comes to the door
    door: float = 0.8e-3  # of a request, until the scheduler has it; one after the other
    call: float = 1.5e-3  # to begin a step
    part: float = 10e-6  # of that for each slot of the step
    begin: float = 0.3e-3  # to set up a slot for a request
    results: float = 1.0e-3  # from a step's end until its tokens are known
    token: float = 11e-6  # of that for each of them
    client: float = 4.5e-3  # from there until clients have them
    between: float = 0.6e-3  # between two steps on the devices, though the next one has been begun


HOST = HostSeconds()

CACHED = 1.7
"""So many times as fast as from memory a step reads a page that another slot of it reads, too."""


class StepTimes(NamedTuple):
    """What steps take on the devices: attention by what rows see, all else by their number."""

    seconds: Mapping[int, float]  # rows of a group, ascending -> seconds without attention
    told: Mapping[int, float]  # what a server would tell its scheduler that they take
    read: float  # seconds to read keys and values of a position, in all layers
    pair: float  # seconds of attention's arithmetic for a row and a position that it sees

    def of(self, step: EngineStep, slots: int) -> float:
        """Seconds of a step; groups of so many slots compute at the same time."""
        rows, longest = 0, 0.0
        for _, found in itertools.groupby(sorted(step.parts), lambda part: part.slot // slots):
            parts = list(found)
            rows = max(rows, sum(part.rows for part in parts))
            pages = [part.pages for part in parts]
            held, different = sum(map(len, pages)), len(set().union(*pages))
            read = self.read * (different + (held - different) / CACHED) / held
            each = ((p.start + p.rows, p.rows * (p.start + (p.rows + 1) / 2)) for p in parts)
            longest = max(longest, sum(max(read * n, self.pair * pairs) for n, pairs in each))
        once = self.seconds[next(size for size in self.seconds if size >= rows)] + longest
        return step.parts[0].turns * once


class ClientRequest(NamedTuple):
    """One request of a load."""

    prompt: tuple[int, ...]  # tokens; prompts that begin alike share pages
    answer: int  # how many tokens
    at: float = 0.0  # when it is sent, if not by clients that wait for their answers
    text: tuple[int, ...] = ()  # the answer's tokens; all that are not here differ from any other


class OfferedLoad(NamedTuple):
    """What clients ask for."""

    requests: Sequence[ClientRequest]  # in the order in which they are sent
    # so many clients, of which each sends the next request when it has its answer; 0: requests are
    # sent at their times
    at_once: int = 0


LOADS = {
    "streams": "prompt=246-446,answer=64-256,at_once=64,requests=256",
    "wide": "prompt=246-446,answer=64-256,at_once=256,requests=1024",
    "long": "prompt=4001,answer=32,at_once=32,requests=64",
    "prefix": "common=2000,prompt=51,answer=64,at_once=64,requests=512",
    "one": "prompt=346,answer=256,at_once=1,requests=4",
}
"""Name -> load: those of `benchmarks/run loads`."""


def read_load(text: str) -> OfferedLoad:
    """Reads the name of a load, `prompt=245-445,answer=64-256,rate=12`, or a .jsonl file's path.

    A line of such a file has `prompt_tokens` and `completion_tokens`, and `at` in seconds; or
    `time` of the end and `seconds`, as in the log of `serve --log_format json`.

    Raises:
      ArgumentError: text or a file that says something else.
    """
    new, made, random_, now = itertools.count(), list[ClientRequest](), random.Random(0), 0.0
    if text.endswith(".jsonl"):
        for number, line in enumerate(Path(text).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                said = json.loads(line)
                if said.get("prompt_tokens") and said["completion_tokens"]:  # a log has others, too
                    ended = "at" not in said and datetime.fromisoformat(said["time"]).timestamp()
                    at = ended - said["seconds"] if ended else said["at"]
                    prompt = tuple(itertools.islice(new, said["prompt_tokens"]))
                    made.append(ClientRequest(prompt, said["completion_tokens"], at))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise ArgumentError(
                    f"{text}, line {number} is no request: {error!r}",
                    fix='write {"at": 0.25, "prompt_tokens": 345, "completion_tokens": 128}',
                ) from None
        begin = min((one.at for one in made), default=0.0)
        made = sorted((one._replace(at=one.at - begin) for one in made), key=lambda one: one.at)
        if made:
            return OfferedLoad(made)
    try:
        said = dict(part.split("=") for part in LOADS.get(text, text).split(","))
        common = tuple(itertools.islice(new, int(said.pop("common", 0))))
        ends = [said.pop(name).partition("-")[::2] for name in ("prompt", "answer")]
        prompts, answers = (range(int(low), int(high or low) + 1) for low, high in ends)
        at_once, rate = int(said.pop("at_once", 0)), float(said.pop("rate", 0))
        count = int(said.pop("requests", 4 * at_once or max(256, math.ceil(30 * rate))))
        if said or not at_once + rate or min(at_once, rate, prompts[0] - 1, answers[0] - 1) < 0:
            raise ValueError
        for _ in range(count):
            own = tuple(itertools.islice(new, random_.choice(prompts)))
            now += random_.expovariate(rate) if rate else 0.0
            made.append(ClientRequest((*common, *own), random_.choice(answers), now))
        return OfferedLoad(made, 0 if rate else at_once)
    except (LookupError, ValueError):
        raise ArgumentError(
            f"{text!r} is no traffic",
            required=f"{', '.join(LOADS)}; a .jsonl file with requests; or prompt, answer (tokens, "
            "as 64-256), at_once or rate (a second), and if need be requests, common",
            fix="write --traffic prompt=245-445,answer=64-256,rate=12",
        ) from None


class SimulatedLoad(NamedTuple):
    """What clients saw; all times in seconds."""

    tokens: int  # of all answers
    seconds: float  # from the first request to the end of the last answer
    first: Sequence[float]  # from each request until its first token
    gaps: Sequence[float]  # between tokens
    late: float  # share of the requests that had no slot yet when the last one was sent
    drafted: int = 0  # guesses of tokens that were tried
    accepted: int = 0  # those of them that were right

    def figures(self) -> tuple[float, ...]:
        """Milliseconds: p50 and p99 of the first token, p50 and p99 between tokens."""
        both = (self.first, self.gaps or (0.0,))
        return tuple(1e3 * float(x) for times in both for x in np.percentile(times, (50, 99)))


def simulate(
    load: OfferedLoad, limits: Limits, times: StepTimes, machines: int = 1, host: HostSeconds = HOST
) -> SimulatedLoad:
    """Runs a load on servers that share it, as `spmd.serving.engine.core` would run it.

    Drafts are found in what requests say. ValueError: a request that no pool could hold.
    """
    machines = min(machines, load.at_once or machines)  # others have no client
    shares = (
        OfferedLoad(load.requests[i::machines], len(range(i, load.at_once, machines)))
        for i in range(machines)
    )
    parts = [_alone(one, limits, times, host) for one in shares if one.requests]
    tokens, seconds, first, gaps, late, drafted, accepted = zip(*parts, strict=True)
    firsts, between = (list(itertools.chain(*lists)) for lists in (first, gaps))
    counts = sum(drafted), sum(accepted)
    return SimulatedLoad(sum(tokens), max(seconds), firsts, between, max(late), *counts)


def _alone(load: OfferedLoad, limits: Limits, times: StepTimes, host: HostSeconds) -> SimulatedLoad:
    slots, asked = limits.slots // limits.groups, load.requests
    rows = budget(times.told, slots)
    scheduler = Scheduler(limits, rows)
    decoding = next((n for n in limits.rows if n >= slots), 0)
    turns = {n: limits.turns for n in limits.rows if n <= decoding and limits.turns > 1}
    reading = times.read / limits.groups
    scheduler.know(times.told, turns, rows, limits.rows[-1], reading)
    # (when it is sent, request): a heap; the others are sent by clients that have their answers.
    coming = [(one.at, number) for number, one in enumerate(asked)][: load.at_once or None]
    later = iter(range(len(coming), len(asked)))
    sent, told = [0.0] * len(asked), [0.0] * len(asked)
    first, gaps, tokens, late = list[float](), list[float](), 0, 0.0
    under_way: deque[tuple[EngineStep, float]] = deque()
    token = itertools.count(1 << 30)  # no prompt's
    now = free = door = 0.0

    def at_door(sent: float) -> float:
        return max(door, sent + host.reading) + host.door

    def drawn(one: ClientRequest, part: SlotPart) -> list[int]:
        at = part.start + len(part.tokens or (0,)) - len(one.prompt)
        said = one.text[max(at, 0) : max(at, 0) + part.drawn]
        return [*said, *itertools.islice(token, part.drawn - len(said))]

    while coming or not scheduler.idle:
        while coming and (ready := at_door(coming[0][0])) <= now:
            door, (at, number) = ready, heapq.heappop(coming)
            sent[number] = at
            scheduler.submit([Job(asked[number].prompt, asked[number].answer, key=number)])
            late = 0.0 if coming or load.at_once else scheduler.waiting / len(asked)
        if (step := scheduler.next()) is not None:
            now += host.call + host.part * len(step.parts) + host.begin * len(step.begins)
            free = max(now, free + host.between) + times.of(step, slots)
            under_way.append((step, free))
        elif under_way:
            step, done = under_way.popleft()
            each = [
                drawn(asked[key], part) for key, part in zip(step.keys, step.parts, strict=True)
            ]
            tried = [part.drafts or ids[:-1] for part, ids in zip(step.parts, each, strict=True)]
            ids = [*itertools.chain(*each)]
            now = max(now, done) + host.results + host.token * len(ids)
            seen = now + host.client
            for one in scheduler.stepped(ids, tried):
                before, told[one.key] = told[one.key], seen
                if before != seen:  # tokens of several turns come together
                    (gaps if before else first).append(seen - (before or sent[one.key]))
                tokens += 1
                if one.finish and load.at_once and (other := next(later, None)) is not None:
                    heapq.heappush(coming, (seen, other))
        else:
            now = at_door(coming[0][0])
    counts = scheduler.counts
    return SimulatedLoad(tokens, max(told), first, gaps, late, counts.drafted, counts.accepted)
