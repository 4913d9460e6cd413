"""Reports the memory of a program on one device, as XLA states it or as predicted, and remat."""

from itertools import accumulate
from typing import Any, NamedTuple

from spmd.compiler import Stages
from spmd.explain import words as w
from spmd.ir.description import CONSTANT
from spmd.ir.program import Program, numberless
from spmd.lowering.recompute import AGAIN
from spmd.predict.memory import Buffer, MemoryUse
from spmd.predict.timeline import COMPUTE

ARGUMENTS, RESULTS, SAVED, TEMPORARY = "arguments", "results", "saved for the gradient", "temporary"
KINDS = (ARGUMENTS, RESULTS, SAVED, TEMPORARY)
"""What memory is held for, in the order in which the picture stacks it, from the bottom."""


class Memory(NamedTuple):
    """Holds the bytes that a program takes on one device, by what they are used for."""

    arguments: int
    results: int
    aliased: int  # those of `results` that are written into donated arguments
    temporary: int  # the largest set of intermediate values alive at once
    code: int  # the executable itself
    is_predicted: bool = False  # whether this is our prediction, and not XLA's report
    constants: int = 0  # the program's, which are not counted in `arguments`

    @property
    def peak_bytes(self) -> int:
        """Upper bound of the bytes held at once: all but `code`, with `aliased` counted once."""
        return self.arguments + self.results - self.aliased + self.temporary + self.constants

    @staticmethod
    def of(analysis: Any, constants: int = 0, passed: int = 0) -> "Memory":
        """Converts XLA's `memory_analysis()`; all bytes are 0 if that is None.

        `constants` are all bytes of constants, `passed` those of them that XLA counts as arguments.
        """
        if analysis is None:
            return Memory(0, 0, 0, 0, 0)  # the backend reports nothing
        return Memory(
            analysis.argument_size_in_bytes - passed,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
            analysis.generated_code_size_in_bytes,
            constants=constants,
        )

    @staticmethod
    def predicted(use: MemoryUse) -> "Memory":
        """Converts a prediction, for a program that XLA has not compiled yet; `code` is 0."""
        held = use.arguments, use.results, use.aliased, use.temporary
        return Memory(*held, 0, True, use.constants)


class MemoryCurve(NamedTuple):
    """Gives the bytes that one device holds at each kernel of a run, and the values at the peak."""

    # for each kernel in the order of execution, a loop after its body: bytes of each of `KINDS`
    steps: tuple[tuple[int, ...], ...]
    peak: int  # the step with the most bytes
    at_peak: w.Table  # what is held there, values that look alike together, the largest first


def memory_curve(use: MemoryUse, program: Program) -> MemoryCurve:
    """Returns how the predicted memory of a local program changes over a run, by what it is for."""
    count = len(use.order)

    def is_saved(buffer: Buffer) -> bool:
        """Whether the forward pass makes a buffer's value and the backward pass reads it last."""
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
    curve = accumulate(changes[:-1], lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
    # What is held at the peak: (kind, op or name, type of a piece, source line, bytes).
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
    alike = w.grouped(held, lambda row: (row[0], row[1], w.type_text(row[2]), row[3]))
    rows = [(sum(size for *_, size in values), len(values), *key) for key, values in alike.items()]
    heads = ("bytes", "n", "alive as", "made by", "local type", "source")
    return MemoryCurve(tuple(map(tuple, curve)), use.peak_at, w.Table(heads, rows).by("bytes"))


def recomputed(stages: Stages) -> w.Section:
    """Returns a table of the values that a program recomputes (remat), by op and source line."""
    found, every = stages.plan.recomputed, stages.timeline.slots
    alike = w.grouped(found, lambda value: (value.name, value.loc.trail))
    rows = [(sum(v.bytes for v in values), len(values), *key) for key, values in alike.items()]
    slots = [slot for slot in every if AGAIN in slot.op.loc.note and not slot.op.regions]
    arithmetic = sum(slot.seconds * slot.trips for slot in slots if slot.lane == COMPUTE)
    exchanges = sum(slot.seconds * slot.trips for slot in slots if slot.lane != COMPUTE)
    sent = f" and {w.seconds_text(exchanges)} of collectives" if exchanges else ""
    said = (
        f"{w.plural(len(found), 'value')} of {w.bytes_text(sum(v.bytes for v in found))}, "
        f"in {w.seconds_text(arithmetic)} of arithmetic{sent}"
    )
    table = w.Table(("per device", "n", "op", "source"), rows).by("per device")
    return w.Section("made again rather than held", said, table)
