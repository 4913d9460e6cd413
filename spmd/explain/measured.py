"""`Measured`: what a run was predicted to take, beside what it took."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from spmd.explain import words as w
from spmd.explain.costs import spent
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
            f"{w.seconds_text(self.seconds)} a step, the median of {len(self.times)} "
            f"({w.seconds_text(min(self.times))} to {w.seconds_text(max(self.times))})"
        )
        if self.predicted:
            ratio = self.seconds / self.predicted
            text += f", {ratio:.3g}x the predicted {w.seconds_text(self.predicted)}"
        return text

    def lines(self) -> w.Lines:
        """Yields the tables as lines of text."""
        for part in self.sections():
            count = len(part.table.rows)
            more = f", the first {MOST} of {count}" if count > MOST else ""
            shown = part._replace(remark=part.remark + more, table=part.table.first(MOST))
            yield from shown.lines()

    def sections(self) -> tuple[w.Section, ...]:
        """Returns the time by kind of work, by layer and by collective, as tables."""
        whole = f"profiled steps of {w.seconds_text(self.profiled)}"
        whole += f", mean of {w.plural(self.devices, 'device')}"
        whole += " that share one machine" * (self.platform == "cpu")

        heads = ("what", "predicted", "measured")
        return (
            w.Section("measured by kind", whole, w.Table(heads, self.kinds)),
            w.Section("measured by layer", "", w.Table(heads, self.layers)),
            w.Section("measured by collective", "", w.Table(heads, self.collectives)),
        )


def compare(
    run: Run, labels: Labels, timeline: Timeline, mesh: Mesh, topology: Topology, platform: str
) -> Measured:
    """Labels the measured events, and sets their times beside the predicted ones."""
    launched = Order(labels)
    devices: list[tuple[Worked, ...]] = []  # what each device did in each step; the first one last
    for step in run.steps:
        found = w.grouped(step.events, lambda event: event.device)
        for _, events in sorted(found.items(), reverse=True):
            labelled = [(event, labels.of(event)) for event in launched.name(events)]
            done = [(event, label) for event, label in labelled if label is not None]
            spans = [(KINDS.index(label.kind), event.start, event.end) for event, label in done]
            parts = zip(done, shares(spans), strict=True)
            devices.append(tuple(Worked(*what, *share) for what, share in parts))
    count = len(devices)
    # (label, whether other work hides it, predicted seconds, measured seconds)
    times: list[tuple[Label, bool, float, float]] = []
    for part in spent(timeline, topology):
        label = label_of(part.slot.op, mesh)
        times += [(label, False, part.seconds, 0.0), (label, True, part.hidden, 0.0)]
    for work in (work for device in devices for work in device):
        own, hidden = work.seconds / count, work.hidden / count
        times += [(work.label, False, 0.0, own), (work.label, True, 0.0, hidden)]
    profiled = sum(step.seconds for step in run.steps) / len(run.steps)
    idle = max(0.0, profiled - sum(own for _, is_hidden, _, own in times if not is_hidden))
    kinds = [(IDLE, 0.0, idle)]
    layers, collectives = [], []
    for label, is_hidden, predicted, own in times:
        exposed = EXPOSED if label.collective else label.kind
        kinds.append((HIDDEN if is_hidden else exposed, predicted, own))
        layer = label.layer or NOWHERE
        if not is_hidden:
            layers.append((layer, predicted, own))
        if label.collective:
            collectives.append((f"{label.collective} in {layer}", predicted, own))
    # All kinds but the last add up to the whole step.
    order = (MATRIX, ATTENTION, OTHER, COPIES, EXPOSED, IDLE, HIDDEN)
    return Measured(
        seconds=run.seconds,
        predicted=timeline.seconds,
        times=run.times,
        profiled=profiled,
        devices=count // len(run.steps),
        platform=platform,
        kinds=tuple(sorted(_parts(kinds), key=lambda p: order.index(p.name))) if count else (),
        layers=_parts(layers),
        collectives=_parts(collectives),
        step=devices[-1] if devices else (),
    )


def _parts(rows: Iterable[tuple[str, float, float]]) -> tuple[Part, ...]:
    """Sums up rows of one name, the longest first; those that take no time are left out."""
    found = [
        Part(name, sum(predicted for _, predicted, _ in alike), sum(own for *_, own in alike))
        for name, alike in w.grouped(rows, lambda row: row[0]).items()
    ]
    parts = [part for part in found if part.predicted or part.measured]
    return tuple(sorted(parts, key=lambda part: -max(part.predicted, part.measured)))
