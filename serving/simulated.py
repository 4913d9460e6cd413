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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spmd.errors import ArgumentError
from spmd.serving.engine.actions import EngineStep, Job
from spmd.serving.engine.backend import Limits
from spmd.serving.engine.model_backend import budget
from spmd.serving.engine.scheduler import Scheduler


class HostSeconds(NamedTuple):
    """What the host takes, as fitted to loads on one H200 (docs/benchmarks/plan.md)."""

    door: float = 0.8e-3  # of a request, until the scheduler has it; one after the other
    call: float = 1.5e-3  # to begin a step
    part: float = 10e-6  # of that for each slot of the step
    begin: float = 0.3e-3  # to set up a slot for a request
    results: float = 1.0e-3  # from a step's end until its tokens are known
    token: float = 11e-6  # of that for each of them
    client: float = 2.0e-3  # from there until clients have them
    between: float = 0.6e-3  # between two steps on the devices, though the next one has been begun


HOST = HostSeconds()

CACHED = 1.7
"""So many times as fast as from memory a step reads a page that another slot of it reads, too."""


class LayersSeconds(NamedTuple):
    """What attention of layers that are alike takes on one device, all of them together."""

    read: float  # seconds to read keys and values of a position
    pair: float  # seconds of arithmetic, for a row and a position that it sees
    reach: float  # the most positions that a row sees

    def seconds(self, start: int, rows: int, share: float) -> float:
        """Of some rows of a slot from position `start` on; each sees those up to its own.

        `share` is that of the time that reading takes, which others of the step save.
        """
        end = start + rows
        rising = min(max(self.reach - start, 0), rows)  # rows that see all before them
        pairs = rising * (start + (rising + 1) / 2) + (rows - rising) * min(self.reach, end)
        return max(share * self.read * min(end, self.reach + rows), self.pair * pairs)


class StepTimes(NamedTuple):
    """What steps take: all but attention by their size, attention by what rows see."""

    seconds: Mapping[int, float]  # rows of a group, ascending -> seconds
    told: Mapping[int, float]  # what a server would tell its scheduler that they take
    attention: Sequence[LayersSeconds] = ()

    def of(self, step: EngineStep, slots: int) -> float:
        """Seconds of a step; groups of so many slots compute at the same time."""
        rows, longest = 0, 0.0
        by_group = itertools.groupby(sorted(step.parts), lambda part: part.slot // slots)
        for parts in (list(found) for _, found in by_group):
            rows = max(rows, sum(part.rows for part in parts))
            pages = [part.pages for part in parts]
            held, different = sum(map(len, pages)), len(set().union(*pages))
            share = (different + (held - different) / CACHED) / held
            took = (
                layers.seconds(part.start, part.rows, share)
                for layers in self.attention
                for part in parts
            )
            longest = max(longest, sum(took))
        return self.seconds[next(size for size in self.seconds if size >= rows)] + longest


class ClientRequest(NamedTuple):
    """One request of a load."""

    prompt: tuple[int, ...]  # tokens; prompts that begin alike share pages
    answer: int  # tokens
    at: float = 0.0  # when it is sent, where `OfferedLoad.at_once` does not say so


@dataclass(frozen=True)
class OfferedLoad:
    """What clients ask for.

    Attributes:
      requests: in the order in which they are sent.
      at_once: so many clients, of which each sends the next request when it has its answer; 0:
        requests are sent at their times, however many are under way.
    """

    requests: tuple[ClientRequest, ...]
    at_once: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(one.prompt) + one.answer for one in self.requests)

    def share(self, machine: int, machines: int) -> "OfferedLoad":
        """What one of several machines gets: requests go round, and clients are divided."""
        clients = len(range(machine, self.at_once, machines))
        is_idle = self.at_once and not clients
        return OfferedLoad(() if is_idle else self.requests[machine::machines], clients)

    @staticmethod
    def read(text: str, seed: int = 0) -> "OfferedLoad":
        """Reads one of `LOADS`, `prompt=245-445,answer=64-256,rate=12`, or a .jsonl file's path.

        A line of such a file has `prompt_tokens` and `completion_tokens`, and `at` in seconds; or
        `time` of the end and `seconds`, as in the log of `serve --log_format json`.

        Raises:
          ArgumentError: text or a file that says something else.
        """
        if text.endswith((".jsonl", ".log")):
            return _logged(Path(text))
        pairs = dict(part.partition("=")[::2] for part in LOADS.get(text, text).split(","))
        known = {"prompt", "answer", "at_once", "rate", "requests", "common"}
        try:
            (prompt, answer) = (_bounds(pairs[name]) for name in ("prompt", "answer"))
            at_once, rate = int(pairs.get("at_once", 0)), float(pairs.get("rate", 0))
            count = int(pairs.get("requests", 4 * at_once or max(256, math.ceil(60 * rate))))
            common = tuple(range(int(pairs.get("common", 0))))
            if (
                pairs.keys() - known
                or bool(at_once) == bool(rate)
                or min(count, rate + at_once) < 0
            ):
                raise ValueError
        except (KeyError, ValueError):
            raise ArgumentError(
                f"{text!r} is no traffic",
                required=f"one of {', '.join(LOADS)}; a .jsonl file; or prompt and answer (tokens, "
                "as 64-256), at_once or rate (a second), and if need be requests and common",
                fix="write --traffic prompt=245-445,answer=64-256,rate=12",
            ) from None
        random_, now, made = random.Random(seed), 0.0, []
        new = itertools.count(len(common))
        for _ in range(count):
            own = tuple(itertools.islice(new, random_.randint(*prompt)))
            now += random_.expovariate(rate) if rate else 0.0
            made.append(ClientRequest((*common, *own), random_.randint(*answer), now))
        return OfferedLoad(tuple(made), at_once)


