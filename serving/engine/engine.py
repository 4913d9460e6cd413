"""Runs requests: jobs go to the core, and what it draws becomes text for readers in asyncio.

    submit ──> core: scheduler, backend ──> tokens ──> text ──> stream

`submit` returns a stream of deltas that is read with `async for`. The core keeps the device busy,
on a thread (`spmd.serving.engine.core`) or in another process (`spmd.serving.engine.remote`). One
thread here makes text of what it drew and hands it out, while the core goes on. So a stop string
may be found when the request is some steps further; what it drew there is dropped. More threads
make masks for requests with a guide, which go on when theirs is made.

A lock guards the table of entries. Making text of tokens takes long, so it happens without the
lock; a request may be cancelled meanwhile.
"""

import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from spmd.serving.engine.actions import Finish, Job
from spmd.serving.engine.backend import Tokens, Words
from spmd.serving.engine.choice import CompletionText, Delta, NotFinite, Token, read_scores
from spmd.serving.engine.core import BackendFailed, Ran, Steps
from spmd.serving.engine.guide import GuideError, Guides
from spmd.serving.engine.records import UNOBSERVED, EngineState, Finished, Observer, StepRecord
from spmd.serving.engine.scheduler import check_job
from spmd.serving.engine.stream import Failed, Misguided, Stopped, Stream, deliver, shutting_down
from spmd.serving.engine.text import Decode, TokenTexts
from spmd.serving.engine.workers import have_ended, join_all


class Entry:
    """A completion that the engine works on: its text so far, its reader, and its times."""

    def __init__(self, choice: CompletionText, stream: Stream, now: float) -> None:
        self.choice = choice
        self.stream = stream
        self.used = 0  # tokens that went to its reader
        self._arrived = now
        self._placed: float | None = None
        self._first: float | None = None
        self._first_step = self._first_text = 0.0
        self._last = now

    def note_placed(self, now: float, cached: int) -> None:
        """Notes when it got its slot, and what pages held then; later calls change nothing."""
        if self._placed is None:
            self._placed = now
            self.stream.cached[self.choice.index] = cached

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


