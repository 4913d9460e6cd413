"""Where a request's time went: its phases, the steps meanwhile, and what made its tokens late.

It is made of a few times of each request and each step, mostly when somebody asks.
"""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from spmd.serving.engine.records import Finished, StepRecord
from spmd.serving.http.logs import HttpExchange

PHASES = {
    "body": "its body was read",
    "tokens": "its text became tokens",
    "queue": "it waited for a slot",
    "prompt": "its prompt was run",
    "step": "the step that drew its first token",
    "text": "that token became text",
    "send": "the first text was sent",
    "draw": "its other tokens were drawn",
    "end": "the rest was sent",
}
"""What happens to a request, in this order."""

TO_FIRST_TOKEN = tuple(PHASES)[:7]

REASONS = {
    "prompts": "prompts of others were in its step",
    "long": "its step took long",
    "text": "its text was made late",
    "mask": "it waited for a mask",
    "preempted": "older requests needed its pages, and it was run again",
    "drafts": "it waited for its last token, to guess the next ones",
    "host": "no step was under way: the host was late",
}
"""What made a token late."""


def phases(exchange: HttpExchange, record: Finished) -> dict[str, tuple[float, float]]:
    """When a completion was in each phase, in seconds from its request's headers on."""
    arrived = record.ended - record.total
    placed = arrived + record.queued
    first = placed + record.prefill
    marks = {"body": exchange.read, "tokens": arrived, "queue": placed}
    if record.generated:
        drawn = first - record.text
        marks |= {"prompt": drawn - record.step, "step": drawn, "text": first}
        if exchange.streams:
            marks["send"] = exchange.first_sent
    marks |= {"draw": record.ended, "end": exchange.ended}
    found, start = {}, 0.0
    for name, mark in marks.items():
        end = max(start, mark - exchange.started)
        found[name], start = (start, end), end
    return found


def tell(
    exchange: HttpExchange, record: Finished, key: int, steps: Sequence[StepRecord] | None
) -> dict[str, Any]:
    """What is known of a completion, as JSON; times are in seconds from its request's headers on.

    Args:
      key: the engine's key of it.
      steps: the latest ones, the oldest first; None leaves out what they tell.
    """
    parts, zero = phases(exchange, record), exchange.started
    to_first = parts.get("send", parts.get("text", (0.0, None)))[1]
    told: dict[str, Any] = {
        "request_id": exchange.request_id, "path": exchange.path, "status": exchange.status,
        "index": record.choice, "finish_reason": record.reason,
        "prompt_tokens": record.prompt_tokens, "completion_tokens": record.generated,
        "first_token_seconds": to_first, "seconds": parts["end"][1], "phases": parts,
    }  # fmt: skip
    if steps is None:
        return told
    until = zero + (to_first or parts["end"][1])
    seen = [one for one in steps if one.done >= zero and one.begun <= until]
    every = len(seen) // 500 + 1  # of more, all that ran the request are kept, and some others
    told["steps"] = [
        {
            "start": one.begun - zero,
            "end": one.done - zero,
            "own_rows": (own := one.chunks.get(key, (0,))[0]),
            "prompts_rows": (prompts := sum(rows for rows, _ in one.chunks.values())) - own,
            "drawing_rows": one.rows - prompts,
            "padded_rows": one.padded,
        }
        for i, one in enumerate(seen)
        if key in one.keys or not i % every
    ]
    drew = [x for x in steps if key in x.keys and x.told <= record.ended]
    told["gaps"] = gaps = list[dict[str, Any]]()
    pairs = [*itertools.pairwise(x for x in drew if x.chunks.get(key, (0, True))[1])]
    usual = statistics.median([one.told - before.told for before, one in pairs] or [0.0])
    for before, one in pairs:
        late = _late(before, one, usual, key, record.guided)
        gaps.append({"start": before.told - zero, "end": one.told - zero, "late": late})
    return told


def _late(before: StepRecord, one: StepRecord, usual: float, key: int, guided: bool) -> str | None:
    """Why the token of a step was late, if it was: what took most of the time beyond the usual."""
    gap = one.told - before.told
    if gap <= 1.5 * usual:
        return None
    half = (gap - usual) / 2
    if one.begun - before.done > half:
        if key in one.chunks:
            return "preempted"
        return "mask" if guided else "host" if one.gap > half else "drafts"
    if one.told - one.done - (before.told - before.done) > half:
        return "text"
    return "prompts" if one.chunks else "long"
