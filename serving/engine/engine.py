"""Runs requests on a backend: a few threads work, readers wait in asyncio.

    submit ──> scheduler ──> calls of the backend ──> tokens ──> text ──> stream

`submit` returns a stream of deltas that is read with `async for`. One thread keeps the device busy:
it begins every step that the scheduler allows, waits for the oldest one, and tells the scheduler
what was drawn. The other one makes text of that and hands it out, while the first goes on. So a
stop string may be found when the request is some steps further; what it drew there is dropped. More
threads make masks for requests with a guide, which go on when theirs is made.

A lock guards the scheduler and the table of entries. Calling the backend and making text of tokens
take long, so both happen without the lock; a request may be cancelled meanwhile.
"""

import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from spmd.serving.engine.actions import Counts, EngineStep, Job, Progress
from spmd.serving.engine.backend import Backend, Stepped, Tokens, Words
from spmd.serving.engine.choice import CompletionText, Delta, NotFinite, Token, read_scores
from spmd.serving.engine.guide import GuideError, Guides
from spmd.serving.engine.records import UNOBSERVED, EngineState, Finished, Observer, StepRecord
from spmd.serving.engine.scheduler import Scheduler
from spmd.serving.engine.stream import Failed, Misguided, Stopped, Stream, deliver, shutting_down
from spmd.serving.engine.text import Decode, TokenTexts
from spmd.serving.engine.workers import have_ended, join_all


class _Call(NamedTuple):
    step: EngineStep
    started: float
    gap: float
    results: Callable[[], Stepped]


class Done(NamedTuple):
    """A step that is done."""

    step: EngineStep  # what was asked for
    results: Stepped  # what the backend returned
    record: StepRecord  # when


class Calls:
    """A queue of the calls under way; only the engine's thread begins and finishes them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._under_way: deque[_Call] = deque()
        # When the device began the oldest call: when that call was made, or, if another one was
        # under way then, when the other one was done.
        self._busy_since: float | None = None
        # Since when there is no call, though requests run.
        self.idle_since: float | None = None

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def begin(self, step: EngineStep) -> None:
        """Begins a step, and returns before it is done."""
        started = time.monotonic()
        gap = 0.0 if self.idle_since is None else started - self.idle_since
        self.idle_since = None
        if self._busy_since is None:
            self._busy_since = started
        for begin in step.begins:
            self._backend.begin(*begin)
        if step.masks:
            self._backend.allow(step.masks)
        results = self._backend.step(step.parts, step.alternatives)
        self._under_way.append(_Call(step, started, gap, results))

    def finish(self) -> Done:
        """Waits for the oldest step."""
        step, started, gap, results = self._under_way.popleft()
        asked = time.monotonic()
        found = results()
        now = time.monotonic()
        begun = max(started, self._busy_since or 0.0)
        self._busy_since, self.idle_since = (now, None) if self._under_way else (None, now)
        of_prompts = zip(step.keys[step.decoding :], step.parts[step.decoding :], strict=True)
        record = StepRecord(
            begun, now, now - asked, gap, step.rows, found.rows - step.rows, step.seen, step.keys,
            {key: (part.rows, part.draws) for key, part in of_prompts},
        )  # fmt: skip
        return Done(step, found, record)

    def stalled(self) -> float:
        """Seconds for which the oldest call has been running; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def abandon(self) -> None:
        """Nobody waits for what is under way any more, so nothing counts as stalled."""
        self._busy_since = None


