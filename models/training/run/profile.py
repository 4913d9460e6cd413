"""Traces some steps of a run with jax's profiler, for TensorBoard or Perfetto."""

import dataclasses
import sys
from pathlib import Path

import jax

from spmd.models.training.errors import RunError


@dataclasses.dataclass(frozen=True)
class ProfileRange:
    """The steps to trace; both ends are included, and steps count from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"

    @classmethod
    def parse(cls, text: str) -> "ProfileRange":
        """Parses a range: `"10:13"` is steps 10, 11, 12 and 13.

        Raises:
            RunError: it is not of that form, or has no steps in it.
        """
        first, colon, last = text.partition(":")
        if not colon or not (first.isdecimal() and last.isdecimal()):
            raise RunError(f"{text!r} is not of the form first:last, as in 10:13")
        if not 1 <= int(first) <= int(last):
            raise RunError(f"no step is in {text!r}; steps count from 1, as in 10:13")
        return cls(int(first), int(last))


class Profiler:
    """Runs jax's profiler around a range of steps.

    Args:
        steps: what to trace; None traces nothing.
    """

    def __init__(self, steps: ProfileRange | None, folder: Path = Path("profile")) -> None:
        self.first, self.last = (steps.first, steps.last) if steps else (0, 0)
        self.folder, self.is_running = folder, False

    def before(self, step: int) -> None:
        """Starts the trace if it begins with this step; call it before the step is dispatched."""
        if self.first <= step <= self.last and not self.is_running:
            jax.profiler.start_trace(str(self.folder))
            self.is_running = True

    def ends_with(self, step: int) -> bool:
        """Whether the trace ends after this step: `stop` it when the step's results are there."""
        return self.is_running and step >= self.last

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the trace, if there is one."""
        if not self.is_running:
            return
        self.is_running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # a trace is no reason to end a run
            print(f"{self.folder}: the trace could not be written: {error}", file=sys.stderr)
