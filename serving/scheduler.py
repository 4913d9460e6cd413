"""What the device does next: continuous batching as a state machine.

No threads, no clock, no device: `next` names an action, and once it is done `copied`, `prefilled`
or `decoded` takes what came of it. Requests come and go between these calls, or during an action.

Prompts are filled in one at a time, chunk by chunk, and while anything decodes there is one chunk
at most between two calls of decode. A request gets its slot only when its turn to be filled in has
come, so that it finds whatever beginning the requests before it have left in the slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from serving.actions import (
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
from serving.backend import Limits
from serving.fairness import FairQueue
from serving.slots import Slots


@dataclasses.dataclass
class _Running:
    request: Request
    slot: int
    source: int  # the slot that its beginning is to be copied from; its own where there is none
    filled: int  # tokens of the prompt whose keys and values are known
    drawn: int = 0


class Scheduler:
    """Requests over the slots of a backend.

    Args:
      limits: the backend's.
      max_waiting: requests that there may be beside those which fit the slots.
      steps: tokens that one call of decode makes where nobody watches.
    """

    def __init__(self, limits: Limits, *, max_waiting: int = 256, steps: int = 10) -> None:
        self.limits = limits
        self.max_waiting = max_waiting
        self.steps = min(steps, limits.decode_steps)
        self.counts = Counts()
        self.slots = Slots(limits.slots, limits.max_length)
        self._queue: FairQueue[Request] = FairQueue()
        self._running: dict[int, _Running] = {}
        self._prefilling: _Running | None = None
        # The token that each slot's next decode step starts from, owned or not.
        self._latest = [0] * limits.slots
        self._decode_is_due = False
        self._pending: Action | None = None

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

    def finish(self, key: int, unused: int = 0) -> None:
        """End a request because of what its tokens say.

        Args:
          key: which; one that is over already is only counted.
          unused: how many of the tokens that it was given last lie behind its end.
        """
        self.counts.drawn -= unused
        self.counts.wasted += unused
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
        """What to do now; None if there is nothing to do."""
        if self._pending is not None:
            raise RuntimeError(f"{self._pending} is not done yet")
        self._pending = self._choose()
        return self._pending

    def copied(self) -> None:
        """The `Copy` is done."""
        action = self._pending
        if not isinstance(action, Copy):
            raise RuntimeError(f"there was no copy to do but {action}")
        self._pending = None
        self.slots.write(action.target, 0, self.slots.content(action.source)[: action.length])
        if running := self._running.get(action.key):
            running.source = running.slot

    def prefilled(self, first: int | None) -> Progress | None:
        """The `Prefill` is done.

        Args:
          first: the token it drew, if it had a sampling.

        Returns:
          What it came to, if this was the prompt's last chunk and it was not cancelled meanwhile.
        """
        action = self._pending
        if not isinstance(action, Prefill):
            raise RuntimeError(f"there was nothing to prefill but {action}")
        self._pending = None
        self._decode_is_due = True
        self.counts.prefilled += len(action.tokens)
        self.slots.write(action.slot, action.start, action.tokens)
        running = self._running.get(action.key)
        if first is not None:
            self._latest[action.slot] = first
        if running is None:
            self.counts.wasted += first is not None
            return None
        self._queue.charge(running.request.client, len(action.tokens))
        running.filled += len(action.tokens)
        if running.filled < len(running.request.prompt):
            return None
        self._prefilling = None
        return self._advance(running, [] if first is None else [first])

    def decoded(self, ids: Sequence[Sequence[int]]) -> list[Progress]:
        """The `Decode` is done.

        Args:
          ids: (slots, steps) the tokens; those of inactive slots are not looked at.

        Returns:
          What it came to for each request that was not cancelled meanwhile.
        """
        action = self._pending
        if not isinstance(action, Decode):
            raise RuntimeError(f"there was nothing to decode but {action}")
        self._pending = None
        self._decode_is_due = False
        done = []
        for slot, key in enumerate(action.keys):
            if key is None:
                continue
            drawn = list(ids[slot])
            self.slots.write(slot, self.slots.length(slot), [self._latest[slot], *drawn[:-1]])
            self._latest[slot] = drawn[-1]
            running = self._running.get(key)
            if running is None:
                self.counts.wasted += len(drawn)
            else:
                done.append(self._advance(running, drawn))
        return done

    # -----------------------------------------------------------------------------------------
    # Choosing.

    def _choose(self) -> Action | None:
        decoding = [
            running for running in self._running.values() if running is not self._prefilling
        ]
        if decoding and self._decode_is_due:
            return self._decode(decoding)
        return self._prefill() or (self._decode(decoding) if decoding else None)

    def _decode(self, decoding: Sequence[_Running]) -> Decode:
        keys: list[int | None] = [None] * self.limits.slots
        for running in decoding:
            keys[running.slot] = running.request.key
        return Decode(tuple(keys), self._count_steps(decoding))

    def _count_steps(self, decoding: Sequence[_Running]) -> int:
        """As many as allowed, as all slots have room for, and as any request still wants.

        One while a prompt could be filled in: there is one chunk between two calls, and slots would
        stay empty for long.
        """
        has_prompts = self._prefilling is not None or (self._queue and self.slots.any_free)
        if has_prompts or any(running.request.interactive for running in decoding):
            return 1
        wanted = max(running.request.max_tokens - running.drawn for running in decoding)
        room = min(self.limits.max_length - self.slots.length(r.slot) for r in decoding)
        return min(self.steps, wanted, room)

    def _prefill(self) -> Copy | Prefill | None:
        """The next chunk of the prompt that is being filled in, or the first one of another."""
        running = self._prefilling or self._admit()
        if running is None:
            return None
        request, slot, start = running.request, running.slot, running.filled
        if running.source != slot:
            return Copy(request.key, running.source, slot, start)
        tokens = request.prompt[start : start + self.limits.chunks[-1]]
        end = start + len(tokens)
        is_last = end == len(request.prompt)
        # The token after the prompt's last one is not known: any will do.
        targets = (*request.prompt[start + 1 : end + 1], *([0] if is_last else []))
        return Prefill(
            key=request.key,
            slot=slot,
            tokens=tokens,
            start=start,
            sampling=request.sampling if is_last and request.max_tokens else None,
            targets=targets if request.score_prompt else None,
        )

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
        self.counts.drawn += given
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