class Entry:
    """A completion that the engine works on: its text so far, its reader, and its times."""

    def __init__(self, choice: CompletionText, stream: Stream, now: float) -> None:
        self.choice = choice
        self.stream = stream
        self._arrived = now
        self._placed: float | None = None
        self._first: float | None = None
        self._first_step = self._first_text = 0.0
        self._last = now

    def note_placed(self, now: float) -> None:
        """Notes when it got its slot; later calls change nothing."""
        if self._placed is None:
            self._placed = now

    def note_token(self, now: float, step: StepRecord, observer: Observer) -> float | None:
        """Notes a token of a step; returns the seconds since the one before, if there was."""
        last, self._last = self._last, now
        if self._first is not None:
            return now - last
        self._first = now
        self._first_step, self._first_text = step.done - step.begun, now - step.done
        observer.first_token(now - self._arrived)
        return None

    def finished(self, reason: str, now: float) -> Finished:
        """The record of it, at its end."""
        placed = now if self._placed is None else self._placed
        first = now if self._first is None else self._first
        return Finished(
            self.choice.index,
            reason,
            len(self.choice.job.prompt),
            self.choice.generated,
            queued=placed - self._arrived,
            prefill=first - placed,
            decode=now - first,
            total=now - self._arrived,
            ended=now,
            step=self._first_step,
            text=self._first_text,
            guided=self.choice.job.guided,
        )


_LOG = logging.getLogger("serving")

LAG = 16
"""So many steps may wait for their text. Then the device waits, too: with ever more of them, tokens
would come later and later, and requests run ever further beyond their stop strings."""


