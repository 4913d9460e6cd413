"""Several collectives of one kind over the same groups as one, over a flat buffer.

before: `%3 = all_gather %1 dim=0; %4 = all_gather %2 dim=1`
after:  `%5 = concatenate(flat %1, flat %2); %6 = all_gather %5: one row a device`
        `%3, %4 =` columns of `%6`, each device's part where it belongs

(StableHLO's variadic collectives would say the same without copies, but XLA 0.10's export rejects
a variadic all_reduce inside a manually partitioned loop: "Sharding is tuple-shaped but validation
shape is not".)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, Value
from spmd.lowering.rewrites.moves import pieces_of

COMBINED = ("all_gather", "all_reduce", "reduce_scatter")
"""Kinds of collectives that can be combined."""


def combined(b: Builder, group: Sequence[Op]) -> None:
    """Appends one collective that makes the results of several.

    Args:
      b: the builder that ops are appended to.
      group: collectives of one of the `COMBINED` kinds, over the same groups, of one dtype and
        reduction.
    """
    if len(group) == 1:
        b.append(group[0])
        return
    # Each operand is a row, or has one for each device that gets a part. Rows are side by side, and
    # collectives have columns of their own. Two reduce-scatters over 2 devices, f32[4] and f32[6]:
    #   a0 a1 | b0 b1 b2        row for device 0      -> one reduce-scatter of f32[2, 5] along dim 0
    #   a2 a3 | b3 b4 b5        row for device 1
    first, attr = group[0], group[0].kind.about.along
    b.loc = first.loc._replace(note=f"{first.loc.note} (and {len(group) - 1} more with it)".strip())
    rows = [_rows(b, op) for op in group]
    joined = b.concatenate(rows, 1)
    count, width = b.types[joined].shape
    parts = pieces_of(first) if attr else 1
    after = parts * count if first.collective == "all_gather" else count // parts
    attrs = {**first.kind.attrs, attr: 0} if attr else first.kind.attrs
    type_ = b.types[joined].with_shape((after, width))
    (moved,) = b.op(first.name, (joined,), (type_,), attrs)
    start = 0
    for op, row in zip(group, rows, strict=True):
        size = b.types[row].shape[1]
        b.loc = op.loc
        _unpacked(b, op, b.slice_dim(moved, 1, start, start + size))
        start += size


def _rows(b: Builder, op: Op) -> Value:
    """An operand as a matrix: for a reduce-scatter a row for each device, else one row."""
    (x,) = op.operands
    type_ = op.kind.operands[0]
    if op.collective != "reduce_scatter":
        return b.reshape(x, (1, type_.size))
    dim, parts = op.kind.attrs["scatter_dimension"], pieces_of(op)
    before, after = type_.shape[:dim], type_.shape[dim + 1 :]
    x = _turned(b, x, (math.prod(before), parts, type_.shape[dim] // parts * math.prod(after)))
    return b.reshape(x, (parts, type_.size // parts))


def _turned(b: Builder, x: Value, shape: tuple[int, int, int]) -> Value:
    """Reshapes a value to three dims and swaps the first two."""
    return x if 1 in shape[:2] else b.transpose(b.reshape(x, shape), (1, 0, 2))


def _unpacked(b: Builder, op: Op, part: Value) -> None:
    """Makes a collective's own results from its columns of the common one."""
    # Gathers join rows, one a device. For f32[2, 3] along dim 1 over 4 devices that is f32[4, 6]:
    # as (4 devices, 2, 3) with the first two swapped, it is the f32[2, 12] that was asked for.
    if op.collective == "all_gather":
        type_, dim = op.kind.operands[0], op.kind.attrs["all_gather_dim"]
        before = math.prod(type_.shape[:dim])
        part = _turned(b, part, (pieces_of(op), before, math.prod(type_.shape[dim:])))
    b.append(b.reshape_op(part, op))
