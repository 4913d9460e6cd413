"""Runs requests on a backend: one thread calls the backend, readers wait in asyncio.

    submit ──> scheduler ──> calls of the backend ──> tokens ──> text ──> stream

`submit` returns a stream of deltas that is read with `async for`. The engine's thread begins every
action that the scheduler allows, then waits for the oldest call and hands out what came of it.

A lock guards the scheduler and the table of entries. Calling the backend and making text of tokens
take long, so both happen without the lock; a request may be cancelled meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence

import numpy as np

from serving.engine.actions import Action, Copy, Counts, Decode, Prefill, Progress, Request
from serving.engine.backend import Backend, Prefilled, Tokens
from serving.engine.calls import Calls
from serving.engine.choice import Choice, Delta, Job, NotFinite, Token, pick, read_scores
from serving.engine.records import Entry, Observer, State
from serving.engine.scheduler import Scheduler
from serving.engine.stream import Failed, Stopped, Stream, Unavailable, deliver
from serving.engine.text import Decode as DecodeText
from serving.engine.text import Pieces

_LOG = logging.getLogger("serving")


class Engine:
    """Runs requests on a backend.

    Args:
      backend: the model; only the engine's thread calls it.
      decode: turns token ids into text.
      letter: ids of which the last one ends a word. Alternatives are shown as they would read
        behind it: some tokenizers drop a space at the beginning of a text.
      observer: is told what happens.
      max_waiting: how many requests may wait for a slot.
      steps: where nobody watches tokens come, how many are drawn before the host looks whether one
        of them ends its request.
      ahead: how many calls are begun before the results of the last one are there.

    Attributes:
      error: why the model failed; None as long as it has not.
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
        self._calls = Calls(backend)
        self._entries: dict[int, Entry] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._stopping = False
        self._draining = False
        self._outbox: list[tuple[Stream, Delta | Failed]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -----------------------------------------------------------------------------------------
    # For readers, on their threads.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, jobs: Sequence[Job], client: str = "", *, interactive: bool = False) -> Stream:
        """Queues completions: all of them or, if it raises, none.

        Args:
          jobs: one for each completion.
          client: who asks. Clients get equal shares of the tokens.
          interactive: whether a person watches the tokens come, so that they are sent one by one.

        Returns:
          The deltas of all these completions.

        Raises:
          QueueFull: too many requests wait already.
          Unavailable: the engine is draining or was stopped.
          Failed: the model has failed.
          ValueError: no slot could hold one of the jobs.
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
        """Drops requests; keys of requests that have ended are ignored."""
        now = time.monotonic()
        with self._lock:
            entries = [self._entries.pop(key) for key in keys if key in self._entries]
            for key in keys:
                self._scheduler.cancel(key)
        self._report(entries, "abort", now)

    def read_scores(self, job: Job, scores: Tokens) -> tuple[Token, ...]:
        """The tokens of a prompt, made of the scores that came with its first delta."""
        return read_scores(job, scores, self._decode, self._pieces)

    def state(self) -> State:
        """How many requests wait and run, and how full the slots are."""
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
        """Seconds for which the backend has been in one call; 0 if there is none."""
        return self._calls.stalled()

    def drain(self) -> None:
        """Refuses new requests; those that it has go on to their ends."""
        with self._lock:
            self._draining = True

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the thread after the call that is under way; unfinished requests fail.

        Args:
          timeout: seconds to wait for the thread.
        """
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
                # The device gets its next call before the host reads the results of the last one.
                while (action := self._next()) is not None:
                    self._calls.begin(action)
                if self._calls:
                    self._finish()
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
            if isinstance(action, Copy | Prefill) and action.key in self._entries:
                self._entries[action.key].note_placed()
            return action

    def _wait(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or not self._scheduler.idle)

    def _finish(self) -> None:
        action, results, seconds = self._calls.finish()
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
        deliver(outbox)

    def _prefilled(self, action: Prefill, results: Prefilled) -> None:
        first, scores = results
        with self._lock:
            progress = self._scheduler.prefilled(None if first is None else int(first.ids[0]))
            entry = self._entries.get(action.key)
        if entry is not None and scores is not None:
            entry.choice.take_scores(pick(scores, slice(action.size)))
        if progress is not None and entry is not None:
            self._advance(
                entry, progress, _no_tokens(self.limits.top_logprobs) if first is None else first
            )

    def _decoded(self, drawn: Tokens) -> None:
        # Only the first `progress.tokens` of a slot's tokens are its request's own. Those behind
        # were drawn after the request's end, which the host learned of too late.
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
        """Makes text of a completion's tokens, and ends it where the text has a stop string."""
        now = time.monotonic()
        # A mistake in one request's text must not end the thread, and with it all the others.
        try:
            delta, unused = entry.choice.take(drawn, progress.finish)
        except Exception as error:
            self._drop(progress, entry, error)
            return
        used = progress.tokens - unused
        entry.note_tokens(used, now, self._observer)
        with self._lock:
            if progress.key not in self._entries:  # cancelled while its text was made
                self._scheduler.count(0, progress.tokens)
                return
            self._scheduler.count(used, unused)
            if delta.finish is not None:
                self._scheduler.finish(progress.key)
                del self._entries[progress.key]
        if delta.finish is not None:
            self._report([entry], delta.finish, now)
        self._outbox.append((entry.stream, delta))

    def _drop(self, progress: Progress, entry: Entry, error: Exception) -> None:
        """Fails one request, whose tokens cannot be shown; the others go on."""
        if isinstance(error, NotFinite):
            _LOG.error("slot %d: %s", progress.slot, error)
        else:
            _LOG.exception("a request's tokens could not be shown")
        with self._lock:
            self._scheduler.count(0, progress.tokens)
            self._scheduler.cancel(progress.key)
            if self._entries.pop(progress.key, None) is None:
                return
        self._report([entry], "error", time.monotonic())
        self._outbox.append((entry.stream, Failed(str(error))))

    def _fail_all(self, failure: Failed) -> None:
        with self._lock:
            entries = list(self._entries.values())
            for key in self._entries:
                self._scheduler.cancel(key)
            self._entries.clear()
        self._calls.abandon()
        self._report(entries, "error", time.monotonic())
        deliver([(entry.stream, failure) for entry in entries])

    def _ran(self, tokens: int, seconds: float, steps: int = 0, held: int = 0) -> None:
        if self._observer is not None:
            self._observer.ran(tokens, seconds, steps, held)

    def _report(self, entries: Sequence[Entry], reason: str, now: float) -> None:
        if self._observer is not None:
            for entry in entries:
                self._observer.finished(entry.finished(reason, now))


def _no_tokens(top: int) -> Tokens:
    """`Tokens` of which there are none, with `top` alternatives for each."""
    ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Tokens(ids, logprobs, np.zeros((0, top), np.int32), np.zeros((0, top), np.float32))
