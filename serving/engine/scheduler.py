"""Decides what the device does next: continuous batching as a state machine.

There are no threads, no clock and no device here. `next` names an action to begin. Once it is done,
`copied`, `prefilled` or `decoded` takes its results. Requests come and go between these calls.

An action depends on how many tokens there are, never on which. So it may begin before the last
one's tokens are known, and the device goes on while the host makes text of them. The price: a
request that drew a stop id may be in one call too many, whose tokens for it are dropped.

Prompts are filled in one at a time, chunk by chunk. While anything decodes, there is at most one
chunk between two calls of decode, so that a long prompt delays the others little. Two slots, chunks
of 8, requests A (12 tokens) and B (4 tokens):

    submit(A, B)
    next() -> Prefill A 0..7      A gets slot 0; nothing decodes yet
    next() -> Prefill A 8..11     the last chunk: it draws A's first token
    next() -> Decode A, 1 step    one step only, as B waits
    next() -> Prefill B 0..3      B gets slot 1 only now
    next() -> Decode A B, many steps

A request gets its slot when its turn to be filled in has come, not before: by then the slots hold
the prompts of the requests ahead of it, and it can reuse a beginning that they have in common.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from serving.engine.actions import (
    Action,
    Copy,
    Counts,
    Decode,
    Finish,
    Prefill,
    Progress,
    QueueFull,
    Request,
)
from serving.engine.backend import Limits
from serving.engine.fairness import FairQueue
from serving.engine.slots import Slots

_Action = TypeVar("_Action", Copy, Prefill, Decode)


@dataclasses.dataclass
class _Running:
    """A request that has a slot.

    Attributes:
      request: the request.
      slot: its slot.
      source: the slot from which the beginning of its prompt is still to be copied; else `slot`.
      filled: tokens of the prompt whose chunks have begun, or that were there already.
      begun: tokens to draw whose calls have begun.
      drawn: tokens that are known; those of calls under way are not.
    """

    request: Request
    slot: int
    source: int
    filled: int
    begun: int = 0
    drawn: int = 0

    @property
    def held(self) -> int:
        """Tokens whose keys and values are in the slot once all that has begun is done."""
        # The latest token's key and value are written by the step that draws the next one.
        return self.filled + max(0, self.begun - 1)

    @property
    def wanted(self) -> int:
        """Tokens that it may still draw in calls that have not begun."""
        return self.request.max_tokens - self.begun


class Scheduler:
    """Distributes requests over the slots of a backend.

    Args:
      limits: the backend's sizes.
      max_waiting: how many requests there may be beyond those that have slots.
      steps: where nobody watches tokens come, how many are drawn before the host looks whether one
        of them ends its request. Calls under way at the same time count together.
      ahead: how many calls are begun before the results of the last one are there.

    Attributes:
      counts: totals since the start.
      slots: what the slots hold, and for whom.
    """

    def __init__(
        self, limits: Limits, *, max_waiting: int = 256, steps: int = 10, ahead: int = 1
    ) -> None:
        self.limits = limits
        self.max_waiting = max_waiting
        self.steps = max(1, min(steps // (1 + ahead), limits.decode_steps))
        self.counts = Counts()
        self.slots = Slots(limits.slots, limits.max_length)
        self._queue: FairQueue[Request] = FairQueue()
        self._running: dict[int, _Running] = {}
        self._prefilling: _Running | None = None
        # Each slot's latest known token, which `slots` does not list yet: its key and value are
        # written by the step that draws the next one.
        self._latest = [0] * limits.slots
        self._decode_is_due = False
        self._ahead = ahead
        self._under_way: deque[Action] = deque()

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of requests with a slot."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is no request at all, waiting or running."""
        return not self._queue and not self._running

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests: all of them or, if it raises, none.

        Raises:
          QueueFull: there is no room for all of them.
          ValueError: no slot could hold one of them.
        """
        for request in requests:
            self._check(request)
        # A request for which there is a free slot waits only for the prompts before its own, and
        # does not count as waiting.
        if self.waiting + self.running + len(requests) > self.limits.slots + self.max_waiting:
            raise QueueFull(
                f"{self.waiting} requests wait for a slot, {self.max_waiting} may: try again later"
            )
        for request in requests:
            self._queue.push(request)

    def count(self, used: int, unused: int = 0) -> None:
        """Counts the tokens of a `Progress`, once their text is known.

        Args:
          used: tokens that the reader gets.
          unused: tokens behind a stop string.
        """
        self.counts.drawn += used
        self.counts.wasted += unused

    def finish(self, key: int) -> None:
        """Ends a request at a stop string; does nothing if it has ended already."""
        if running := self._running.get(key):
            self._end(running)

    def cancel(self, key: int) -> bool:
        """Drops a request that waits or runs; returns whether there was one."""
        running = self._running.get(key)
        waiting = next((request for request in self._queue if request.key == key), None)
        if running is not None:
            self._end(running)
        elif waiting is not None:
            self._queue.remove(waiting)
            self._queue.leave(waiting.client)
        else:
            return False
        self.counts.cancelled += 1
        return True

    def next(self) -> Action | None:
        """Chooses the action to begin now.

        Returns:
          None if there is nothing to do, or nothing before a call under way is done.
        """
        if len(self._under_way) > self._ahead:
            return None
        action = self._choose()
        if action is not None:
            self._under_way.append(action)
        return action

    def copied(self) -> None:
        """Takes note that the oldest action under way, a `Copy`, is done."""
        self._done(Copy)

    def prefilled(self, first: int | None) -> Progress | None:
        """Takes the result of the oldest action under way, a `Prefill`.

        Args:
          first: the token that it drew; None if it was to draw none.

        Returns:
          The request's progress if its prompt is complete; None before that or if it was cancelled.
        """
        action = self._done(Prefill)
        running = self._running.get(action.key)
        if running is None:
            self.counts.wasted += first is not None
            return None
        if first is not None:
            self._latest[action.slot] = first
        if not action.is_last:
            return None
        return self._advance(running, [] if first is None else [first])

    def decoded(self, ids: Sequence[Sequence[int]]) -> list[Progress]:
        """Takes the results of the oldest action under way, a `Decode`.

        Args:
          ids: (slots, steps) the tokens; those of inactive slots are ignored.

        Returns:
          The progress of each request that has not ended meanwhile.
        """
        action = self._done(Decode)
        done = []
        for slot, key in enumerate(action.keys):
            running = None if key is None else self._running.get(key)
            if running is not None:
                drawn = list(ids[slot])
                self.slots.write(slot, self.slots.length(slot), [self._latest[slot], *drawn[:-1]])
                self._latest[slot] = drawn[-1]
                done.append(self._advance(running, drawn))
            elif key is not None:
                # It was cancelled or finished while this call was under way. Its slot may belong
                # to another request by now: what `slots` says of it must stay as it is.
                self.counts.wasted += action.steps
        return done

    def _done(self, kind: type[_Action]) -> _Action:
        action = self._under_way[0] if self._under_way else None
        if not isinstance(action, kind):
            raise RuntimeError(f"no {kind.__name__} is to be done next, but {action}")
        self._under_way.popleft()
        return action

    # -----------------------------------------------------------------------------------------
    # Choosing.

    def _choose(self) -> Action | None:
        decoding = [
            running
            for running in self._running.values()
            if running is not self._prefilling and running.wanted > 0
        ]
        # Set by every chunk: decode and prefill take turns as long as both have work.
        if decoding and self._decode_is_due:
            return self._decode(decoding)
        return self._prefill() or (self._decode(decoding) if decoding else None)

    def _decode(self, decoding: Sequence[_Running]) -> Decode:
        steps = self._count_steps(decoding)
        held = sum(running.held for running in decoding)
        keys: list[int | None] = [None] * self.limits.slots
        for running in decoding:
            keys[running.slot] = running.request.key
            running.begun += steps
        self._decode_is_due = False
        return Decode(tuple(keys), steps, any(r.request.alternatives for r in decoding), held)

    def _count_steps(self, decoding: Sequence[_Running]) -> int:
        """How many tokens the next call of decode draws for each slot.

        As many as allowed, as every slot has room for, and as any request still wants. But only one
        if a prompt could be filled in next: more would keep its slot empty for longer.
        """
        has_prompts = self._prefilling is not None or (self._queue and self.slots.any_free)
        if has_prompts or any(running.request.interactive for running in decoding):
            return 1
        wanted = max(running.wanted for running in decoding)
        room = min(self.limits.max_length - running.held for running in decoding)
        return min(self.steps, wanted, room)

    def _prefill(self) -> Copy | Prefill | None:
        """The next chunk of the prompt that is being filled in, or the first one of another."""
        running = self._prefilling or self._admit()
        if running is None:
            return None
        if running.source != running.slot:
            return self._copy(running)
        request, slot, start = running.request, running.slot, running.filled
        tokens = request.prompt[: start + self.limits.chunks[-1]]
        end = running.filled = len(tokens)
        is_last = end == len(request.prompt)
        # Nothing follows the prompt's last token; `Backend.prefill` takes any id there.
        targets = (*request.prompt[start + 1 : end + 1], *([0] if is_last else []))
        self.slots.write(slot, start, tokens[start:])
        self.counts.prefilled += end - start
        self._queue.charge(request.client, end - start)
        self._decode_is_due = True
        if is_last:
            self._prefilling = None
            # The last chunk also draws the first token, unless none is wanted.
            running.begun = min(1, request.max_tokens)
        return Prefill(
            key=request.key,
            slot=slot,
            tokens=tokens,
            start=start,
            sampling=request.sampling if running.begun else None,
            targets=targets if request.score_prompt else None,
            is_last=is_last,
        )

    def _copy(self, running: _Running) -> Copy:
        source, running.source = running.source, running.slot
        self.slots.write(running.slot, 0, self.slots.content(source)[: running.filled])
        return Copy(running.request.key, source, running.slot, running.filled)

    def _admit(self) -> _Running | None:
        """Gives a slot to the request whose turn it is; None if no slot is free or nobody waits."""
        request = self._queue.pop() if self.slots.any_free else None
        if request is None:
            return None
        # Scores come from running the prompt, so nothing of it may be reused.
        place = self.slots.place(np.asarray(request.prompt, np.int32), not request.score_prompt)
        self.slots.take(place.slot, request.key)
        self.counts.reused += place.length
        running = _Running(request, place.slot, place.source, place.length)
        self._running[request.key] = self._prefilling = running
        return running

    # -----------------------------------------------------------------------------------------
    # Advancing.

    def _advance(self, running: _Running, drawn: Sequence[int]) -> Progress:
        """Gives a request its tokens, up to the first one that ends it."""
        request = running.request
        drawn_before = running.drawn
        finish: Finish | None = None if request.max_tokens else "length"
        for token in drawn:
            running.drawn += 1
            finish = _finish(request, token, running.drawn)
            if finish is not None:
                break
        given = running.drawn - drawn_before
        self.counts.wasted += len(drawn) - given
        self._queue.charge(request.client, given)
        if finish is not None:
            self._end(running)
        return Progress(request.key, running.slot, given, finish)

    def _end(self, running: _Running) -> None:
        del self._running[running.request.key]
        if running is self._prefilling:
            self._prefilling = None
        self.slots.release(running.slot)
        self._queue.leave(running.request.client)

    def _check(self, request: Request) -> None:
        length, most = len(request.prompt), self.limits.max_length
        if not length or request.max_tokens < 0 or length + request.max_tokens > most:
            raise ValueError(
                f"a prompt of {length} tokens and {request.max_tokens} more: "
                f"a slot holds 1 to {most}"
            )


def _finish(request: Request, token: int, drawn: int) -> Finish | None:
    if token in request.stop_ids:
        return "stop"
    return "length" if drawn == request.max_tokens else None
