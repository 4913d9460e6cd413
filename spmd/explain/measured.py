"""Compares how long steps of a program took with the predicted time: `Measured`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spmd.explain import words as w
from spmd.explain.costs import spent
from spmd.measure.labels import COLLECTIVES, KINDS, Label, Labels, Order, label_of
from spmd.measure.profile import Event, Run, shares
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.predict.timeline import Timeline

EXPOSED, HIDDEN, IDLE = "collectives, exposed", "collectives, hidden", "idle"

NOWHERE = "not attributed"  # the layer of what XLA added and named after nothing of the program's
MOST = 20  # rows of a table that are printed


class Part(NamedTuple):
    """Holds the predicted and the measured seconds of one part of a step, the mean of devices."""

    name: str  # a kind of work, a layer of the model, or a collective in a layer
    predicted: float
    measured: float


class Worked(NamedTuple):
    """Holds an event of a profiled step: what it is, and how much of the step it takes."""

    event: Event
    label: Label
    seconds: float  # of the step that count for this event
    hidden: float  # in which it ran, but which count for work that ran at the same time


@dataclass(frozen=True, repr=False)
class Measured:
    """Holds the measured and the predicted time of a program's steps; it prints as tables.

    Times are seconds of one step. What a `Part` measured is the mean of the profiled steps and of
    this process's devices.

    Attributes:
      seconds: the median of `times`.
      predicted: what the compiler predicted, as `Compiled.cost`.
      times: the time of each step that ran without the profiler.
      profiled: the mean of the steps under the profiler; the parts of `kinds` add up to it.
      devices: how many devices of this process the profile shows.
      platform: their platform, `cpu` or `cuda`. The prediction is for separate devices; CPU devices
        are threads of one machine.
      kinds: matrix products, attention, other kernels, copies, collectives while nothing else ran
        (exposed), idle; and collectives while other work ran (hidden), which that sum leaves out.
      layers: a part for each layer of the model, which is the name scope of ops (`jax.named_scope`)
        with `*` for numbers, or without one the caller's function and the op's, as `mlp/linear`;
        hidden collectives are left out. The longest come first.
      collectives: a part for each kind, axes and layer, hidden time included, the longest first.
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
        lines = [line for part in self.sections() for line in part.lines()]
        return "\n".join([self.title, "", *lines]).rstrip() + "\n"

    @property
    def title(self) -> str:
        """One line: `1.2 ms a step, the median of 10 (1 ms to 2 ms), 1.1x the predicted 1.1 ms`."""
        text = (
            f"{w.seconds_text(self.seconds)} a step, the median of {len(self.times)} "
            f"({w.seconds_text(min(self.times))} to {w.seconds_text(max(self.times))})"
        )
        if self.predicted:
            ratio = self.seconds / self.predicted
            text += f", {ratio:.3g}x the predicted {w.seconds_text(self.predicted)}"
        return text

    def sections(self) -> tuple[w.Section, ...]:
        """Returns tables of predicted and measured time, by kind of work, layer and collective."""
        whole = f"profiled steps of {w.seconds_text(self.profiled)}"
        whole += f", mean of {w.plural(self.devices, 'device')}"
        whole += " that share one machine" * (self.platform == "cpu")

        def part(what: str, parts: Sequence[Part], said: str = "") -> w.Section:
            more = f"the first {MOST} of {len(parts)}" * (len(parts) > MOST)
            table = w.Table(("what", "predicted", "measured"), parts[:MOST])
            return w.Section(f"measured by {what}", said or more, table)

        layers, collectives = part("layer", self.layers), part("collective", self.collectives)
        return part("kind", self.kinds, whole), layers, collectives


def compare(
    run: Run, labels: Labels, timeline: Timeline, mesh: Mesh, topology: Topology, platform: str
) -> Measured:
    """Returns the time of a run's profiled events beside that of the timeline, by their labels."""
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
    order = [*(EXPOSED if kind == COLLECTIVES else kind for kind in KINDS), IDLE, HIDDEN]
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
    """Adds up (name, predicted, measured) rows by name, longest first, and drops zeros."""
    found = [
        Part(name, sum(predicted for _, predicted, _ in alike), sum(own for *_, own in alike))
        for name, alike in w.grouped(rows, lambda row: row[0]).items()
    ]
    parts = [part for part in found if part.predicted or part.measured]
    return tuple(sorted(parts, key=lambda part: -max(part.predicted, part.measured)))
