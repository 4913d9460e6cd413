"""Memory of a program, per device: as XLA reports it, or as predicted.

`memory_curve` shows the prediction over time: the bytes that are held at each op of a run, what
they are held for, and which values are alive at the peak.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from spmd.explain.words import type_text
from spmd.ir.program import Op, Program, numberless
from spmd.ir.types import TensorType
from spmd.predict.memory import Buffer, MemoryUse

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
    """

    arguments: int
    results: int
    aliased: int
    temporary: int
    code: int
    is_predicted: bool = False

    @property
    def peak_bytes(self) -> int:
        """Upper bound of what the program needs at once."""
        return self.arguments + self.results - self.aliased + self.temporary

    @staticmethod
    def of(analysis: Any) -> Memory:
        """From `Compiled.memory_analysis()`; zeros where a backend reports nothing."""
        if analysis is None:
            return Memory(0, 0, 0, 0, 0)
        return Memory(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
            analysis.generated_code_size_in_bytes,
        )

    @staticmethod
    def predicted(use: MemoryUse) -> Memory:
        """From our own prediction, before XLA has seen the program."""
        return Memory(use.arguments, use.results, use.aliased, use.temporary, 0, True)


class Alive(NamedTuple):
    """Values that are held at the peak and look alike.

    Attributes:
      kind: one of `KINDS`.
      label: the op that makes them, or the argument's or the result's name.
      type: one device's piece.
      source: the user's source line, and its caller's.
      values: how many.
      bytes: all of them together.
    """

    kind: str
    label: str
    type: str
    source: str
    values: int
    bytes: int


class MemoryCurve(NamedTuple):
    """Bytes held over a run.

    Attributes:
      steps: for each kernel as they run, a loop's before the loop itself, bytes of each of `KINDS`
        meanwhile.
      peak: the step with the most bytes.
      at_peak: what is held there, the largest first.
    """

    steps: tuple[tuple[int, ...], ...]
    peak: int
    at_peak: tuple[Alive, ...]


def memory_curve(use: MemoryUse, program: Program) -> MemoryCurve:
    """A prediction as a curve.

    Args:
      use: what the program is predicted to hold.
      program: the local program.
    """
    ops = use.order
    kinds = [SAVED if _is_saved(buffer, ops) else TEMPORARY for buffer in use.buffers]
    changes = [[0] * len(KINDS) for _ in range(len(ops) + 1)]
    for kind, buffer in zip(kinds, use.buffers, strict=True):
        changes[buffer.start][KINDS.index(kind)] += buffer.bytes
        changes[min(buffer.end + 1, len(ops))][KINDS.index(kind)] -= buffer.bytes
    held = [use.arguments, use.results - use.aliased, 0, 0]
    steps = []
    for here in changes[:-1]:
        held = [a + b for a, b in zip(held, here, strict=True)]
        steps.append(tuple(held))
    return MemoryCurve(tuple(steps), use.peak_at, _at_peak(use, program, kinds))


def _is_saved(buffer: Buffer, ops: tuple[Op, ...]) -> bool:
    """Whether the forward pass makes it and the backward pass reads it last."""
    return not _is_gradient(buffer.op) and _is_gradient(ops[min(buffer.end, len(ops) - 1)])


def _is_gradient(op: Op) -> bool:
    return "transpose(" in op.loc.scope


def _at_peak(use: MemoryUse, program: Program, kinds: list[str]) -> tuple[Alive, ...]:
    """What is held at the peak, values that look alike together."""
    rows: dict[tuple[str, str, str, str], Alive] = {}

    def note(kind: str, label: str, type_: TensorType, source: str, size: int) -> None:
        key = (kind, label, type_text(type_), source)
        old = rows.get(key, Alive(*key, 0, 0))
        rows[key] = old._replace(values=old.values + 1, bytes=old.bytes + size)

    types, body = program.types, program.body
    for kind, b in zip(kinds, use.buffers, strict=True):
        if b.start <= use.peak_at <= b.end:
            note(kind, b.label, types[b.value], b.op.loc.trail, b.bytes)
    for name, value in zip(program.arg_names, body.args, strict=True):
        note(ARGUMENTS, numberless(name), types[value], "", types[value].bytes)
    named = zip(program.result_names, body.results, strict=True)
    for position, (name, value) in enumerate(named):
        if position not in use.reused:
            note(RESULTS, numberless(name), types[value], "", types[value].bytes)
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))
