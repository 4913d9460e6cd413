"""What another decision would cost on top of the plan."""

from __future__ import annotations

from typing import NamedTuple

from spmd.explain.words import bytes_text, seconds_text
from spmd.ir.types import local_type
from spmd.planning.plan import Plan


class Price(NamedTuple):
    """What a run with another decision costs more; negative numbers are savings.

    Attributes:
      seconds: predicted time of one run, as the plan's own time is predicted.
      bytes: what each device sends, reshards only.
      argument_bytes: what each device holds of the arguments: open ones may be held whole.
    """

    seconds: float
    bytes: int
    argument_bytes: int = 0

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


def price_of(plan: Plan, other: Plan) -> Price:
    """What another plan costs more than a plan, by the predicted times of their programs."""

    def sent(of: Plan) -> int:
        return sum(move.bytes for move in of.moves)

    seconds = other.run_seconds - plan.run_seconds
    return Price(seconds, sent(other) - sent(plan), held_bytes(other) - held_bytes(plan))


def held_bytes(plan: Plan) -> int:
    """What each device holds of the arguments."""
    leaves = zip(plan.program.body.args, plan.arguments, strict=True)
    return sum(local_type(plan.program.types[v], s, plan.mesh).bytes for v, s in leaves)


def _more(difference: float) -> str:
    return "more" if difference > 0 else "less"
