"""Ending a run early, between two steps: SIGTERM, or SIGINT once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

STOPPED_EXIT_CODE = 75
"""What a run exits with that saved and stopped because it was told to: EX_TEMPFAIL, try again."""


class StopSignals:
    """Notes SIGTERM and SIGINT, for the loop to ask between steps; a context manager.

    A second SIGINT interrupts at once. On several processes all stop after the same step: the one
    that gets the signal first tells the others through jax's coordination service, which takes
    SIGTERM itself.

    Example:
        >>> with StopSignals() as stop:
        ...     stop.is_requested(step=1)
        False
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}
        self._is_alone = jax.process_count() == 1

    def __enter__(self) -> StopSignals:
        signals = (signal.SIGTERM, signal.SIGINT) if self._is_alone else (signal.SIGINT,)
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
        if not self._is_alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def is_requested(self, step: int) -> bool:
        """Whether to stop after this step; the same on all processes."""
        if self._is_alone:
            return self.name is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.name = self.name or "SIGTERM"
        return True
