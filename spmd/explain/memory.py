"""Memory of a program, per device: as XLA reports it, or as predicted; and what is made again.

`memory_curve` shows the prediction over time: the bytes that are held at each op of a run, what
they are held for, and which values are alive at the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from spmd.explain.document import Cell, Table, count, number, source
from spmd.explain.words import bytes_text, plural, seconds_text, type_text
from spmd.ir.description import CONSTANT
from spmd.ir.program import Program, numberless
from spmd.lowering.recompute.again import AGAIN
from spmd.planning.plan import Plan, Recomputed
from spmd.predict.memory import Buffer, MemoryUse
from spmd.predict.timeline import COMPUTE, Timeline

ARGUMENTS, RESULTS, SAVED, TEMPORARY = "arguments", "results", "saved for the gradient", "temporary"
KINDS = (ARGUMENTS, RESULTS, SAVED, TEMPORARY)
"""What memory is held for, from the bottom of the picture to its top."""


class Memory(NamedTuple):
    """Bytes per device.

    Attributes:
      arguments, results: what goes in and out.
      aliased: of the results, what reuses donated arguments.
      temporary: the largest set of intermediate values alive at once.
      code: the executable itself.
      is_predicted: whether this is our prediction, and not XLA's report.
      constants: those of the program. Of XLA's arguments they are the ones that nobody passes; what
        is whole on every device, XLA does not report.
    """

    arguments: int
    results: int
    aliased: int
    temporary: int
    code: int
    is_predicted: bool = False
    constants: int = 0

    @property
    def peak_bytes(self) -> int:
        """Upper bound of what the program needs at once."""
        held = self.arguments + self.results - self.aliased + self.temporary
        return held + self.constants

    @staticmethod
    def of(analysis: Any, constants: int = 0, passed: int = 0) -> Memory:
        """From `Compiled.memory_analysis()`; zeros where a backend reports nothing.

        Of the bytes of constants, XLA takes `passed` for arguments.
        """
        if analysis is None:
            return Memory(0, 0, 0, 0, 0)
        return Memory(
            analysis.argument_size_in_bytes - passed,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
            analysis.generated_code_size_in_bytes,
            constants=constants,
        )

    @staticmethod
    def predicted(use: MemoryUse) -> Memory:
        """From our own prediction, before XLA has seen the program."""
        held = use.arguments, use.results, use.aliased, use.temporary
        return Memory(*held, 0, True, use.constants)


class Alive(NamedTuple):
    """Values that are held at the peak and look alike, and the bytes of all of them.

    `kind` is one of `KINDS`, `label` the op that makes them or the name of the argument or result,
    and `type` that of one device's piece.
    """

    kind: str
    label: str
    type: str
    source: str
    values: int
    bytes: int


class MemoryCurve(NamedTuple):
    """Bytes held over a run."""

    # for each kernel as they run, a loop's before the loop itself, bytes of each of `KINDS`
    steps: tuple[tuple[int, ...], ...]
    peak: int  # the step with the most bytes
    at_peak: tuple[Alive, ...]  # what is held there, the largest first


def memory_curve(use: MemoryUse, program: Program) -> MemoryCurve:
    """What a local program is predicted to hold, as a curve."""
    count = len(use.order)

    def is_saved(buffer: Buffer) -> bool:
        """Whether the forward pass makes it and the backward pass reads it last."""
        last = use.order[min(buffer.end, count - 1)]
        return "transpose(" in last.loc.scope and "transpose(" not in buffer.op.loc.scope

    kinds = [SAVED if is_saved(buffer) else TEMPORARY for buffer in use.buffers]
    changes = [[0] * len(KINDS) for _ in range(count + 1)]
    changes[0] = [use.arguments + use.constants, use.results - use.aliased, 0, 0]
    for kind, buffer in zip(kinds, use.buffers, strict=True):
        if buffer.in_result:
            continue
        changes[buffer.start][KINDS.index(kind)] += buffer.bytes
        changes[min(buffer.end + 1, count)][KINDS.index(kind)] -= buffer.bytes
    held = accumulate(changes[:-1], lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
    return MemoryCurve(tuple(map(tuple, held)), use.peak_at, _at_peak(use, program, kinds))


def _at_peak(use: MemoryUse, program: Program, kinds: Sequence[str]) -> tuple[Alive, ...]:
    """What is held at the peak, values that look alike together."""
    types, body = program.types, program.body
    held = [
        (kind, b.label, b.type, b.op.loc.trail, b.bytes)
        for kind, b in zip(kinds, use.buffers, strict=True)
        if b.start <= use.peak_at <= b.end and not b.in_result
    ]
    held += [
        (ARGUMENTS, "constant", op.kind.results[0], op.loc.trail, len(op.kind.attrs["value"].data))
        for op in program.walk()
        if op.name == CONSTANT and not op.kind.attrs["value"].splat
    ]
    results = zip(program.result_names, body.results, strict=True)
    for kind, leaves in (
        (ARGUMENTS, zip(program.arg_names, body.args, strict=True)),
        (RESULTS, [leaf for i, leaf in enumerate(results) if i not in use.reused]),
    ):
        held += [(kind, numberless(name), types[v], "", types[v].bytes) for name, v in leaves]
    rows: dict[tuple[str, str, str, str], Alive] = {}
    for kind, label, type_, trail, size in held:
        key = (kind, label, type_text(type_), trail)
        old = rows.get(key, Alive(*key, 0, 0))
        rows[key] = old._replace(values=old.values + 1, bytes=old.bytes + size)
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))


def recomputed(plan: Plan, timeline: Timeline) -> tuple[str, Table]:
    """What a program makes again rather than holds: a title that sums it up, and the values.

    Values of one op at one source line are one row, the largest first.
    """
    found: dict[tuple[str, str], list[Recomputed]] = {}
    for value in plan.recomputed:
        found.setdefault((value.name, value.loc.trail), []).append(value)
    sized = [(sum(v.bytes for v in values), key, values) for key, values in found.items()]
    sized.sort(key=lambda row: -row[0])
    rows = [
        (number(bytes_text(size), size), count(len(values)), Cell(name, style="w"), source(trail))
        for size, (name, trail), values in sized
    ]
    slots = [slot for slot in timeline.slots if AGAIN in slot.op.loc.note and not slot.op.regions]
    arithmetic = sum(slot.seconds * slot.trips for slot in slots if slot.lane == COMPUTE)
    exchanges = sum(slot.seconds * slot.trips for slot in slots if slot.lane != COMPUTE)
    sent = f" and {seconds_text(exchanges)} of collectives" if exchanges else ""
    title = (
        f"made again rather than held: {plural(len(plan.recomputed), 'value')} of "
        f"{bytes_text(sum(v.bytes for v in plan.recomputed))}, "
        f"in {seconds_text(arithmetic)} of arithmetic{sent}"
    )
    return title, Table(("per device", "n", "op", "source"), rows, sort="per device")
