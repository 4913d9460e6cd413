"""Ends a run early, between two steps, on SIGTERM or the first SIGINT."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

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
        self._doing, self._undo = doing, contextlib.ExitStack()

    def __enter__(self) -> "StopSignals":
        # Handlers of Python run between two of its instructions: not while XLA compiles. The number
        # of a signal is written to the pipe at once, and a thread tells that it has come.
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        thread = threading.Thread(target=self._tell, args=(told,), name="signals", daemon=True)
        thread.start()
        later = self._undo.callback  # in the reverse order
        later(os.close, told)
        later(thread.join)
        later(os.close, tell)
        later(signal.set_wakeup_fd, signal.set_wakeup_fd(tell, warn_on_full_buffer=False))
        for number in (signal.SIGTERM, signal.SIGINT):
            later(signal.signal, number, signal.signal(number, self._note))
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _tell(self, pipe: int) -> None:
        while numbers := os.read(pipe, 1):
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
