"""Memory of one device over a run: which values of the local program are alive at which op.

Read off the local program, before XLA fuses it: values that XLA never writes count here, so the
curve's shape is right and its height an upper estimate. What XLA really allocates is `Memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from spmd.ir.program import Op, Program, Region, Value, free_values, numberless

ARGUMENTS, RESULTS, SAVED, TEMPORARY = "arguments", "results", "saved for the gradient", "temporary"
KINDS = (ARGUMENTS, RESULTS, SAVED, TEMPORARY)
"""What values are alive for, from the bottom of the picture to its top."""

_SAME_BUFFER = ("stablehlo.reshape", "stablehlo.bitcast_convert", "spmd.mark")
_NEVER_WRITTEN = ("stablehlo.constant", "stablehlo.iota", "stablehlo.broadcast_in_dim")
"""What every compiler makes where it is read."""


class Alive(NamedTuple):
    """Values that are alive at the peak and look alike.

    Attributes:
      kind: one of `KINDS`.
      label: the op that makes them, or the argument's name.
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


class Liveness(NamedTuple):
    """Bytes alive over a run.

    Attributes:
      steps: for each op of the program's body, bytes of each of `KINDS` while it runs; inside a
        loop, those of the iteration's worst moment.
      peak: the step with the most bytes.
      at_peak: what is alive there, the largest first.
    """

    steps: tuple[tuple[int, ...], ...]
    peak: int
    at_peak: tuple[Alive, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return sum(self.steps[self.peak]) if self.steps else 0


def liveness_of(program: Program, reused: Mapping[int, int]) -> Liveness:
    """Bytes alive over a run of a local program.

    Args:
      program: the local program.
      reused: result -> the donated argument in whose memory it is written.
    """
    body = program.body
    roots = _roots(body)
    last = _last_uses(body, roots)
    kinds = _kinds(program, roots, last, reused)
    held = [0, 0, 0, 0]
    for value in body.args:
        held[0] += program.types[value].bytes
    alive: dict[Value, int] = {}
    ending: dict[int, list[Value]] = {}
    steps: list[tuple[int, ...]] = []
    peak, peak_bytes = 0, -1
    peak_alive: tuple[Value, ...] = ()
    for i, op in enumerate(body.ops):
        for value in op.results:
            kind = kinds.get(value, -1)
            if kind > 0:
                size = program.types[value].bytes
                held[kind] += size
                alive[value] = size
                ending.setdefault(max(last.get(value, i), i), []).append(value)
        inner = max((_inner_peak(program, region) for region in op.regions), default=0)
        steps.append((*held[:3], held[3] + inner))
        if sum(steps[-1]) > peak_bytes:
            peak, peak_bytes, peak_alive = i, sum(steps[-1]), tuple(alive)
        for value in ending.pop(i, ()):
            held[kinds[value]] -= alive.pop(value)
    return Liveness(tuple(steps), peak, _alive(program, peak_alive, kinds))


def _roots(region: Region) -> dict[Value, Value]:
    """Values that are in another one's memory: looked at differently, or a loop's next state."""
    last = _last_uses(region, {})
    roots: dict[Value, Value] = {}
    fused = {v for op in region.ops if op.name in _NEVER_WRITTEN for v in op.results}
    for i, op in enumerate(region.ops):
        if op.name in _SAME_BUFFER:
            roots[op.results[0]] = roots.get(op.operands[0], op.operands[0])
        elif op.name == "stablehlo.while":
            body = op.regions[1]
            for k, (result, first) in enumerate(zip(op.results, op.operands, strict=True)):
                same = body.results[k] == body.args[k] or last[first] == i
                if same and first not in fused:
                    roots[result] = roots.get(first, first)
    return roots


def _reads(op: Op) -> list[Value]:
    return [*op.operands, *(v for region in op.regions for v in free_values(region))]


def _last_uses(region: Region, roots: Mapping[Value, Value]) -> dict[Value, int]:
    """For each value that owns memory, the op that reads it last; results live to the end."""
    last: dict[Value, int] = {}
    for i, op in enumerate(region.ops):
        for value in _reads(op):
            last[roots.get(value, value)] = i
    for value in region.results:
        last[roots.get(value, value)] = len(region.ops)
    return last


def _kinds(
    program: Program,
    roots: Mapping[Value, Value],
    last: Mapping[Value, int],
    reused: Mapping[int, int],
) -> dict[Value, int]:
    """The kind of each value of the body that needs memory of its own, as an index of `KINDS`."""
    body = program.body
    backward = [_is_gradient(op) for op in body.ops]
    returned = {roots.get(v, v): i for i, v in reversed(list(enumerate(body.results)))}
    kinds: dict[Value, int] = {}
    for i, op in enumerate(body.ops):
        for value in op.results:
            end = last.get(value, i)
            if value in roots or op.name in _NEVER_WRITTEN:
                continue
            if value in returned:
                if returned[value] not in reused:
                    kinds[value] = 1
            elif end < len(backward) and backward[end] and not backward[i]:
                kinds[value] = 2
            else:
                kinds[value] = 3
    return kinds


def _is_gradient(op: Op) -> bool:
    return "transpose(" in op.loc.scope


def _inner_peak(program: Program, region: Region) -> int:
    """The most bytes that a region's own values need at once; its arguments are held outside."""
    roots = _roots(region)
    last = _last_uses(region, roots)
    held, peak = 0, 0
    ending: dict[int, list[Value]] = {}
    for i, op in enumerate(region.ops):
        for value in op.results:
            if value not in roots and op.name not in _NEVER_WRITTEN:
                held += program.types[value].bytes
                ending.setdefault(max(last.get(value, i), i), []).append(value)
        inner = max((_inner_peak(program, r) for r in op.regions), default=0)
        peak = max(peak, held + inner)
        held -= sum(program.types[value].bytes for value in ending.pop(i, ()))
    return peak


def _alive(
    program: Program, values: tuple[Value, ...], kinds: Mapping[Value, int]
) -> tuple[Alive, ...]:
    producers = {v: op for op in program.body.ops for v in op.results}
    rows: dict[tuple[str, str, str, str], Alive] = {}

    def note(kind: str, label: str, value: Value, source: str) -> None:
        type_ = program.types[value]
        text = f"{type_.dtype}[{','.join(map(str, type_.shape))}]"
        old = rows.get((kind, label, text, source), Alive(kind, label, text, source, 0, 0))
        new = old._replace(values=old.values + 1, bytes=old.bytes + type_.bytes)
        rows[kind, label, text, source] = new

    for value in values:
        op = producers[value]
        note(KINDS[kinds[value]], op.label, value, op.loc.trail)
    for name, value in zip(program.arg_names, program.body.args, strict=True):
        note(ARGUMENTS, numberless(name), value, "")
    return tuple(sorted(rows.values(), key=lambda row: -row.bytes))
