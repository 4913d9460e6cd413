"""The order of dims in which XLA's CPU kernels read operands; any other order is copied first.

Products of matrices read (batch, rows, contracted) and (batch, contracted, columns), or either one
transposed as long as rows, columns and what is contracted are one dim each. Convolutions read
(batch, spatial, features) and (spatial, in, out). Collectives work along the first dim.
"""

from __future__ import annotations

from collections.abc import Mapping

from spmd.ir.dialect.reducers import body_reducer
from spmd.ir.program import Body, OpKind
from spmd.ir.types import ConvDims, DotDims, TensorType

Order = tuple[int, ...]
"""The dims of a tensor, the most major first."""


def transposed_operands(kind: OpKind) -> Mapping[int, Order]:
    """Positions of the operands that are copied first, and the order of their copies' dims."""
    found: Mapping[int, Order] | None = kind._cache.get("operands.transposed")
    if found is None:
        found = kind._cache["operands.transposed"] = _transposed_operands(kind)
    return found


def _transposed_operands(kind: OpKind) -> dict[int, Order]:
    wanted: dict[int, Order] = {}
    if kind.about.reads == "matrices":
        wanted = _dot(kind)
    elif kind.about.reads == "images":
        wanted = _convolution(kind.attrs["dimension_numbers"])
    elif kind.about.collective and kind.about.along:
        wanted = _along(kind.operands, kind.attrs[kind.about.along])
    return {i: order for i, order in wanted.items() if not _is_same(order, kind.operands[i])}


def transposed_results(kind: OpKind) -> Order:
    """The order of dims in which results have to be copied; empty if no copy is needed."""
    if kind.about.collective == "all_gather":
        order = _along(kind.results, kind.attrs["all_gather_dim"])[0]
        return () if _is_same(order, kind.results[0]) else tuple(range(kind.results[0].rank))
    return ()


def is_library_reduce(kind: OpKind) -> bool:
    """Whether a reduction is a library call: sum, maximum or minimum of one float32 tensor."""
    if not kind.about.is_reduce or len(kind.results) != 1:
        return False
    body = kind.attrs.get("body")
    known = isinstance(body, Body) and body_reducer(body) in ("add", "max", "min")
    return known and kind.operands[0].dtype == "f32"


def _dot(kind: OpKind) -> dict[int, Order]:
    # A weight gradient `b s i, b s o -> i o` contracts b and s: its left operand is read as i, b, s
    # and is copied first, its right one as b, s, o, which is how it lies.
    dims: DotDims = kind.attrs["dot_dimension_numbers"]
    lhs, rhs = kind.operands
    rows = _others(lhs.rank, dims.lhs_batch, dims.lhs_contract)
    columns = _others(rhs.rank, dims.rhs_batch, dims.rhs_contract)
    return {
        0: _operand(dims.lhs_batch, rows, dims.lhs_contract, lhs),
        1: _operand(dims.rhs_batch, dims.rhs_contract, columns, rhs),
    }


def _operand(batch: Order, first: Order, second: Order, type_: TensorType) -> Order:
    """The order of dims in which a dot reads an operand.

    A batch of matrices is read as it is, transposed ones too: but these only in exactly that order,
    where dims of size 1 count.
    """
    as_it_is = tuple(range(type_.rank))
    if len(first) == len(second) == 1 and (*batch, *second, *first) == as_it_is:
        return as_it_is
    return (*batch, *first, *second)


def _others(rank: int, *used: Order) -> Order:
    taken = {d for dims in used for d in dims}
    return tuple(d for d in range(rank) if d not in taken)


def _convolution(dims: ConvDims) -> dict[int, Order]:
    return {
        0: (dims.input_batch, *dims.input_spatial, dims.input_feature),
        1: (*dims.kernel_spatial, dims.kernel_input_feature, dims.kernel_output_feature),
    }


def _along(types: tuple[TensorType, ...], dim: int) -> dict[int, Order]:
    return {i: (dim, *_others(t.rank, (dim,))) for i, t in enumerate(types)}


def _is_same(order: Order, type_: TensorType) -> bool:
    """Whether a tensor's elements lie in this order already; dims of size 1 do not matter."""
    long = [d for d in order if type_.shape[d] != 1]
    return long == sorted(long)
