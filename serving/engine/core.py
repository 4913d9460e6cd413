"""Runs jobs on a backend: the half of the engine that the devices wait for.

    submit ──> scheduler ──> calls of the backend ──> what they drew ──> who hears it

One thread keeps the device busy: it begins every step that the scheduler allows, waits for the
oldest one, tells the scheduler what was drawn, and then whoever hears it, who makes text of that
(`spmd.serving.engine.engine`). A lock guards the scheduler; calling the backend takes long and
happens without it, so a request may be cancelled meanwhile.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from spmd.serving.engine.actions import Counts, EngineStep, Job, Progress
from spmd.serving.engine.backend import Backend, Limits, Stepped, Tokens, Words
from spmd.serving.engine.records import EngineState, StepRecord
from spmd.serving.engine.scheduler import Scheduler
from spmd.serving.engine.workers import have_ended, join_all

_LOG = logging.getLogger("serving")


class Ran(NamedTuple):
    """A step is done."""

    record: StepRecord
    progress: Sequence[Progress]
    drawn: Tokens  # to whose rows `progress` points
    # (request, position of the first row, scores) of each chunk that has scores
    scores: Sequence[tuple[int, int, Tokens]]


class BackendFailed(NamedTuple):
    """The backend failed; there will be no more steps."""

    why: str


Hear = Callable[[Ran | BackendFailed | None], None]
"""Is told of steps in their order, on one thread; None is the last that it hears."""


class Steps(Protocol):
    """What runs jobs: a `Core`, or one in another process. All methods return at once."""

    limits: Limits
    info: dict[str, Any]  # as of `Backend.info`

    @property
    def compile_total(self) -> int:
        """As of `Backend.compile_total`."""

    def start(self, hear: Hear) -> None:
        """Begins to run what is submitted."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues jobs that `check_job` has found right; each has a key that no other one has."""

    def cancel(self, keys: Sequence[int]) -> None:
        """Drops jobs; those that have ended are ignored."""

    def end(self, keys: Sequence[int]) -> None:
        """Ends jobs by what their text says; those that have ended are ignored."""

    def allow(self, key: int, mask: Words) -> None:
        """Lets a guided job draw its next token."""

    def state(self) -> EngineState:
        """How many requests wait and run, and whose the pages are; of `counts` not all are set."""

    def stalled(self) -> float:
        """Seconds for which the backend has been in one call; 0 if there is none."""

    def stop(self) -> None:
        """Begins no more steps."""

    def join(self, timeout: float) -> None:
        """Waits for the step that is under way, so many seconds at most."""

    @property
    def ended(self) -> bool:
        """Whether nothing runs."""


