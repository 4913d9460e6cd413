"""Ends a run early, between two steps, on SIGTERM or the first SIGINT."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from spmd import launch

STOPPED_EXIT_CODE = 75
"""The exit code of a run that saved and stopped because it was told to: EX_TEMPFAIL, try again."""


class StopSignals:
    """Notes SIGTERM and SIGINT, for the loop to ask between steps; a context manager.

    A second SIGINT interrupts at once. In a job of several processes all of them stop after the
    same step, soon after one of them got a signal (`spmd.launch.stop_agreed`). Use it after
    `spmd.initialize`.

    Args:
        doing: says what is under way, such as `compiling`; "" in the midst of steps.

    Attributes:
        name: of the signal; None as long as there was none.

    Example:
        >>> with StopSignals() as stop:
        ...     stop.is_requested(step=1)
        False
    """

    def __init__(self, doing: Callable[[], str] = lambda: "") -> None:
        self.name: str | None = None
        self._doing = doing
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._pipe = (-1, -1)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StopSignals:
        # Handlers of Python run between two of its instructions: not while XLA compiles. The number
        # of a signal is written to the pipe at once, and a thread tells that it has come.
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._tell, name="signals", daemon=True)
        self._thread.start()
        signals = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._note) for number in signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._pipe[1])
        if self._thread is not None:
            self._thread.join()
        os.close(self._pipe[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _tell(self) -> None:
        while numbers := os.read(self._pipe[0], 1):
            if numbers[0] not in (signal.SIGTERM, signal.SIGINT):
                continue
            doing, name = self._doing(), signal.Signals(numbers[0]).name
            what = f"{name} while {doing}" if doing else name
            then = "stopping when that is done" if doing else "stopping after this step"
            with contextlib.suppress(OSError):
                os.write(2, f"\n{what}: {then}; Ctrl-C again stops at once\n".encode())

    def is_requested(self, step: int) -> bool:
        """Whether to stop after this step; all processes get the same answer."""
        if not launch.stop_agreed(step, wanted=self.name is not None):
            return False
        self.name = self.name or "a signal to another process"
        return True
