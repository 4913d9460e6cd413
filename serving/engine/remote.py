"""The engine's halves in two processes: who answers clients, and who keeps the devices busy.

    readers' process: Engine ── RemoteCore ══ line ══ obey ── Core :process of the devices

A thread that makes text or sends it keeps no other process from running Python, so the devices get
their next step as soon as the last one is done. Guides stay with the readers; masks travel.
"""

import contextlib
import copy
import dataclasses
import functools
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from spmd.serving.engine.actions import Job, Progress
from spmd.serving.engine.backend import Limits
from spmd.serving.engine.core import BackendFailed, Core, Hear, Ran
from spmd.serving.engine.records import EngineState

PULSE_SECONDS = 0.25
"""So often the devices' process says how it is, beside what it says of steps."""

SILENT_SECONDS = 5.0
"""Who has said nothing for so long is in a call that keeps all threads from running Python."""

_ORDERS = ("submit", "cancel", "end", "allow", "stop")

_progress: Callable[[Any], Progress] = functools.partial(tuple.__new__, Progress)
"""Makes one of a tuple, faster than its constructor does."""


class Line:
    """One end of a connection to another process, to which any thread may write."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, *content: Any) -> None:
        """Sends a message; if the other process has ended, nothing happens."""
        data = pickle.dumps((kind, content), protocol=5)
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    def __iter__(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What the other process sends, until it ends; for one thread."""
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            yield pickle.loads(data)


class Pulse(NamedTuple):
    """How the devices' process is."""

    state: EngineState
    stalled: float
    compile_total: int


_ELSEWHERE: Any = "elsewhere"
"""Stands for a guide where jobs are run: that is with the reader, and sends masks."""


class RemoteCore:
    """A core in another process; see `spmd.serving.engine.core.Steps`.

    Args:
      line: to that process. Somebody reads it, and calls `heard` with what is about steps.
    """

    def __init__(self, line: Line, limits: Limits, info: dict[str, Any], pulse: Pulse) -> None:
        self.limits, self.info = limits, info
        self._line = line
        self._pulse, self._at = pulse, time.monotonic()
        self._hear: Hear = lambda told: None
        self._over = threading.Event()
        self._adapted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # See `Steps`: these orders are passed on as they are.
        self.cancel, self.end, self.allow, self.stop = (
            functools.partial(line.send, order) for order in _ORDERS[1:]
        )

    @property
    def compile_total(self) -> int:
        """See `Steps.compile_total`."""
        return self._pulse.compile_total

    def start(self, hear: Hear) -> None:
        """See `Steps.start`."""
        self._hear = hear
        self._line.send("start")

    def submit(self, jobs: Sequence[Job]) -> None:
        """See `Steps.submit`."""
        guided = {"guide": _ELSEWHERE}
        sent = [job if job.guide is None else dataclasses.replace(job, **guided) for job in jobs]
        self._line.send("submit", sent)

    def adapt(self, place: int, folder: str) -> None:
        """Waits for an adapter to be loaded there: see `Loaded.adapt`; for a thread at a time."""
        self._line.send("adapt", place, folder)
        if (why := self._adapted.get()) is not None:
            raise ValueError(why)

    def state(self) -> EngineState:
        """See `Steps.state`."""
        return copy.deepcopy(self._pulse.state)

    def stalled(self) -> float:
        """See `Steps.stalled`."""
        silent = time.monotonic() - self._at
        told = self._pulse.stalled
        return told + silent if told or silent > SILENT_SECONDS else 0.0

    def join(self, timeout: float) -> None:
        """See `Steps.join`."""
        self._over.wait(timeout)

    @property
    def ended(self) -> bool:
        """See `Steps.ended`."""
        return self._over.is_set()

    def heard(self, kind: str, *content: Any) -> None:
        """Is told what the process says of steps; `over` is the last."""
        if kind == "pulse":
            (self._pulse,), self._at = content, time.monotonic()
        elif kind == "ran":
            record, progress, drawn, scores, state = content
            self._pulse = self._pulse._replace(state=state)
            self._hear(Ran(record, [*map(_progress, progress)], drawn, scores))
        elif kind == "broken":
            self._hear(BackendFailed(*content))
        elif kind == "adapted":
            self._adapted.put(*content)
        elif not self._over.is_set():
            self._over.set()
            self._adapted.put("the process that runs the model has ended")
            self._hear(None)


class Obedient:
    """A core that does what a `RemoteCore` says; `adapt` is that of `Loaded`."""

    def __init__(
        self, core: Core, line: Line, adapt: Callable[[int, str], None] | None = None
    ) -> None:
        self.core = core
        self._load = adapt
        self._line = line
        self._pulses = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def pulse(self) -> Pulse:
        """How this process is."""
        core = self.core
        return Pulse(core.state(), core.stalled(), core.compile_total)

    def obey(self, kind: str, *content: Any) -> None:
        """Does what a message says."""
        if kind == "start":
            self._pulses.start()
            self.core.start(self._tell)
        elif kind == "adapt":  # on a thread of its own: others are obeyed meanwhile
            threading.Thread(target=self._adapt, args=content, daemon=True).start()
        else:
            assert kind in _ORDERS, kind
            getattr(self.core, kind)(*content)

    def _adapt(self, place: int, folder: str) -> None:
        why: str | None = None
        try:
            assert self._load is not None
            self._load(place, folder)
        except Exception as error:
            why = str(error) or type(error).__name__
            if not isinstance(error, ValueError):
                raise
        finally:
            self._line.send("adapted", why)

    def _tell(self, told: Ran | BackendFailed | None) -> None:
        if isinstance(told, Ran):
            # Tuples of another class are pickled at a tenth of the speed.
            progress = [*map(tuple, told.progress)]
            self._line.send(
                "ran", told.record, progress, told.drawn, told.scores, self.core.state()
            )
        elif told is not None:
            self._line.send("broken", told.why)
        else:
            self._line.send("over")

    def _beat(self) -> None:
        is_over = False
        while not is_over:
            time.sleep(PULSE_SECONDS)
            is_over, pulse = self.core.ended, self.pulse()
            is_over &= not pulse.state.running + pulse.state.waiting
            self._line.send("pulse", pulse)