class _News:
    """What some steps did for one request: which tokens they drew, and why it ended, if it did."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record  # of the step that drew the first of them
        self.drawn: list[tuple[Tokens, int]] = []
        self.finish: Finish | None = None


_LOG = logging.getLogger("serving")

LAG = 8
"""So many steps may wait behind those whose text is made. Then the device waits, too: with ever
more of them, tokens would come later and later, and requests run ever further beyond their stop
strings."""


class Engine:
    """Runs requests.

    Args:
      core: what runs their jobs; it is started and stopped here.
      decode: turns token ids into text.
      letter: ids of which the last one ends a word. Alternatives are shown as they would read
        behind it: some tokenizers drop a space at the beginning of a text.

    Attributes:
      error: why the model failed; None as long as it has not.
    """

    def __init__(
        self,
        core: Steps,
        decode: Decode,
        letter: Sequence[int] = (),
        *,
        observer: Observer = UNOBSERVED,
    ) -> None:
        self.core, self.stalled = core, core.stalled
        self.error: str | None = None
        self._decode = decode
        self._pieces = TokenTexts(decode, letter)
        self._observer = observer
        self._entries: dict[int, Entry] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._stopped: Callable[[], Stopped] | None = None
        self._used = self._unused = 0
        self._over = False
        self._guides = Guides(self._take_mask)
        self._done: queue.Queue[Ran | None] = queue.Queue(LAG)
        self._threads = [
            threading.Thread(target=self._make_texts, name="text", daemon=True),
            *self._guides.threads,
        ]

    # For readers, on their threads.

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()
        self.core.start(self._hear)

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
        for job in jobs:
            check_job(job, self.core.limits)
        keys = [job.key for job in jobs]
        stream = Stream(keys, self.cancel, ended)
        now = time.monotonic()
        choices = [CompletionText(i, job, self._decode, self._pieces) for i, job in enumerate(jobs)]
        with self._lock:
            if self.error is not None:
                raise Failed(self.error)
            if self._stopped is not None:
                raise self._stopped()
            for key, choice in zip(keys, choices, strict=True):
                self._entries[key] = Entry(choice, stream, now)
            self.core.submit(jobs)
        return stream

    def cancel(self, keys: Sequence[int]) -> None:
        """Drops requests; keys of requests that have ended are ignored."""
        now = time.monotonic()
        with self._lock:
            entries = [self._entries.pop(key) for key in keys if key in self._entries]
        self.core.cancel(keys)
        self._report(entries, "abort", now)

    def read_scores(self, job: Job, scores: Tokens) -> tuple[Token, ...]:
        """The tokens of a prompt, made of the scores that came with its first delta."""
        return read_scores(job, scores, self._decode, self._pieces)

    def piece(self, token: int) -> str:
        """The text of a token, as it reads in the middle of a text."""
        return self._pieces[token]

    def state(self) -> EngineState:
        """How many requests wait and run, and whose the pages are."""
        state = self.core.state()
        with self._lock:
            state.counts.drawn = self._used
            state.counts.wasted += self._unused
        return state

    @property
    def idle(self) -> bool:
        """Whether every request has ended, and its reader was told."""
        with self._lock:
            return not self._entries

    @property
    def ended(self) -> bool:
        """Whether no thread runs."""
        return self.core.ended and have_ended(self._threads)

    def stop(self, timeout: float = 10.0, why: Callable[[], Stopped] = shutting_down) -> None:
        """Ends the threads after the step that is under way; unfinished requests fail.

        Args:
          timeout: seconds to wait for the threads.
          why: makes what those requests fail with.
        """
        end = time.monotonic() + timeout
        with self._lock:
            self._stopped = why
        self.core.stop()
        self._fail_all(why())
        self.core.join(timeout)
        join_all(self._threads, max(0.0, end - time.monotonic()))

    # What the core's thread tells.

    def _hear(self, told: Ran | BackendFailed | None) -> None:
        if isinstance(told, BackendFailed):
            self._fail(told.why)
            return
        if told is None:
            self._guides.stop()
        else:
            with self._lock:
                for one in told.progress:
                    entry = self._entries.get(one.key)
                    guide = None if entry is None else entry.choice.job.guide
                    if guide is not None and not one.finish:
                        self._guides.ask(one.key, guide, int(told.drawn.ids[one.row]))
        self._done.put(told)

    # The threads that make masks.

    def _take_mask(self, key: int, mask: Words | Exception) -> None:
        if not isinstance(mask, Exception):
            self.core.allow(key, mask)
            return
        with self._lock:
            entry = self._entries.pop(key, None)
        self.core.end([key])
        if entry is not None:
            asked = isinstance(mask, GuideError)
            self._report([entry], "grammar" if asked else "error", time.monotonic())
            failure = Misguided(str(mask)) if asked else Failed(f"no mask could be made: {mask}")
            deliver([(entry.stream, failure)])

    # The thread that makes text.

    def _make_texts(self) -> None:
        try:
            while rans := self._wait():
                self._take(rans)
        except Exception as error:
            _LOG.exception("the server failed to make text; no more requests are taken")
            self._fail(f"the server failed to make text: {type(error).__name__}: {error}")
            while self._wait():
                pass

    def _wait(self) -> list[Ran]:
        """All steps that are done, one at least; none at the end.

        While steps come faster than their texts are made, a request has its tokens of several
        steps at once, which takes little longer than one of them.
        """
        rans = list[Ran]()
        ran = None if self._over else self._done.get()
        while ran is not None:
            rans.append(ran)
            try:
                ran = self._done.get_nowait()
            except queue.Empty:
                return rans
        self._over = True
        return rans

    def _take(self, rans: Sequence[Ran]) -> None:
        """Makes text of the tokens of steps, and hands it out."""
        news = dict[int, _News]()
        for ran in rans:
            record = ran.record
            self._observer.ran(record)
            for key, cached in record.placed:
                if (entry := self._entries.get(key)) is not None:
                    entry.note_placed(record.chosen, cached)
            for key, start, scores in ran.scores:
                if (entry := self._entries.get(key)) is not None:
                    entry.choice.take_scores(start, scores)
            for key, row, finish in ran.progress:
                one = news.get(key)
                if one is None:
                    one = news[key] = _News(record)
                if row is not None:
                    one.record = one.record if one.drawn else record
                    one.drawn.append((ran.drawn, row))
                one.finish = one.finish or finish
        told = self._settle([(key, one, self._make(key, one)) for key, one in news.items()])
        now = time.monotonic()
        for ran in rans:
            ran.record.told = now
        gaps = Counter[float]()  # nearly all who draw a token drew one in the step before
        for entry, one, delta, used in told:
            if isinstance(delta, Failed):
                self._report([entry], "error", now)
                continue
            if used:
                gap = entry.note_token(now, one.record, self._observer)
                gaps[0.0 if gap is None else gap / used] += used - (gap is None)
            if delta.finish is not None:
                self._report([entry], delta.finish, now)
        for gap, times in gaps.items():
            self._observer.next_tokens(gap, times)
        deliver([(entry.stream, delta) for entry, _, delta, _ in told])

    def _settle(
        self, made: Sequence[tuple[int, _News, Delta | Failed | None]]
    ) -> list[tuple[Entry, _News, Delta | Failed, int]]:
        """Counts tokens and ends requests by their text; leaves out those that are over already.

        Returns:
          (entry, news, delta, tokens that are used) of each.
        """
        told: list[tuple[Entry, _News, Delta | Failed, int]] = []
        ended = []
        with self._lock:
            for key, one, delta in made:
                entry, used = self._entries.get(key), 0
                if entry is not None and delta is not None:  # else cancelled, perhaps meanwhile
                    if isinstance(delta, Delta):
                        used = delta.generated - entry.used
                        entry.used = delta.generated
                    told.append((entry, one, delta, used))
                    if isinstance(delta, Failed) or delta.finish is not None:
                        del self._entries[key]
                        if one.finish is None:
                            ended.append(key)
                self._used += used
                self._unused += len(one.drawn) - used
        if ended:
            self.core.end(ended)
        return told

    def _make(self, key: int, news: _News) -> Delta | Failed | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        # A mistake in one request's text must not end the thread, and with it all the others.
        try:
            return entry.choice.take(news.drawn, news.finish)
        except NotFinite as error:
            _LOG.error("request %d: %s", key, error)
            return Failed(str(error))
        except Exception as error:
            _LOG.exception("a request's tokens could not be shown")
            return Failed(str(error))

    # Both.

    def _fail(self, why: str) -> None:
        """Ends everything: the server takes no more requests."""
        with self._lock:
            self.error = why
        self._fail_all(Failed(why))

    def _fail_all(self, failure: Failed) -> None:
        with self._lock:
            entries = list(self._entries.values())
            keys = list(self._entries)
            self._entries.clear()
        if keys:
            self.core.cancel(keys)
        self._report(entries, "error", time.monotonic())
        deliver([(entry.stream, failure) for entry in entries])

    def _report(self, entries: Sequence[Entry], reason: str, now: float) -> None:
        for entry in entries:
            record = entry.finished(reason, now)
            entry.stream.records.append(record)
            self._observer.finished(record)