class Engine:
    """Runs requests on a backend.

    Args:
      backend: the model; only one thread calls it.
      decode: turns token ids into text.
      letter: ids of which the last one ends a word. Alternatives are shown as they would read
        behind it: some tokenizers drop a space at the beginning of a text.
      token_budget: rows of a group in a step that has both rows that draw and chunks of prompts;
        None takes the backend's.
      ahead: how many steps are begun before the results of the last one are there.
      heed: is told what the backend raised, before the readers are.

    Attributes:
      error: why the model failed; None as long as it has not.
    """

    def __init__(
        self,
        backend: Backend,
        decode: Decode,
        letter: Sequence[int] = (),
        *,
        observer: Observer = UNOBSERVED,
        token_budget: int | None = None,
        ahead: int = 1,
        heed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.backend = backend
        self.limits = backend.limits
        self.error: str | None = None
        self._decode = decode
        self._pieces = TokenTexts(decode, letter)
        self._observer = observer
        self._heed = heed
        self._token_budget = token_budget
        self._scheduler = Scheduler(backend.limits, backend.budget, ahead=ahead)
        self._seconds: Mapping[int, float] | None = None
        self._calls = Calls(backend)
        self._entries: dict[int, Entry] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._stopping = False
        # Whether the scheduler may have something to do that it had not when it was asked last.
        self._changed = False
        self._guides = Guides(self._take_mask)
        self._stopped = shutting_down
        self._done: queue.Queue[tuple[Done, list[Progress]] | None] = queue.Queue(LAG)
        self._threads = [
            threading.Thread(target=self._run, name="engine", daemon=True),
            threading.Thread(target=self._make_texts, name="text", daemon=True),
            *self._guides.threads,
        ]

    # For readers, on their threads.

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        jobs: Sequence[Job],
        client: str = "",
        user: str = "",
        ended: Callable[[], None] | None = None,
    ) -> Stream:
        """Queues completions: all of them or, if it raises, none.

        Args:
          jobs: one for each completion.
          client: who asks. Clients get equal shares of the tokens.
          user: whom the client asks for. Users of a client share what it gets.
          ended: is called on the caller's loop once the engine is done with all of them, be the
            deltas read or not.

        Returns:
          The deltas of all these completions.

        Raises:
          Stopped: the engine was stopped.
          Failed: the model has failed.
          ValueError: the model could not hold one of the jobs.
        """

        def own(job: Job) -> Job:
            return dataclasses.replace(job, key=next(self._keys), client=client, user=user)

        jobs = [own(job) for job in jobs]
        keys = [job.key for job in jobs]
        stream = Stream(keys, self.cancel, ended)
        now = time.monotonic()
        choices = [CompletionText(i, job, self._decode, self._pieces) for i, job in enumerate(jobs)]
        with self._wake:
            if self.error is not None:
                raise Failed(self.error)
            if self._stopping:
                raise self._stopped()
            self._scheduler.submit(jobs)
            for key, choice in zip(keys, choices, strict=True):
                self._entries[key] = Entry(choice, stream, now)
            self._tell()
        return stream

    def cancel(self, keys: Sequence[int]) -> None:
        """Drops requests; keys of requests that have ended are ignored."""
        now = time.monotonic()
        with self._lock:
            entries = [self._entries.pop(key) for key in keys if key in self._entries]
            for key in keys:
                self._scheduler.cancel(key)
            self._tell()
        self._report(entries, "abort", now)

    def read_scores(self, job: Job, scores: Tokens) -> tuple[Token, ...]:
        """The tokens of a prompt, made of the scores that came with its first delta."""
        return read_scores(job, scores, self._decode, self._pieces)

    def piece(self, token: int) -> str:
        """The text of a token, as it reads in the middle of a text."""
        return self._pieces[token]

    def state(self) -> EngineState:
        """How many requests wait and run, and whose the pages are."""
        with self._lock:
            scheduler = self._scheduler
            pools = [group.pages for group in scheduler.groups]
            return EngineState(
                scheduler.waiting,
                scheduler.running,
                pages=sum(map(len, pools)),
                held=sum(pool.held for pool in pools),
                cached=sum(pool.cached for pool in pools),
                counts=Counts(**vars(scheduler.counts)),
            )

    @property
    def idle(self) -> bool:
        """Whether every request has ended, and its reader was told."""
        with self._lock:
            return self._scheduler.idle and not self._entries

    def stalled(self) -> float:
        """Seconds for which the backend has been in one call; 0 if there is none."""
        return self._calls.stalled()

    @property
    def ended(self) -> bool:
        """Whether no thread runs."""
        return have_ended(self._threads)

    def stop(self, timeout: float = 10.0, why: Callable[[], Stopped] = shutting_down) -> None:
        """Ends the threads after the step that is under way; unfinished requests fail.

        Args:
          timeout: seconds to wait for the threads.
          why: makes what those requests fail with.
        """
        with self._wake:
            self._stopping, self._stopped = True, why
            self._tell()
        self._fail_all(why())
        join_all(self._threads, timeout)

    def _tell(self) -> None:
        """Makes the scheduler be asked again; under the lock."""
        self._changed = True
        self._wake.notify()

    # The thread that calls the backend.

    def _run(self) -> None:
        try:
            while not self._stopping:
                # The device gets its next step before the host reads the results of the last one.
                while (step := self._next()) is not None:
                    self._calls.begin(step)
                if self._calls:
                    self._finish()
                    continue
                with self._wake:
                    if self._scheduler.idle:
                        self._calls.idle_since = None  # nobody loses the time from now on
                    self._wake.wait_for(lambda: self._stopping or self._changed)
        except Exception as error:
            self._heed(error)
            self._fail("the model failed", error)
        finally:
            self._done.put(None)
            self._guides.stop()

    def _next(self) -> EngineStep | None:
        with self._lock:
            self._changed = False
            if self._seconds is not self.backend.seconds:  # there are steps of more sizes
                self._seconds = self.backend.seconds
                given = self._token_budget
                budget = self.backend.budget if given is None else given
                self._scheduler.know(self._seconds, budget)
            step = self._scheduler.next()
            now = time.monotonic()
            for key in step.placed if step is not None else ():
                self._entries[key].note_placed(now)
            return step

    def _finish(self) -> None:
        done = self._calls.finish()
        ids = done.results.drawn.ids.tolist()
        with self._lock:
            progress = self._scheduler.stepped(ids, done.results.drafts)
            going_on = [one for one in progress if not one.finish and one.key in self._entries]
            guides = [(one, self._entries[one.key].choice.job.guide) for one in going_on]
        for one, guide in guides:
            if guide is not None:
                self._guides.ask(one.key, guide, ids[one.row])
        self._done.put((done, progress))

    # The threads that make masks.

    def _take_mask(self, key: int, mask: Words | Exception) -> None:
        with self._lock:
            if not isinstance(mask, Exception):
                self._scheduler.allow(key, mask)
                self._tell()
                return
            entry = self._entries.pop(key, None)
            self._scheduler.finish(key)
            self._tell()
        if entry is not None:
            asked = isinstance(mask, GuideError)
            self._report([entry], "grammar" if asked else "error", time.monotonic())
            failure = Misguided(str(mask)) if asked else Failed(f"no mask could be made: {mask}")
            deliver([(entry.stream, failure)])

    # The thread that makes text.

    def _make_texts(self) -> None:
        try:
            while (item := self._done.get()) is not None:
                self._take(*item)
        except Exception as error:
            self._fail("the server failed to make text", error)
            while self._done.get() is not None:
                pass

    def _take(self, done: Done, progress: Sequence[Progress]) -> None:
        """Makes text of the tokens of a step, and hands it out."""
        step, results, record = done
        self._observer.ran(record)
        if results.scores.count(None) < len(step.parts):
            for key, part, scores in zip(step.keys, step.parts, results.scores, strict=True):
                entry = self._entries.get(key)
                if entry is not None and scores is not None:
                    entry.choice.take_scores(part.start, scores)
        made: list[tuple[Progress, Delta | Failed | None]] = []
        over = set[int]()  # a step may draw several tokens of a request, behind a stop string, too
        for one in progress:
            delta = None if one.key in over else self._make(one, results.drawn)
            if isinstance(delta, Failed) or (delta is not None and delta.finish is not None):
                over.add(one.key)
            made.append((one, delta))
        told = self._settle(made)
        record.told = now = time.monotonic()
        gaps = Counter[float]()  # nearly all who draw a token drew one in the step before
        for entry, one, delta in told:
            if isinstance(delta, Failed):
                self._report([entry], "error", now)
                continue
            if one.row is not None:
                gap = entry.note_token(now, record, self._observer)
                if gap is not None:
                    gaps[gap] += 1
            if delta.finish is not None:
                self._report([entry], delta.finish, now)
        for gap, times in gaps.items():
            self._observer.next_tokens(gap, times)
        deliver([(entry.stream, delta) for entry, _, delta in told])

    def _settle(
        self, made: Sequence[tuple[Progress, Delta | Failed | None]]
    ) -> list[tuple[Entry, Progress, Delta | Failed]]:
        """Counts tokens and ends requests by their text; leaves out those that are over already."""
        told: list[tuple[Entry, Progress, Delta | Failed]] = []
        used = 0
        with self._lock:
            for one, delta in made:
                entry = self._entries.get(one.key)
                if entry is None or delta is None:  # cancelled, perhaps while its text was made
                    continue
                told.append((entry, one, delta))
                used += one.row is not None and not isinstance(delta, Failed)
                if isinstance(delta, Failed) or delta.finish is not None:
                    self._scheduler.finish(one.key)
                    del self._entries[one.key]
            drawn = sum(one.row is not None for one, _ in made)
            self._scheduler.count(used, drawn - used)
        return told

    def _make(self, progress: Progress, drawn: Tokens) -> Delta | Failed | None:
        entry = self._entries.get(progress.key)
        if entry is None:
            return None
        # A mistake in one request's text must not end the thread, and with it all the others.
        try:
            return entry.choice.take(drawn, progress.row, progress.finish)
        except NotFinite as error:
            _LOG.error("request %d: %s", progress.key, error)
            return Failed(str(error))
        except Exception as error:
            _LOG.exception("a request's tokens could not be shown")
            return Failed(str(error))

    # Both.

    def _fail(self, what: str, error: Exception) -> None:
        """Ends everything: the server takes no more requests."""
        _LOG.exception("%s; no more requests are taken", what)
        with self._lock:
            self.error = f"{what}: {type(error).__name__}: {error}"
        self._fail_all(Failed(self.error))

    def _fail_all(self, failure: Failed) -> None:
        with self._lock:
            entries = list(self._entries.values())
            for key in self._entries:
                self._scheduler.cancel(key)
            self._entries.clear()
        self._calls.abandon()
        self._report(entries, "error", time.monotonic())
        deliver([(entry.stream, failure) for entry in entries])

    def _report(self, entries: Sequence[Entry], reason: str, now: float) -> None:
        for entry in entries:
            record = entry.finished(reason, now)
            entry.stream.records.append(record)
            self._observer.finished(record)
