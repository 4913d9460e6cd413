"""Ends a run early, between two steps, on SIGTERM or the first SIGINT."""

from __future__ import annotations

import os
import signal
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

    Attributes:
        name: of the signal; None as long as there was none.

    Example:
        >>> with StopSignals() as stop:
        ...     stop.is_requested(step=1)
        False
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        signals = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._note) for number in signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.name = signal.Signals(number).name
        text = f"\n{self.name}: stopping after this step; Ctrl-C again stops at once\n"
        os.write(2, text.encode())
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def is_requested(self, step: int) -> bool:
        """Whether to stop after this step; all processes get the same answer."""
        if not launch.stop_agreed(step, wanted=self.name is not None):
            return False
        self.name = self.name or "a signal to another process"
        return True
