"""`Watchdog`: if a run hangs, it writes down what every process was doing, then ends the run.

Two threads watch, as neither can do all. One, in Python, writes what was finished last, ends the
job and chooses the exit code, but it needs the interpreter's lock. That of `faulthandler`, in C,
needs no lock: it writes the stacks even when the other cannot run. The other processes write theirs
as they end, when they hear why the job does (`spmd.launch.peers`).
"""

import contextlib
import datetime
import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from spmd.launch.peers import EXIT_HUNG, at_stop, stop_now
from spmd.launch.store import this_process

REMEMBERED = 100  # how many of the last beats a file shows

LONG = 10.0
"""Where no other limit is given, `may_take`, and all before the first beat (programs are compiled
then), may take `timeout_s` times this."""


class Watchdog:
    """Ends a run that makes no progress, after writing down what every process was doing.

    Each process writes `process-<number>.txt` into the folder: why, the last finished step, the
    last beats and the stack of every thread. With several processes one that hangs ends all of
    them, and they write as they end; so they do where one of them is lost or fails.

    Args:
      timeout_s: the most seconds between two calls of `beat`.
      folder: where the files go; made when needed.
      first_timeout_s: the most seconds until the first beat; 10 * `timeout_s` if left out.
      stop: end all processes, this one with `EXIT_HUNG`; if False only write, once at each hang.

    Raises:
      ValueError: a limit that is not positive.

    Example:
      >>> with Watchdog(600, "run/hangs") as dog:
      ...     for step in range(steps):
      ...         state = train_step(state)
      ...         dog.beat(step=step)
      ...         with dog.may_take("evaluating", 3600):
      ...             evaluate(state)
    """

    def __init__(
        self,
        timeout_s: float,
        folder: str | os.PathLike[str],
        *,
        first_timeout_s: float | None = None,
        stop: bool = True,
    ) -> None:
        self.timeout_s = timeout_s
        self.first_timeout_s = LONG * timeout_s if first_timeout_s is None else first_timeout_s
        for limit in (self.timeout_s, self.first_timeout_s):
            if limit <= 0:
                raise ValueError(
                    f"a watchdog's limit is a positive number of seconds, not {limit:g}"
                )
        self.folder = Path(folder)
        self.stop = stop
        self.process, self.processes = this_process()
        self.path = self.folder / f"process-{self.process}.txt"
        self._marks: deque[str] = deque(maxlen=REMEMBERED)
        self._begun: list[tuple[str, float]] = []
        self._finished: tuple[str, int | None] = ("", None)
        self._beats = 0
        self._last = time.monotonic()
        self._written_at = -1
        self._file: IO[str] | None = None
        self._is_new = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spmd watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        with contextlib.suppress(OSError):  # a full disk is no reason not to watch
            self._is_new = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w")
        self._last = time.monotonic()
        self._arm()
        at_stop(self._on_stop, tells_others=False)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._end.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            if not self.path.stat().st_size:  # neither thread wrote
                self.path.unlink()
                if self._is_new:
                    self.folder.rmdir()  # unless another process has something to say

    def beat(self, step: int | None = None, what: str = "step finished") -> None:
        """Reports progress: the time limit starts anew.

        `step` is the step that was finished; `what` is what was, where it is no step: `checkpoint`.
        """
        when = datetime.datetime.now().isoformat(" ", "milliseconds")
        where = "" if step is None else f"  step {step}"
        self._marks.append(f"{when}{where}  {what}")
        self._finished = (what, self._finished[1] if step is None else step)
        self._last = time.monotonic()
        self._beats += 1
        self._arm()

    @property
    def doing(self) -> str:
        """The `what` of the innermost `may_take` that is running, or an empty text."""
        return next((what for what, _ in reversed(tuple(self._begun))), "")

    @contextlib.contextmanager
    def may_take(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Sets another limit for the code inside, which takes longer than a step, as saving does.

        `what` is what is done inside, for messages: `evaluating`. `seconds` is the most time until
        its end or the next beat; 10 * `timeout_s` if left out.
        """
        self._begun.append((what, LONG * self.timeout_s if seconds is None else seconds))
        self._last = time.monotonic()
        self._arm()
        try:
            yield
        finally:
            self._begun.pop()
            self.beat(what=f"{what}: done")

    @property
    def limit_s(self) -> float:
        """The present limit in s, from the last beat or start of `may_take` to the next beat."""
        if self._begun:
            return self._begun[-1][1]
        return self.timeout_s if self._beats else self.first_timeout_s

    def _arm(self) -> None:
        """Makes `faulthandler` write all stacks if no beat comes within about 1.25 * `limit_s`."""
        later = self.limit_s * 1.25 + 2 * self._interval_s
        faulthandler.dump_traceback_later(later, file=self._file or sys.stderr)

    @property
    def _interval_s(self) -> float:
        return min(1.0, self.timeout_s / 10)

    # The thread.

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            silence = time.monotonic() - self._last
            if silence > self.limit_s and self._written_at != self._beats:
                why = f"process {self.process} made no progress for {silence:.0f} s"
                why += f" ({self._last_mark()})"
                self._write(why)
                all_end = self.stop and self.processes > 1
                why += f"; stacks are in {self.folder / 'process-*.txt' if all_end else self.path}"
                print(f"error: {why}", file=sys.stderr, flush=True)
                if self.stop:
                    stop_now(why, EXIT_HUNG, tells_others=True)

    def _on_stop(self, why: str) -> None:
        """Writes the file as the job ends for the reason `why`, unless done since the last beat."""
        if not self._end.is_set() and self._written_at != self._beats:
            self._write(f"{why}; here: {self._last_mark()}")

    def _last_mark(self) -> str:
        what, step = self._finished
        begun = "".join(f"{name}; " for name, _ in self._begun)
        last = f"last finished: {what}" + ("" if step is None else f", step {step}")
        return begun + (last if what else "nothing was finished yet")

    def _write(self, why: str) -> None:
        """Writes `why`, last beats and all stacks to the file, or if it cannot, to stderr."""
        self._written_at = self._beats
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.seek(0)
                self._file.truncate()
                self._write_to(self._file, why)
                return
        self._write_to(sys.stderr, why)

    def _write_to(self, file: IO[str], why: str) -> None:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        who = f"{now}  process {self.process} of {self.processes}, pid {os.getpid()}"
        lines = [who, why, "", "finished, as the host saw it:"]
        lines += [f"  {mark}" for mark in tuple(self._marks)]
        print("\n".join([*lines, "", "stacks, innermost call first:"]), file=file, flush=True)
        faulthandler.dump_traceback(file, all_threads=True)


class Unwatched:
    """Has `beat`, `may_take` and `doing` as a `Watchdog` has, where a run has none to watch it."""

    def __init__(self) -> None:
        self.doing = ""

    def beat(self, step: int | None = None, what: str = "") -> None:
        """Does nothing, as no watchdog waits for it."""

    @contextlib.contextmanager
    def may_take(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Sets `doing` to `what` while the code inside runs."""
        before, self.doing = self.doing, what
        try:
            yield
        finally:
            self.doing = before


Watch = Watchdog | Unwatched
"""What a program reports its progress to, whether it is watched or not."""
