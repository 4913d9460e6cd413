"""XLA's CPU backend has no `ragged_dot`: for tests, local ones become masked products."""

from collections.abc import Sequence
from functools import reduce

import spmd
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.contract import RaggedDims
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import rewrite_ops
from spmd.ir.types import TensorType
from spmd.lowering.expand import expand


def expand_for_cpu(program: Program, mesh: spmd.Mesh) -> Program:
    """`expand`, and then every `chlo.ragged_dot` group by group."""

    def rewrite(b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        return (_by_groups(b, op, operands),) if op.name == "chlo.ragged_dot" else None

    return rewrite_ops(expand(program, mesh), rewrite)


def _by_groups(b: Builder, op: Op, operands: tuple[Value, ...]) -> Value:
    """The sum (or the stack, when the contraction is ragged) of one masked product a group."""
    dims = RaggedDims.of(op.kind)
    lhs, rhs, sizes = operands
    result = op.kind.results[0]
    stacked = dims.ragged in dims.dot.lhs_contract
    parts = []
    end = None
    for group in range(b.types[sizes].shape[-1]):
        size = _group(b, sizes, b.types[sizes].rank - 1, group)
        start = end if end is not None else b.splat(0, b.types[size])
        end = b.binary("add", start, size)
        rows = _masked(b, lhs, dims, start, end)
        matrix = rhs if dims.group is None else _group(b, rhs, dims.group, group)
        parts.append(_product(b, rows, matrix, dims, result, stacked))
    if stacked:
        return b.concatenate([b.reshape(p, (1, *b.types[p].shape)) for p in parts], 0)
    return reduce(lambda x, y: b.binary("add", x, y), parts)


def _group(b: Builder, x: Value, dim: int, index: int) -> Value:
    shape = b.types[x].shape
    return b.reshape(b.slice_dim(x, dim, index, index + 1), shape[:dim] + shape[dim + 1 :])


def _masked(b: Builder, lhs: Value, dims: RaggedDims, start: Value, end: Value) -> Value:
    """The left operand, zero outside one group; there are other bounds for each batch."""
    type_ = b.types[lhs]
    row = b.iota(TensorType(type_.shape, b.types[start].dtype), dims.ragged)
    outer = dims.dot.lhs_batch[: b.types[start].rank]
    low, high = (b.broadcast(v, type_.shape, outer) for v in (start, end))
    inside = b.binary("and", b.compare("GE", row, low), b.compare("LT", row, high))
    return b.select(inside, lhs, b.splat(0, type_))


def _product(
    b: Builder, rows: Value, matrix: Value, dims: RaggedDims, result: TensorType, stacked: bool
) -> Value:
    def kept(indices: tuple[int, ...]) -> tuple[int, ...]:
        group = dims.group
        return indices if group is None else tuple(i - (i > group) for i in indices)

    dot = dims.dot
    numbers = dot._replace(rhs_batch=kept(dot.rhs_batch), rhs_contract=kept(dot.rhs_contract))
    type_ = result.with_shape(result.shape[1:]) if stacked else result
    attrs = {"dot_dimension_numbers": numbers}
    return b.op("stablehlo.dot_general", (rows, matrix), (type_,), attrs)[0]
