"""Last rewrite before emission: `spmd.*` helper ops become StableHLO arithmetic.

before: `%1 = spmd.axis_index {data}`         (mesh data=4, model=2)
after:  `%1 = convert(partition_id) / 2 % 4`

before: `%3 = spmd.local_slice %2 {data} dim=0`
after:  `%3 = dynamic_slice %2, axis_index * piece, 0`

XLA merges a slice of a slice by adding their starts, as if neither were out of range. So a dynamic
slice that is sliced again gets its starts clamped first:

before: `%3 = dynamic_slice %2, %1; %4 = spmd.local_slice %3`
after:  `%3 = dynamic_slice %2, clamp(0, %1, last); %4 = dynamic_slice %3, ...`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.ir.control_flow import producers_of
from spmd.ir.description import BROADCAST, DYNAMIC_SLICE
from spmd.ir.dialect.builder import AXIS_INDEX, LOCAL_SLICE, Builder
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK, FLAG
from spmd.ir.dialect.collectives import DEVICE_IDS
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import rewrite_ops
from spmd.ir.types import TensorType, numpy_dtype
from spmd.lowering.local.callbacks import FREE, in_order, where
from spmd.lowering.local.dims import dynamic_take_dim
from spmd.lowering.rewrites.moves import is_move
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes


def expand(program: Program, mesh: Mesh) -> Program:
    """Replaces the `spmd.*` helper ops of a local program by StableHLO ops."""
    program = in_order(program)
    producers, sliced = producers_of(program), set[Value]()
    # Dynamic slices that another slice is taken from, or that XLA moves there.
    for op in program.walk():
        if op.name != LOCAL_SLICE and op.name != DYNAMIC_SLICE:
            continue
        source = producers.get(op.operands[0])
        while source is not None and (is_move(source.kind) or source.name == BROADCAST):
            source = producers.get(source.operands[0])
        if source is not None and source.name == DYNAMIC_SLICE:
            sliced.add(source.results[0])

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        if op.name == AXIS_INDEX:
            return (_axis_index(b, op.kind.attrs["axes"], mesh),)
        if op.name == CALLBACK and op.kind.attrs[FREE]:
            index = _axis_index(b, op.kind.attrs[FREE], mesh)
            is_first = b.compare("EQ", index, b.constant(0, "i32"))
            types = op.kind.results
            return where(b, is_first, op, operands, lambda: [b.splat(0, t) for t in types])
        if op.name == CHECK_CALLBACK:
            flag, *values = operands
            is_set = b.compare("NE", flag, b.splat(0, FLAG))
            return where(b, is_set, op, operands, lambda: values)
        if op.name == LOCAL_SLICE:
            dim = op.kind.attrs["dim"]
            size = op.kind.results[0].shape[dim]
            index = _axis_index(b, op.kind.attrs["axes"], mesh)
            start = b.binary("multiply", index, b.constant(size, "i32"))
            return (dynamic_take_dim(b, operands[0], dim, start, size),)
        if not op.results or op.results[0] not in sliced:
            return None
        x, *starts = operands
        dims = zip(starts, b.types[x].shape, op.kind.attrs["slice_sizes"], strict=True)
        clamped = [clamped_index(b, start, whole - part) for start, whole, part in dims]
        return b.op(op.name, (x, *clamped), op.kind.results, op.kind.attrs)

    return rewrite_ops(program, rewrite)


def _axis_index(b: Builder, axes: Axes, mesh: Mesh) -> Value:
    def partition_id() -> Value:
        (raw,) = b.op(DEVICE_IDS[0], (), (TensorType((), "ui32"),))
        return b.convert(raw, "i32")

    # Neighbours in the flattened mesh are merged to runs of (stride, size). On (data=4, model=2)
    # the atoms of {data} have strides 4 and 2: together a run of stride 2 and size 4, so that its
    # index is `position / 2` without remainders. {model, data} has two runs.
    def make() -> Value:
        position = b.once("partition_id", partition_id)
        runs: list[tuple[int, int]] = []
        for a in axes:
            atom = mesh.atoms[a]
            if runs and runs[-1][0] == atom.stride * atom.size:
                runs[-1] = (atom.stride, runs[-1][1] * atom.size)
            else:
                runs.append((atom.stride, atom.size))
        index: Value | None = None
        for stride, size in runs:
            part = position
            if stride > 1:
                part = b.binary("divide", part, b.constant(stride, "i32"))
            if stride * size < mesh.size:
                part = b.binary("remainder", part, b.constant(size, "i32"))
            if index is not None:
                scaled = b.binary("multiply", index, b.constant(size, "i32"))
                part = b.binary("add", scaled, part)
            index = part
        return index if index is not None else b.constant(0, "i32")

    return b.once(("index", axes), make)


def clamped_index(b: Builder, index: Value, last: int) -> Value:
    """Clamps an index scalar of any integer type to the range from 0 to `last`."""
    dtype = b.types[index].dtype
    last = min(last, int(np.iinfo(numpy_dtype(dtype)).max))
    if last == 0:
        return b.constant(0, dtype)
    above = b.binary("maximum", index, b.constant(0, dtype))
    return b.binary("minimum", above, b.constant(last, dtype))
