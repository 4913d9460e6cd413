"""`Measured`: what a run was predicted to take, beside what it took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spmd.explain.costs import spent
from spmd.explain.words import Cell, Lines, Table, number, plural, seconds_text, section
from spmd.measure.labels import (
    ATTENTION,
    COPIES,
    KINDS,
    MATRIX,
    OTHER,
    Label,
    Labels,
    Order,
    label_of,
)
from spmd.measure.profile import Event, Run, shares
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.predict.timeline import Timeline

EXPOSED, HIDDEN, IDLE = "collectives, exposed", "collectives, hidden", "idle"

NOWHERE = "not attributed"  # the layer of what XLA added and named after nothing of the program's
MOST = 20  # rows of a table that are printed


class Part(NamedTuple):
    """Holds a part of a step's time: what takes it, and seconds on one device in the mean."""

    name: str
    predicted: float
    measured: float


class Worked(NamedTuple):
    """Holds an event of a device in a measured step, and its share of the device's seconds."""

    event: Event
    label: Label
    seconds: float
    hidden: float


@dataclass(frozen=True, repr=False)
class Measured:
    """Holds what steps of a program took, beside what was predicted; it prints as tables.

    Times are seconds of one step. Parts are those of the profiled steps, on one device in the mean
    of this process's devices, the longest first.

    Attributes:
      seconds: the median of `times`.
      predicted: what the compiler predicted, as `Compiled.cost`.
      times: each step that was timed, without the profiler.
      profiled: a step under the profiler, in the mean; the parts of `kinds` add up to it.
      devices: how many devices of this process were seen.
      platform: theirs, `cpu` or `cuda`. `predicted` is for devices of their own; CPU devices are
        threads of one machine.
      kinds: matrix products, attention, other kernels, copies, collectives that nothing else ran
        beside (exposed), idle; and collectives beside other work (hidden), which add nothing.
      layers: by the part of the model, which is the name scope of ops (`jax.named_scope`) with `*`
        for numbers, else the function that they are written in behind the one that calls it; hidden
        collectives left out.
      collectives: each kind over the same axes in one layer, the hidden part included.
      step: what the first device did in the last profiled step.
    """

    seconds: float
    predicted: float
    times: tuple[float, ...]
    profiled: float
    devices: int
    platform: str
    kinds: tuple[Part, ...]
    layers: tuple[Part, ...]
    collectives: tuple[Part, ...]
    step: tuple[Worked, ...] = field(compare=False)

    def __repr__(self) -> str:
        return "\n".join([self.title, "", *self.lines()]).rstrip() + "\n"

    @property
    def title(self) -> str:
        """The step's time in one line, measured and predicted."""
        text = (
            f"{seconds_text(self.seconds)} a step, the median of {len(self.times)} "
            f"({seconds_text(min(self.times))} to {seconds_text(max(self.times))})"
        )
        if self.predicted:
            ratio = self.seconds / self.predicted
            text += f", {ratio:.3g}x the predicted {seconds_text(self.predicted)}"
        return text

    def lines(self) -> Lines:
        """Yields the tables as lines of text."""
        for title, parts in self.tables():
            shown = f"{title}, the first {MOST} of {len(parts)}" if len(parts) > MOST else title
            yield from section(shown, part_table(parts[:MOST]).lines())

    def tables(self) -> tuple[tuple[str, tuple[Part, ...]], ...]:
        """Returns (title, parts) of the time by kind of work, by layer and by collective."""
        whole = f"profiled steps of {seconds_text(self.profiled)}"
        whole += f", mean of {plural(self.devices, 'device')}"
        whole += " that share one machine" * (self.platform == "cpu")
        return (
            (f"measured by kind: {whole}", self.kinds),
            ("measured by layer", self.layers),
            ("measured by collective", self.collectives),
        )


def part_table(parts: Sequence[Part]) -> Table:
    """Makes a table of parts: predicted and measured seconds."""

    def cell(seconds: float) -> Cell:
        return number(seconds_text(seconds) if seconds else "-", seconds)

    rows = [(Cell(p.name, style="w"), cell(p.predicted), cell(p.measured)) for p in parts]
    return Table(("what", "predicted", "measured"), rows)


def compare(
    run: Run, labels: Labels, timeline: Timeline, mesh: Mesh, topology: Topology, platform: str
) -> Measured:
    """Labels the measured events, and sets their times beside the predicted ones."""
    rows = [
        _Row(label_of(part.slot.op, mesh), part.seconds, part.hidden)
        for part in spent(timeline, topology)
    ]
    launched = Order(labels)
    devices: list[tuple[Worked, ...]] = []  # what each device did in each step; the first one last
    for step in run.steps:
        found: dict[int, list[Event]] = {}
        for event in step.events:
            found.setdefault(event.device, []).append(event)
        for _, events in sorted(found.items(), reverse=True):
            labelled = [(event, labels.of(event)) for event in launched.name(events)]
            done = [(event, label) for event, label in labelled if label is not None]
            spans = [(KINDS.index(label.kind), event.start, event.end) for event, label in done]
            parts = zip(done, shares(spans), strict=True)
            devices.append(tuple(Worked(*what, *share) for what, share in parts))
    count = len(devices)
    rows += [
        _Row(work.label, measured=work.seconds / count, measured_hidden=work.hidden / count)
        for device in devices
        for work in device
    ]
    profiled = sum(step.seconds for step in run.steps) / len(run.steps)
    # All kinds but the last add up to the whole step.
    order = (MATRIX, ATTENTION, OTHER, COPIES, EXPOSED, IDLE, HIDDEN)
    divided = [(IDLE, 0.0, max(0.0, profiled - sum(row.measured for row in rows)))]
    for row in rows:
        kind = EXPOSED if row.label.collective else row.label.kind
        divided.append((kind, row.predicted, row.measured))
        divided.append((HIDDEN, row.predicted_hidden, row.measured_hidden))
    kinds = _parts(divided)
    layers = [(row.label.layer or NOWHERE, row) for row in rows]
    return Measured(
        seconds=run.seconds,
        predicted=timeline.seconds,
        times=run.times,
        profiled=profiled,
        devices=count // len(run.steps),
        platform=platform,
        kinds=tuple(sorted(kinds, key=lambda part: order.index(part.name))) if count else (),
        layers=_parts((layer, row.predicted, row.measured) for layer, row in layers),
        collectives=_parts(
            (
                f"{row.label.collective} in {layer}",
                row.predicted + row.predicted_hidden,
                row.measured + row.measured_hidden,
            )
            for layer, row in layers
            if row.label.collective
        ),
        step=devices[-1] if devices else (),
    )


class _Row(NamedTuple):
    """Holds the label of an op or event, and its seconds: predicted, measured, and hidden ones."""

    label: Label
    predicted: float = 0.0
    predicted_hidden: float = 0.0
    measured: float = 0.0
    measured_hidden: float = 0.0


def _parts(rows: Iterable[tuple[str, float, float]]) -> tuple[Part, ...]:
    """Sums up rows of one name, the longest first; those that take no time are left out."""
    found: dict[str, Part] = {}
    for name, predicted, measured in rows:
        part = found.get(name, Part(name, 0.0, 0.0))
        found[name] = Part(name, part.predicted + predicted, part.measured + measured)
    parts = [part for part in found.values() if part.predicted or part.measured]
    return tuple(sorted(parts, key=lambda part: -max(part.predicted, part.measured)))
