"""Rewrites that save work: equal ops are done once, and FFTs of one dim each are joined.

FFTs along one dim each, one after another, become an FFT of several, which is faster:

before: `%1 = fft %0 [16]; %2 = transpose %1 [1, 0]; %3 = fft %2 [8]; %4 = transpose %3 [1, 0]`
after:  `%4 = fft %0 [8, 16]`

Before, `spmd.frontend.canonicalize` made FFTs of one dim of each FFT of several, so that the plan
can change which dims are split between them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import Index
from spmd.ir.description import TRANSPOSE
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, dedupe, edit_ops, remove_dead
from spmd.ir.types import Opaque

LENGTHS = "fft_length"  # the attribute that FFTs alone have
MOST_DIMS = 3  # XLA has no FFT of more


def simplify(program: Program, platform: str | None) -> Program:
    """Returns a local program: equal ops merged, dead ones removed, FFTs joined (not on CPUs)."""
    # XLA for CPUs lays an FFT of several dims as its readers like it, which it then refuses to run.
    return remove_dead(dedupe(program if platform == "cpu" else join_ffts(program)))


class _Fft(NamedTuple):
    """An FFT `op` of `operand` along `dim`; between two transposes if `dim` is not the last."""

    operand: Value
    dim: int
    op: Op


def join_ffts(program: Program) -> Program:
    """Joins FFTs of one dim each, with only transposes between them, into one FFT of these dims."""
    if not any(LENGTHS in op.kind.attrs for op in program.walk()):
        return program
    index = Index(program)
    users, producers = index.users, index.producers
    made = {v: op for v, op in producers.items() if len(users.get(v, ())) == 1}

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        parts: list[_Fft] = []  # consecutive FFTs of different dims, the last one first
        before: Op | None = op
        while before is not None and len(parts) < MOST_DIMS:
            part = _part(before, made)
            if part is None or any(part.dim == other.dim for other in parts):
                break
            parts.append(part)
            before = made.get(part.operand)
        for count in range(len(parts), 1, -1):
            kind = _kind(parts[:count], op.kind.results[0].rank)
            if kind is not None:
                chosen = sorted(parts[:count], key=lambda part: part.dim)
                lengths = tuple([part.op.kind.attrs[LENGTHS][0] for part in chosen])
                attrs = {LENGTHS: lengths, "fft_type": kind}
                name = parts[0].op.name
                return b.op(name, (now(parts[count - 1].operand),), op.kind.results, attrs)
        return None

    return remove_dead(edit_ops(program, edit))


def _part(op: Op, made: Mapping[Value, Op]) -> _Fft | None:
    last = op.kind.results[0].rank - 1 if op.results else 0
    if len(op.kind.attrs.get(LENGTHS, ())) == 1:
        return _Fft(op.operands[0], last, op)
    if op.name != TRANSPOSE:
        return None
    fft = made.get(op.operands[0])
    if fft is None or len(fft.kind.attrs.get(LENGTHS, ())) != 1:
        return None
    there, order = made.get(fft.operands[0]), op.kind.attrs["permutation"]
    swap = [*range(last + 1)]
    swap[order[last]], swap[last] = last, order[last]
    if there is None or there.name != TRANSPOSE or list(order) != swap:
        return None
    is_back = there.kind.attrs["permutation"] == order
    return _Fft(there.operands[0], order[last], fft) if is_back else None


def _kind(parts: Sequence[_Fft], rank: int) -> Opaque | None:
    if {part.dim for part in parts} != set(range(rank - len(parts), rank)):
        return None
    kinds: list[Opaque] = [part.op.kind.attrs["fft_type"] for part in parts]
    if len(set(kinds)) == 1:
        return kinds[0]
    *others, first = kinds
    # Real values become complex along the last dim. To real ones nothing is joined: cuFFT takes all
    # dims of those for symmetric, where only the last one has to be.
    is_real = " RFFT" in first.text and parts[-1].dim == rank - 1
    return first if is_real and set(others) == {Opaque(first.text.replace("RFFT", "FFT"))} else None
