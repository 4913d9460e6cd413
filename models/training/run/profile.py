"""Traces some steps of a run with jax's profiler, for TensorBoard or Perfetto."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax


class ProfileError(ValueError):
    """A text that is not a range of steps."""


@dataclasses.dataclass(frozen=True)
class ProfileRange:
    """The steps to trace; both ends are included, and steps count from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @classmethod
    def parse(cls, text: str) -> ProfileRange:
        """Parses a range: `"10:13"` is steps 10, 11, 12 and 13.

        Raises:
            ProfileError: it is not of that form, or has no steps in it.
        """
        first, colon, last = text.partition(":")
        if not colon or not (first.isdecimal() and last.isdecimal()):
            raise ProfileError(f"{text!r} is not of the form first:last, as in 10:13")
        if not 1 <= int(first) <= int(last):
            raise ProfileError(f"no step is in {text!r}; steps count from 1, as in 10:13")
        return cls(int(first), int(last))


class Profiler:
    """Runs jax's profiler around a range of steps.

    Args:
        steps: what to trace; None traces nothing.
    """

    def __init__(self, steps: ProfileRange | None, folder: Path = Path("profile")) -> None:
        self.steps, self.folder = steps, folder
        self.is_running = False

    def before(self, step: int) -> None:
        """Starts the trace if it begins with this step; call it before the step is dispatched."""
        if self.steps is None or self.is_running:
            return
        if self.steps.first <= step <= self.steps.last:
            jax.profiler.start_trace(str(self.folder))
            self.is_running = True

    def ends_with(self, step: int) -> bool:
        """Whether the trace ends after this step. Its results have to be awaited first."""
        return self.is_running and self.steps is not None and step >= self.steps.last

    def after(self, step: int) -> None:
        """Ends the trace if it ends with this step; call it when the step's results are there."""
        if self.ends_with(step):
            self._stop()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_running:
            self._stop()

    def _stop(self) -> None:
        self.is_running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # a trace is no reason to end a run
            print(f"{self.folder}: the trace could not be written: {error}", file=sys.stderr)
