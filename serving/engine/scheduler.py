"""What the device does next: continuous batching as a state machine.

No threads, no clock, no device: `next` names an action to begin, and once it is done `copied`,
`prefilled` or `decoded` takes what came of it. Requests come and go between these calls.

An action is begun before the last one's tokens are known: what it is depends on how many there will
be, not on which. So the device goes on while the host makes text of them; a request that turns out
to have ended is in one call too many, whose tokens for it are dropped.

Prompts are filled in one at a time, chunk by chunk, and while anything decodes there is one chunk
at most between two calls of decode. A request gets its slot only when its turn to be filled in has
come, so that it finds whatever beginning the requests before it have left in the slots.
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
    request: Request
    slot: int
    source: int  # the slot that its beginning is to be copied from; its own where there is none
    filled: int  # tokens of the prompt whose chunks have begun
    begun: int = 0  # tokens to draw whose calls have begun
    drawn: int = 0  # tokens that are known

    @property
    def held(self) -> int:
        """Tokens whose keys and values are in the slot once all that has begun is done."""
        return self.filled + max(0, self.begun - 1)

    @property
    def wanted(self) -> int:
        """Tokens that are still to begin."""
        return self.request.max_tokens - self.begun


class Scheduler:
    """Requests over the slots of a backend.

    Args:
      limits: the backend's.
      max_waiting: requests that there may be beside those which fit the slots.
      steps: tokens that are drawn between two looks for ends where nobody watches, in the calls
        that are under way at a time together.
      ahead: actions that are begun before the last one's results are there.
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
        # Each slot's latest known token, whose key and value come with the next one.
        self._latest = [0] * limits.slots
        self._decode_is_due = False
        self._ahead = ahead
        self._under_way: deque[Action] = deque()

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, now or after the action that is under way."""
        return not self._queue and not self._running

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue some requests, all or none.

        Raises:
          QueueFull: they would not all fit.
          ValueError: a request that no slot could hold.
        """
        for request in requests:
            self._check(request)
        # Those that wait only until the prompts before theirs are filled in are not counted.
        if self.waiting + self.running + len(requests) > self.limits.slots + self.max_waiting:
            raise QueueFull(
                f"{self.waiting} requests wait for a slot, {self.max_waiting} may: try again later"
            )
        for request in requests:
            self._queue.push(request)

    def count(self, used: int, unused: int = 0) -> None:
        """Count tokens of a `Progress`, once it is known how many of them their reader gets."""
        self.counts.drawn += used
        self.counts.wasted += unused

    def finish(self, key: int) -> None:
        """End a request because of what its tokens say; one that is over already is left alone."""
        if running := self._running.get(key):
            self._end(running)

    def cancel(self, key: int) -> bool:
        """Drop a request, wherever it is; says whether it was there."""
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
        """What to begin now.

        None if there is nothing to do, or not before something under way is done.
        """
        if len(self._under_way) > self._ahead:
            return None
        action = self._choose()
        if action is not None:
            self._under_way.append(action)
        return action

    def copied(self) -> None:
        """The oldest action under way, a `Copy`, is done."""
        self._done(Copy)

    def prefilled(self, first: int | None) -> Progress | None:
        """The oldest action under way, a `Prefill`, is done.

        Args:
          first: the token it drew, if it had a sampling.

        Returns:
          What it came to, if this was the prompt's last chunk and it was not cancelled meanwhile.
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
        """The oldest action under way, a `Decode`, is done.

        Args:
          ids: (slots, steps) the tokens; those of inactive slots are not looked at.

        Returns:
          What it came to for each request that was not over meanwhile.
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
            elif key is not None:  # its slot may be another's by now
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
        """As many as allowed, as all slots have room for, and as any request still wants.

        One while a prompt could be filled in: there is one chunk between two calls, and slots would
        stay empty for long.
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
        # The token after the prompt's last one is not known: any will do.
        targets = (*request.prompt[start + 1 : end + 1], *([0] if is_last else []))
        self.slots.write(slot, start, tokens[start:])
        self.counts.prefilled += end - start
        self._queue.charge(request.client, end - start)
        self._decode_is_due = True
        if is_last:
            self._prefilling = None
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
        """Give a slot to the request whose turn it is."""
        request = self._queue.pop() if self.slots.any_free else None
        if request is None:
            return None
        place = self.slots.place(np.asarray(request.prompt, np.int32), not request.score_prompt)
        self.slots.take(place.slot, request.key)
        self.counts.reused += place.length
        running = _Running(request, place.slot, place.source, place.length)
        self._running[request.key] = self._prefilling = running
        return running

    # -----------------------------------------------------------------------------------------
    # Advancing.

    def _advance(self, running: _Running, drawn: Sequence[int]) -> Progress:
        """Give a request the tokens that were drawn for it, up to its end."""
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
