"""A trace of some steps, for TensorBoard's profile plugin or Perfetto."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType

import jax


class ProfileError(ValueError):
    """A range of steps that is none."""


@dataclasses.dataclass(frozen=True)
class ProfileRange:
    """Steps to trace, from the first to the last, both included; counted from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> ProfileRange:
        """`"10:13"` -> steps 10, 11, 12 and 13.

        Raises:
            ProfileError: not of that form, or no step is in it.
        """
        first, colon, last = text.partition(":")
        if not colon or not (first.isdecimal() and last.isdecimal()):
            raise ProfileError(f"{text!r} is not of the form first:last, as in 10:13")
        if not 1 <= int(first) <= int(last):
            raise ProfileError(f"no step is in {text!r}; steps count from 1, as in 10:13")
        return cls(int(first), int(last))


class Profiler:
    """Starts and stops jax's profiler around a range of steps; with None it does nothing.

    Args:
        steps: what to trace.
        folder: where the trace goes.
    """

    def __init__(self, steps: ProfileRange | None, folder: Path = Path("profile")) -> None:
        self.steps, self.folder = steps, folder
        self.is_running = False

    def before(self, step: int) -> None:
        """To call before a step is dispatched."""
        if self.steps is None or self.is_running:
            return
        if self.steps.first <= step <= self.steps.last:
            jax.profiler.start_trace(str(self.folder))
            self.is_running = True

    def ends_with(self, step: int) -> bool:
        """Whether the trace ends after this step, whose results have to be awaited first."""
        return self.is_running and self.steps is not None and step >= self.steps.last

    def after(self, step: int) -> None:
        """To call once a step has been taken."""
        if self.ends_with(step):
            self._stop()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_running:
            self._stop()

    def _stop(self) -> None:
        self.is_running = False
        jax.profiler.stop_trace()
