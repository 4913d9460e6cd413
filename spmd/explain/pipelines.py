"""Pipelines over stages (`spmd.pipeline`): steps, what of them is idle, what is sent and held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.compiler import Stages
from spmd.explain.costs import spent
from spmd.explain.words import bytes_text, plural, seconds_text, share_text
from spmd.ir.pipelines import SHIFT, Pipeline, pipeline_of
from spmd.ir.program import Value
from spmd.predict.timeline import Slot


class PipelineRow(NamedTuple):
    """A pipeline in one run of a program, on one device.

    Attributes:
      of: its figures.
      source: the line that calls it.
      steps: how often the forward pass moves on, as the program's loops say; in `busy_steps` of
        them a stage computes what is wanted.
      seconds: what its loops are predicted to take, forward and backward.
      sends: how many times one device sends to its neighbour.
      sent: bytes of these, in all.
      waited: how much longer these make a run, seconds; the rest is hidden behind arithmetic.
      held: bytes that forward loops leave to backward ones, and of steps that are computed again
        those of one window; 0 without a gradient.
    """

    of: Pipeline
    source: str
    steps: int
    seconds: float
    sends: int
    sent: int
    waited: float
    held: int

    @property
    def idle(self) -> float:
        """The share of its steps in which a stage has nothing to do: the bubble."""
        return 1 - self.of.busy_steps / self.steps

    @property
    def title(self) -> str:
        """`4 stages over stage, 8 microbatches, schedule gpipe`."""
        of = self.of
        chunks = f" of {of.chunks} chunks" if of.chunks > 1 else ""
        return (
            f"{plural(of.stages, 'stage')}{chunks} over {of.axis}, "
            f"{of.microbatches} microbatches, schedule {of.schedule}"
        )

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """(what, figures) for a report."""
        whole, idle = self.seconds, self.seconds * self.idle
        rows = [
            (
                "bubble",
                f"{share_text(idle, whole)} of {seconds_text(whole)} in its loops: "
                f"{self.steps - self.of.busy_steps} of {self.steps} steps fill and drain",
            ),
            ("sent to neighbours", sent_text(self.sent, self.sends, self.waited)),
        ]
        if self.held:
            rows.append(("held for the gradient", bytes_text(self.held)))
        return tuple(rows)


def sent_text(sent: int, sends: int, waited: float) -> str:
    """`704 KiB in 22 permutes, 12 us of waiting`."""
    waiting = f"{seconds_text(waited)} of" if waited else "no"
    return f"{bytes_text(sent)} in {plural(sends, 'permute')}, {waiting} waiting"


def pipeline_rows(stages: Stages) -> list[PipelineRow]:
    """The pipelines of a program, in order."""
    found: dict[tuple[Pipeline, str], list[list[Slot]]] = {}
    for slots in _loops(stages.timeline.slots):
        if (of := pipeline_of(slots[0].op.loc.scope)) is not None:
            found.setdefault((of, slots[0].op.loc.trail), []).append(slots)
    if not found:
        return []
    parts = spent(stages.timeline, stages.plan.topology)
    waits = {part.slot.op.results: part.seconds for part in parts if _is_shift(part.slot)}
    return [_row(of, source, loops, waits) for (of, source), loops in found.items()]


def _loops(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Each outermost loop with the slots inside it."""
    inside: list[Slot] = []
    for slot in slots:
        if slot.depth == 0:
            if inside:
                yield inside
            inside = [slot] if slot.op.is_loop else []
        elif inside:
            inside.append(slot)
    if inside:
        yield inside


def _row(
    of: Pipeline,
    source: str,
    loops: Sequence[Sequence[Slot]],
    waits: Mapping[tuple[Value, ...], float],
) -> PipelineRow:
    forward = [slots for slots in loops if not _is_backward(slots[0])]
    backward = [slots for slots in loops if _is_backward(slots[0])]
    shifts = [slot for slots in loops for slot in slots if _is_shift(slot)]
    steps = sum(_steps(slots, of) for slots in forward)
    windows = [_inner(slots) for slots in backward]
    held = _passed([slots[0] for slots in forward], [slots[0] for slots in backward])
    return PipelineRow(
        of,
        source,
        steps or of.steps,
        sum(slots[0].seconds for slots in loops),
        sum(slot.trips for slot in shifts),
        sum(slot.trips * slot.op.kind.operands[0].bytes for slot in shifts),
        sum(waits[slot.op.results] for slot in shifts),
        held + max((_passed(inner[:-1], inner[1:]) for inner in windows), default=0),
    )


def _steps(slots: Sequence[Slot], of: Pipeline) -> int:
    """How many steps an outermost loop makes: its trips, or those of the windows inside it."""
    loop = slots[0]
    inner = _inner(slots)
    if of.is_lean and loop.runs == of.busy_steps // of.window and inner:
        return max(slot.trips * (slot.runs or 1) for slot in inner)
    return loop.runs or 0


def _inner(slots: Sequence[Slot]) -> list[Slot]:
    """The loops in an outermost one."""
    return [slot for slot in slots if slot.op.is_loop and slot.depth == 1]


def _passed(makers: Sequence[Slot], readers: Sequence[Slot]) -> int:
    """Bytes that loops leave to others."""
    read = {value for slot in readers for value in slot.op.operands}
    made = {
        value: type_.bytes
        for slot in makers
        for value, type_ in zip(slot.op.results, slot.op.kind.results, strict=True)
    }
    return sum(size for value, size in made.items() if value in read)


def _is_backward(slot: Slot) -> bool:
    return "transpose(" in slot.op.loc.scope


def _is_shift(slot: Slot) -> bool:
    """Whether it sends on what a stage made."""
    return bool(slot.op.collective) and SHIFT in slot.op.loc.scope