LOADS = {
    "streams": "prompt=246-446,answer=64-256,at_once=64,requests=256",
    "wide": "prompt=246-446,answer=64-256,at_once=256,requests=1024",
    "long": "prompt=4001,answer=32,at_once=32,requests=64",
    "prefix": "common=2000,prompt=51,answer=64,at_once=64,requests=512",
    "one": "prompt=346,answer=256,at_once=1,requests=4",
}
"""Name -> load: those of `benchmarks/run loads`."""


def _bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most:
        raise ValueError
    return least, most


def _logged(path: Path) -> OfferedLoad:
    new, made = itertools.count(), []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            said = json.loads(line)
            if "prompt_tokens" not in said:  # of what else a server's log tells
                continue
            ended = datetime.fromisoformat(said["time"]).timestamp() if "at" not in said else 0.0
            at = said["at"] if "at" in said else ended - said["seconds"]
            prompt = tuple(itertools.islice(new, said["prompt_tokens"]))
            if prompt and said["completion_tokens"] > 0:
                made.append(ClientRequest(prompt, said["completion_tokens"], at))
        except (ValueError, TypeError, KeyError) as error:
            raise ArgumentError(
                f"{path}, line {number} is no request: {error!r}",
                fix='write {"at": 0.25, "prompt_tokens": 345, "completion_tokens": 128}',
            ) from None
    if not made:
        raise ArgumentError(f"{path} has no requests", fix="see docs/plan.md for its form")
    first = min(one.at for one in made)
    return OfferedLoad(tuple(sorted((one._replace(at=one.at - first) for one in made), key=_at)))


def _at(request: ClientRequest) -> float:
    return request.at


