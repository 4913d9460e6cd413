"""The thread that owns a backend: runs the scheduler's actions and hands out what comes of them.

Readers live in asyncio: `submit` returns a stream of deltas that is read with `async for`. A lock
guards the scheduler and the table of choices; the backend runs, and tokens become text, without it.

The thread begins all that the scheduler lets it begin, then takes the results of the oldest call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from serving.engine.actions import Action, Copy, Counts, Decode, Prefill, Progress, Request
from serving.engine.backend import Backend, Prefilled, Tokens
from serving.engine.choice import Choice, Delta, Job, NotFinite, Token, pick, read_scores
from serving.engine.scheduler import Scheduler
from serving.engine.stream import Entry, Failed, Observer, State, Stopped, Stream, Unavailable
from serving.engine.text import Decode as DecodeText
from serving.engine.text import Pieces

_LOG = logging.getLogger("serving")


class _Call(NamedTuple):
    """An action that was begun, when, and what waits for its results."""

    action: Action
    started: float
    results: Callable[[], Any]


class Engine:
    """Runs requests on a backend.

    Args:
      backend: the model; only the engine's thread calls it.
      decode: ids -> text.
      letter: any token that ends a word: alternatives are shown as they would read behind it.
      observer: hears what happens.
      max_waiting: requests that may wait for a slot.
      steps: tokens that are drawn between two looks for ends where nobody watches.
      ahead: calls that are begun before the last one's results are there.
    """

    def __init__(
        self,
        backend: Backend,
        decode: DecodeText,
        letter: Sequence[int] = (),
        *,
        observer: Observer | None = None,
        max_waiting: int = 256,
        steps: int = 10,
        ahead: int = 1,
    ) -> None:
        self.backend = backend
        self.limits = backend.limits
        self.error: str | None = None
        self._decode = decode
        self._pieces = Pieces(decode, letter)
        self._observer = observer
        self._scheduler = Scheduler(
            backend.limits, max_waiting=max_waiting, steps=steps, ahead=ahead
        )
        self._entries: dict[int, Entry] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._stopping = False
        self._draining = False
        self._under_way: deque[_Call] = deque()
        self._busy_since: float | None = None
        self._outbox: list[tuple[Stream, Delta | Failed]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -----------------------------------------------------------------------------------------
    # For readers, on their threads.

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job], client: str = "", *, interactive: bool = False) -> Stream:
        """Ask for completions, all or none of which are queued.

        Args:
          jobs: one for each completion.
          client: whom to be fair to.
          interactive: somebody watches the tokens come.

        Raises:
          QueueFull: too many wait already.
          Unavailable: the engine is draining or was stopped.
          Failed: the model has failed.
          ValueError: a job that no slot could hold.
        """
        keys = [next(self._keys) for _ in jobs]
        stream = Stream(keys, self.cancel)
        now = time.monotonic()
        choices = [Choice(i, job, self._decode, self._pieces) for i, job in enumerate(jobs)]
        with self._wake:
            self._check_open()
            self._scheduler.submit(
                [
                    Request(
                        key,
                        client,
                        job.prompt,
                        job.max_tokens,
                        job.sampling,
                        job.stop_ids,
                        interactive,
                        job.score_prompt,
                        alternatives=bool(job.logprobs),
                    )
                    for key, job in zip(keys, jobs, strict=True)
                ]
            )
            for key, choice in zip(keys, choices, strict=True):
                self._entries[key] = Entry(choice, stream, now)
            self._wake.notify()
        return stream

    def cancel(self, keys: Sequence[int]) -> None:
        """Drop requests; those that are over are left alone."""
        now = time.monotonic()
        with self._lock:
            entries = [self._entries.pop(key) for key in keys if key in self._entries]
            for key in keys:
                self._scheduler.cancel(key)
        for entry in entries:
            self._finished(entry, "abort", now)

    def read_scores(self, job: Job, scores: Tokens) -> tuple[Token, ...]:
        """The tokens of a prompt, from the scores that came with its first delta."""
        return read_scores(job, scores, self._decode, self._pieces)

    def state(self) -> State:
        """How things stand."""
        with self._lock:
            slots = self._scheduler.slots
            held = sum(slots.length(i) for i, owner in enumerate(slots.owners) if owner is not None)
            room = self.limits.slots * self.limits.max_length
            counts = Counts(**vars(self._scheduler.counts))
            return State(self._scheduler.waiting, self._scheduler.running, held / room, counts)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        with self._lock:
            return self._scheduler.idle

    def stalled(self) -> float:
        """Seconds that nothing has come from the backend though a call is under way."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def drain(self) -> None:
        """Refuse what comes from now on; what was taken goes on."""
        with self._lock:
            self._draining = True

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after the call that is under way; what is not finished fails."""
        with self._wake:
            self._draining = self._stopping = True
            self._wake.notify()
        self._fail_all(Stopped("the server is shutting down"))
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _check_open(self) -> None:
        if self.error is not None:
            raise Failed(self.error)
        if self._draining:
            raise Unavailable("the server is shutting down and takes no new requests")

    # -----------------------------------------------------------------------------------------
    # The thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                while (action := self._next()) is not None:
                    self._under_way.append(self._begin(action))
                if self._under_way:
                    self._finish(self._under_way.popleft())
                else:
                    self._wait()
        except Exception as error:
            _LOG.exception("the model failed; the server takes no more requests")
            with self._lock:
                self.error = f"the model failed: {type(error).__name__}: {error}"
            self._fail_all(Failed(self.error))

    def _next(self) -> Action | None:
        with self._lock:
            action = self._scheduler.next()
            if action is not None:
                self._note_placed(action)
            return action

    def _wait(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or not self._scheduler.idle)

    def _begin(self, action: Action) -> _Call:
        started = time.monotonic()
        if self._busy_since is None:
            self._busy_since = started
        match action:
            case Copy():
                self.backend.copy(action.source, action.target, action.length)
                results: Callable[[], Any] = _nothing
            case Prefill():
                results = self.backend.prefill(
                    action.slot,
                    action.tokens,
                    action.start,
                    sampling=action.sampling,
                    targets=action.targets,
                )
            case Decode():
                results = self.backend.decode(action.active, action.steps, action.alternatives)
        return _Call(action, started, results)

    def _finish(self, call: _Call) -> None:
        action, results = call.action, call.results()
        # A call begins when those before it are done.
        seconds = time.monotonic() - max(call.started, self._busy_since or 0.0)
        self._busy_since = time.monotonic() if self._under_way else None
        match action:
            case Copy():
                with self._lock:
                    self._scheduler.copied()
            case Prefill():
                self._ran(action.size, seconds)
                self._prefilled(action, results)
            case Decode():
                self._ran(sum(action.active) * action.steps, seconds, action.steps, action.held)
                self._decoded(results)
        outbox, self._outbox = self._outbox, []
        _deliver(outbox)

    def _prefilled(self, action: Prefill, results: Prefilled) -> None:
        first, scores = results
        with self._lock:
            progress = self._scheduler.prefilled(None if first is None else int(first.ids[0]))
            entry = self._entries.get(action.key)
        if entry is not None and scores is not None:
            entry.choice.take_scores(pick(scores, slice(action.size)))
        if progress is not None and entry is not None:
            self._advance(
                entry, progress, _empty(self.limits.top_logprobs) if first is None else first
            )

    def _decoded(self, drawn: Tokens) -> None:
        ids = drawn.ids.T.tolist()
        with self._lock:
            done = [
                (self._entries.get(progress.key), progress)
                for progress in self._scheduler.decoded(ids)
            ]
        for entry, progress in done:
            if entry is not None:
                mine = pick(drawn, (slice(progress.tokens), progress.slot))
                self._advance(entry, progress, mine)

    def _advance(self, entry: Entry, progress: Progress, drawn: Tokens) -> None:
        """Make text of a choice's tokens, and end it where that says so."""
        now = time.monotonic()
        try:
            delta, unused = entry.choice.take(drawn, progress.finish)
        except Exception as error:
            self._drop(progress, entry, error)
            return
        used = progress.tokens - unused
        self._note_tokens(entry, used, now)
        with self._lock:
            if progress.key not in self._entries:
                self._scheduler.count(0, progress.tokens)
                return  # it was cancelled meanwhile
            self._scheduler.count(used, unused)
            if delta.finish is not None:
                self._scheduler.finish(progress.key)
                del self._entries[progress.key]
        if delta.finish is not None:
            self._finished(entry, delta.finish, now)
        self._outbox.append((entry.stream, delta))

    def _drop(self, progress: Progress, entry: Entry, error: Exception) -> None:
        """Fail one request whose tokens make no sense; the others go on."""
        if isinstance(error, NotFinite):
            _LOG.error("slot %d: %s", progress.slot, error)
        else:
            _LOG.exception("a request's tokens could not be shown")
        with self._lock:
            self._scheduler.count(0, progress.tokens)
            self._scheduler.cancel(progress.key)
            if self._entries.pop(progress.key, None) is None:
                return
        self._finished(entry, "error", time.monotonic())
        self._outbox.append((entry.stream, Failed(str(error))))

    def _fail_all(self, failure: Failed) -> None:
        with self._lock:
            entries = list(self._entries.values())
            for key in self._entries:
                self._scheduler.cancel(key)
            self._entries.clear()
        now = time.monotonic()
        self._busy_since = None
        for entry in entries:
            self._finished(entry, "error", now)
        _deliver([(entry.stream, failure) for entry in entries])

    # -----------------------------------------------------------------------------------------
    # Noting.

    def _note_placed(self, action: Action) -> None:
        entry = None if isinstance(action, Decode) else self._entries.get(action.key)
        if entry is not None and entry.placed is None:
            entry.placed = time.monotonic()

    def _note_tokens(self, entry: Entry, tokens: int, now: float) -> None:
        if not tokens or self._observer is None:
            return
        if entry.first is None:
            entry.first = now
            self._observer.first_token(now - entry.arrived)
        else:
            self._observer.more_tokens(now - entry.last, tokens)
        entry.last = now

    def _ran(self, tokens: int, seconds: float, steps: int = 0, held: int = 0) -> None:
        if self._observer is not None:
            self._observer.ran(tokens, seconds, steps, held)

    def _finished(self, entry: Entry, reason: str, now: float) -> None:
        if self._observer is not None:
            self._observer.finished(entry.finished(reason, now))


def _nothing() -> None:
    """What comes of a copy."""


def _deliver(outbox: Sequence[tuple[Stream, Delta | Failed]]) -> None:
    """Hand over what was made, with one wake-up for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Delta | Failed]]] = {}
    for stream, delta in outbox:
        by_loop.setdefault(stream.loop, []).append((stream, delta))
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
            loop.call_soon_threadsafe(_put, mine)


def _put(outbox: Sequence[tuple[Stream, Delta | Failed]]) -> None:
    for stream, delta in outbox:
        stream.put(delta)


def _empty(top: int) -> Tokens:
    """No tokens."""
    ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Tokens(ids, logprobs, np.zeros((0, top), np.int32), np.zeros((0, top), np.float32))