class _Call(NamedTuple):
    step: EngineStep
    started: float
    gap: float
    results: Callable[[], Stepped]


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

    def finish(self) -> tuple[EngineStep, Stepped, StepRecord]:
        """Waits for the oldest step: what was asked for, what the backend returned, and when."""
        step, started, gap, results = self._under_way.popleft()
        asked = time.monotonic()
        found = results()
        now = time.monotonic()
        begun = max(started, self._busy_since or 0.0)
        self._busy_since, self.idle_since = (now, None) if self._under_way else (None, now)
        of_prompts = zip(step.keys[step.decoding :], step.parts[step.decoding :], strict=True)
        rows, seen = (step.parts[0].turns * count for count in (step.rows, step.seen))
        record = StepRecord(
            begun, now, now - asked, gap, rows, found.rows - rows, seen, step.keys,
            {key: (part.rows, part.draws) for key, part in of_prompts},
            placed=step.placed, chosen=started,
        )  # fmt: skip
        return step, found, record

    def stalled(self) -> float:
        """Seconds for which the oldest call has been running; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def abandon(self) -> None:
        """Nobody waits for what is under way any more, so nothing counts as stalled."""
        self._busy_since = None


class Core:
    """Runs jobs on a backend in this process; see `Steps`.

    Args:
      backend: the model; only one thread calls it.
      token_budget: rows of a group in a step that has both rows that draw and chunks of prompts;
        None takes the backend's.
      ahead: how many steps are begun before the results of the last one are there.
      heed: is told what the backend raised, before anybody else is.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        token_budget: int | None = None,
        ahead: int = 1,
        heed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.backend = backend
        self.limits, self.info = backend.limits, backend.info
        self._token_budget = token_budget
        self._heed = heed
        self._hear: Hear = lambda told: None
        self._scheduler = Scheduler(backend.limits, backend.budget, ahead=ahead)
        self._seconds: Mapping[int, float] | None = None
        self._calls = Calls(backend)
        self.stalled = self._calls.stalled
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._stopping = False
        # Whether the scheduler may have something to do that it had not when it was asked last.
        self._changed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # See `Steps`.

    @property
    def compile_total(self) -> int:
        """See `Steps.compile_total`."""
        return self.backend.compile_total

    def start(self, hear: Hear) -> None:
        """See `Steps.start`."""
        self._hear = hear
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """See `Steps.submit`."""
        self._tell(self._scheduler.submit, jobs)

    def cancel(self, keys: Sequence[int]) -> None:
        """See `Steps.cancel`."""
        self._tell(lambda: [*map(self._scheduler.cancel, keys)])

    def end(self, keys: Sequence[int]) -> None:
        """See `Steps.end`."""
        self._tell(lambda: [*map(self._scheduler.finish, keys)])

    def allow(self, key: int, mask: Words) -> None:
        """See `Steps.allow`."""
        self._tell(self._scheduler.allow, key, mask)

    def state(self) -> EngineState:
        """See `Steps.state`."""
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

    def stop(self) -> None:
        """See `Steps.stop`."""
        self._stopping = True
        self._tell(lambda: None)

    def join(self, timeout: float) -> None:
        """See `Steps.join`."""
        self._calls.abandon()  # nobody waits for it any more
        join_all([self._thread], timeout)

    @property
    def ended(self) -> bool:
        """See `Steps.ended`."""
        return have_ended([self._thread])

    def _tell(self, order: Callable[..., object], *given: Any) -> None:
        """Tells the scheduler something, and makes it be asked again."""
        with self._wake:
            order(*given)
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
                    self._hear(self._finish())
                    continue
                with self._wake:
                    if self._scheduler.idle:
                        self._calls.idle_since = None  # nobody loses the time from now on
                    self._wake.wait_for(lambda: self._stopping or self._changed)
        except Exception as error:
            self._heed(error)
            _LOG.exception("the model failed; no more requests are taken")
            self._calls.abandon()
            self._hear(BackendFailed(f"the model failed: {type(error).__name__}: {error}"))
        finally:
            self._hear(None)

    def _next(self) -> EngineStep | None:
        with self._lock:
            self._changed = False
            if self._seconds is not self.backend.seconds:  # there are steps of more sizes
                self._seconds = self.backend.seconds
                sizes = self.backend.budget, self.limits.rows[-1]
                if self._token_budget is not None:
                    sizes = self._token_budget, 0
                bandwidth = self.info.get("bandwidth") or math.inf
                reading = self.info.get("token_bytes", 0) / bandwidth
                self._scheduler.know(self._seconds, self.backend.turns, *sizes, reading)
            return self._scheduler.next()

    def _finish(self) -> Ran:
        step, found, record = self._calls.finish()
        with self._lock:
            progress = self._scheduler.stepped(found.drawn.ids.tolist(), found.drafts)
        scores = [
            (key, part.start, of_part)
            for key, part, of_part in zip(step.keys, step.parts, found.scores, strict=True)
            if of_part is not None
        ]
        drawn = found.drawn
        if not step.alternatives:  # there are none, but room for them
            drawn = Tokens(*drawn[:2], drawn.top_ids[:, :0], drawn.top_logprobs[:, :0])
        return Ran(record, progress, drawn, scores)
