"""`dynamic_*` ops whose result type is static after all become the static op.

Where the result type does not already say everything, the size operands have to be constants.

before: `%2 = stablehlo.dynamic_pad %x, %zero, %low, %high, %inner` with constant amounts
after:  `%2 = stablehlo.pad %x, %zero {edge_padding_low = ..., ...}`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd.frontend.canonicalize.site import Site, canonical
from spmd.ir.program import Value
from spmd.ir.types import GatherDims


def _need(site: Site, operand: int, what: str) -> tuple[int, ...]:
    """The constant elements of an operand, or the error that asks for them."""
    found = site.ints(operand)
    if found is None:
        site.fail(
            f"{what} are computed at run time",
            f"make operand {operand} a constant (refine the shapes, or fold constants first)",
        )
    return found


@canonical("stablehlo.dynamic_reshape")
def _reshape(site: Site) -> Sequence[Value]:
    return (site.b.reshape(site.operands[0], site.result.shape),)


@canonical("stablehlo.dynamic_broadcast_in_dim")
def _broadcast_in_dim(site: Site) -> Sequence[Value]:
    dims = site.attrs["broadcast_dimensions"]
    return (site.b.broadcast(site.operands[0], site.result.shape, dims),)


@canonical("stablehlo.dynamic_iota")
def _iota(site: Site) -> Sequence[Value]:
    return (site.b.iota(site.result, site.attrs["iota_dimension"]),)


@canonical("stablehlo.dynamic_gather")
def _gather(site: Site) -> Sequence[Value]:
    """The result's offset dims have the slice's sizes, what it lacks has size 1."""
    dims: GatherDims = site.attrs["dimension_numbers"]
    missing = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    offsets = iter(dims.offset_dims)
    sizes = tuple(
        1 if d in missing else site.result.shape[next(offsets)]
        for d in range(site.op.kind.operands[0].rank)
    )
    attrs = {**site.attrs, "slice_sizes": sizes}
    return site.b.op("stablehlo.gather", site.operands[:2], (site.result,), attrs)


@canonical("stablehlo.dynamic_pad")
def _pad(site: Site) -> Sequence[Value]:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    attrs = {name: _need(site, 2 + i, "its amounts") for i, name in enumerate(names)}
    return site.b.op("stablehlo.pad", site.operands[:2], (site.result,), attrs)


@canonical("stablehlo.dynamic_conv")
def _conv(site: Site) -> Sequence[Value]:
    amounts = _need(site, 2, "its amounts of padding")
    padding = tuple(zip(amounts[::2], amounts[1::2], strict=True))
    attrs = {**site.attrs, "padding": padding}
    return site.b.op("stablehlo.convolution", site.operands[:2], (site.result,), attrs)


@canonical("stablehlo.real_dynamic_slice")
def _slice(site: Site) -> Sequence[Value]:
    """Constant starts give a slice, others a dynamic slice if it takes every element."""
    b, strides = site.b, _need(site, 3, "its strides")
    starts, shape = site.ints(1), site.result.shape
    if starts is not None:
        limits = tuple(
            start + (n - 1) * stride + 1 if n else start
            for start, n, stride in zip(starts, shape, strides, strict=True)
        )
        attrs = {"start_indices": starts, "limit_indices": limits, "strides": strides}
        return b.op("stablehlo.slice", site.operands[:1], (site.result,), attrs)
    if any(stride != 1 for stride in strides):
        site.fail("it takes strides from a start that is computed", "make the starts constants")
    dtype = b.types[site.operands[1]].dtype
    scalars = []
    for d in range(len(shape)):
        part = b.slice(site.operands[1], (d,), (d + 1,))
        scalars.append(b.convert(b.reshape(part, ()), "i32" if dtype == "index" else dtype))
    return (b.dynamic_slice(site.operands[0], scalars, shape),)


@canonical("stablehlo.get_dimension_size")
def _get_dimension_size(site: Site) -> Sequence[Value]:
    size = site.op.kind.operands[0].shape[site.attrs["dimension"]]
    return (site.b.constant(np.asarray(size), site.result.dtype),)


@canonical("stablehlo.set_dimension_size")
def _set_dimension_size(site: Site) -> Sequence[Value]:
    """Static types leave one size that can be set: the one that is there."""
    size = site.op.kind.operands[0].shape[site.attrs["dimension"]]
    if _need(site, 1, "its sizes") != (size,):
        site.fail(f"it makes a dim of size {size} bounded", "give the dim its final size")
    return site.operands[:1]