@dataclass(frozen=True)
class SimulatedLoad:
    """What clients saw; all times in seconds."""

    tokens: int  # of all answers
    seconds: float  # from the first request to the end of the last answer
    first: Sequence[float]  # from each request until its first token
    gaps: Sequence[float]  # between tokens
    steps: int
    late: float  # share of the requests that had no slot yet when the last one was sent

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def first_ms(self, percentile: float) -> float:
        """Milliseconds until the first token."""
        return float(1e3 * np.percentile(self.first, percentile))

    def gap_ms(self, percentile: float) -> float:
        """Milliseconds between tokens; 0 if no answer has two."""
        return float(1e3 * np.percentile(self.gaps, percentile)) if len(self.gaps) else 0.0

    @staticmethod
    def of(parts: "Iterable[SimulatedLoad]") -> "SimulatedLoad":
        """What several machines did at the same time."""
        tokens, seconds, first, gaps, steps, late = zip(
            *(vars(p).values() for p in parts), strict=True
        )
        joined = (list(itertools.chain.from_iterable(lists)) for lists in (first, gaps))
        return SimulatedLoad(sum(tokens), max(seconds), *joined, sum(steps), max(late))


def simulate(
    load: OfferedLoad, limits: Limits, times: StepTimes, host: HostSeconds = HOST
) -> SimulatedLoad:
    """Runs a load on one server, as `spmd.serving.engine.core` would run it.

    Its tokens are all different, so none is guessed.

    Raises:
      ValueError: a request that the pool could not hold.
    """
    slots = limits.slots // limits.groups
    rows = budget(times.told, slots)
    scheduler = Scheduler(limits, rows)
    scheduler.know(times.told, {}, rows, limits.rows[-1])
    asked = load.requests
    waiting = iter(range(len(asked)))  # for a client that has time
    coming: list[tuple[float, int]] = []  # (when it is sent, request): a heap
    if load.at_once:
        coming = [(0.0, number) for number in itertools.islice(waiting, load.at_once)]
    else:
        coming = [(one.at, number) for number, one in enumerate(asked)]
    sent, told = [0.0] * len(asked), [0.0] * len(asked)
    first, gaps, drawn, late, steps = list[float](), list[float](), 0, 0.0, 0
    under_way: deque[tuple[EngineStep, float]] = deque()
    token = itertools.count(1 << 30)  # no prompt's
    now = free = door = 0.0
    while coming or not scheduler.idle:
        while coming and (ready := max(door, coming[0][0]) + host.door) <= now:
            door, (at, number) = ready, heapq.heappop(coming)
            sent[number] = at
            scheduler.submit([Job(asked[number].prompt, asked[number].answer, key=number)])
            if not coming and not load.at_once:
                late = scheduler.waiting / len(asked)
        if (step := scheduler.next()) is not None:
            now += host.call + host.part * len(step.parts) + host.begin * len(step.begins)
            free = max(now, free + host.between) + times.of(step, slots)
            under_way.append((step, free))
            steps += 1
        elif under_way:
            step, done = under_way.popleft()
            ids = [next(token) for part in step.parts for _ in range(part.drawn)]
            now = max(now, done) + host.results + host.token * len(ids)
            for one in scheduler.stepped(ids, [()] * len(step.parts)):
                number, seen = one.key, now + host.client
                if told[number]:
                    gaps.append(seen - told[number])
                else:
                    first.append(seen - sent[number])
                told[number] = seen
                drawn += 1
                if one.finish and load.at_once and (other := next(waiting, None)) is not None:
                    heapq.heappush(coming, (seen, other))
        else:
            now = max(now, door + host.door, coming[0][0] + host.door)
    return SimulatedLoad(drawn, max(told, default=0.0) or math.inf, first, gaps, steps, late)


def fewest_machines(
    serve: Callable[[int], SimulatedLoad], is_enough: Callable[[SimulatedLoad], bool], most: int
) -> tuple[int, SimulatedLoad, bool]:
    """The fewest machines that are enough: (how many, what they do, whether they are enough).

    If `most` are not enough it is one machine.
    """
    alone = serve(1)
    if is_enough(alone) or most == 1 or not is_enough(found := serve(most)):
        return 1, alone, is_enough(alone)
    too_few, count = 1, most
    while count - too_few > 1:
        middle = (too_few + count) // 2
        tried = serve(middle)
        if is_enough(tried):
            count, found = middle, tried
        else:
            too_few = middle
    return count, found, True
