"""What another decision would cost on top of the plan."""

from __future__ import annotations

from typing import NamedTuple

from spmd.explain.words import bytes_text, seconds_text


class Price(NamedTuple):
    """What a run with another decision costs more; negative numbers are savings.

    Attributes:
      seconds: predicted time.
      bytes: what each device sends, reshards only.
      argument_bytes: what each device holds of the arguments: open ones may be held whole.
      exact: whether no plan with that decision is cheaper; else it is the best one found.
    """

    seconds: float
    bytes: int
    argument_bytes: int = 0
    exact: bool = True

    @property
    def run_text(self) -> str:
        """`1.2 ms more, 30 MiB more sent`, `1.2 ms less, but 3 MiB more sent`."""
        time, sent = seconds_text(abs(self.seconds)), bytes_text(abs(self.bytes))
        sent = f"{sent} {_more(self.bytes)} sent"
        if abs(self.seconds) < 1e-9:
            return f"the same time, {sent}" if self.bytes else "costs the same"
        time = f"{time} {_more(self.seconds)}"
        if not self.bytes:
            return f"{time}, the same bytes sent"
        return f"{time}, {'' if (self.seconds > 0) == (self.bytes > 0) else 'but '}{sent}"

    @property
    def text(self) -> str:
        """The same, and what each device holds more of the arguments."""
        if not self.argument_bytes:
            return self.run_text
        held = f"{bytes_text(abs(self.argument_bytes))} {_more(self.argument_bytes)}"
        return f"{self.run_text}; arguments take {held} per device"


def _more(difference: float) -> str:
    return "more" if difference > 0 else "less"
