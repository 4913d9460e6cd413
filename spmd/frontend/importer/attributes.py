"""MLIR's types, constants, attributes and locations -> plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.errors import FrontendError
from spmd.frontend.importer.manual import COLLECTIVE_DIMS, Exchange
from spmd.ir.program import Frame
from spmd.ir.types import (
    DIM_NUMBERS,
    Attribute,
    ConvDims,
    Dense,
    DotDims,
    GatherDims,
    Opaque,
    ScatterDims,
    ShardingAttr,
    TensorType,
    numpy_dtype,
)

# ---------------------------------------------------------------------------------------------
# Types, constants, locations.


def tensor_type(type_: Any) -> TensorType:
    """A type, from the bindings or as MLIR writes it.

    Raises:
      FrontendError: it is neither a ranked tensor of static shape nor a token.
    """
    text = str(type_)
    if text == "!stablehlo.token":
        return TensorType((), "token")
    match = re.fullmatch(r"tensor<((?:(?:\d+|\?)x)*)([!\w][\w.]*(?:<.*?>)?)(, .*)?>", text)
    encoding = match[3] if match else None
    if match is None or (encoding and "#stablehlo.bounds" not in encoding):
        raise FrontendError(
            f"a value of type {text} cannot be partitioned", required="ranked tensors and tokens"
        )
    if "?" in match[1] or encoding:
        raise FrontendError(
            f"the module has a dynamic shape: {text}",
            required="static shapes",
            fix="refine the shapes first (jax.export with concrete shapes)",
        )
    return TensorType(tuple(int(n) for n in match[1].split("x")[:-1]), match[2])


def _dense(attr: Any) -> Dense:
    try:
        type_ = tensor_type(attr.type)
        if type_.size == 0:
            return Dense(type_, b"", False)
        if attr.is_splat and type_.size > 1:
            element = np.asarray(attr).reshape(-1)[:1]
            return Dense(type_, element.tobytes(), True)
        return Dense.of(np.asarray(attr), type_.dtype)
    except (TypeError, AttributeError, ValueError):
        return _dense_from_text(str(attr))


def _dense_from_text(text: str) -> Dense:
    """Elements of the types that the bindings don't convert (bf16, fp8, int4, complex)."""
    match = re.fullmatch(r"(?s)dense<(.*)> : (tensor<.*>)", text)
    if match is None:
        raise FrontendError(f"cannot read the constant {text[:60]}")
    type_ = tensor_type(match[2])
    if match[1].startswith('"0x'):
        raw = bytes.fromhex(match[1][3:-1])
    else:
        part = numpy_dtype(re.sub(r"complex<(.*)>", r"\1", type_.dtype))
        raw = b"".join([_literal(word, part) for word in re.findall(r"[^\s,()\[\]]+", match[1])])
    elements = np.frombuffer(raw, numpy_dtype(type_.dtype))
    if elements.size == 1:
        return Dense.of(np.broadcast_to(elements.reshape(()), type_.shape), type_.dtype)
    return Dense.of(elements.reshape(type_.shape), type_.dtype)


def _literal(word: str, dtype: np.dtype[Any]) -> bytes:
    """One number as MLIR writes it, as bytes; NaN and infinities are written as their bits."""
    if word.startswith("0x"):
        return int(word, 16).to_bytes(dtype.itemsize, "little")
    number: float | None = {"true": 1, "false": 0}.get(word)
    if number is None:
        number = int(word) if re.fullmatch(r"[-+]?\d+", word) else float(word)
    return np.asarray([number]).astype(dtype).tobytes()


def location_of(location: Any) -> tuple[str, list[Frame]]:
    """The outermost scope name and the frames, innermost first, that a location holds."""
    frames: list[Frame] = []
    return _walk_location(location, "", frames), frames


def _walk_location(location: Any, scope: str, frames: list[Frame]) -> str:
    """Collects frames innermost first; returns the outermost scope name."""
    # jax writes "jit(f)/sin"(callsite("f"("a.py":3) at "<module>"("a.py":9))): a name around call
    # sites is a scope, a name around a file is the function of a frame. A module from elsewhere may
    # fuse several locations; the last one that has a scope gives it.
    if isinstance(location, ir.CallSiteLoc):
        scope = _walk_location(location.callee, scope, frames)
        _walk_location(location.caller, scope, frames)
        return scope
    if isinstance(location, ir.NameLoc):
        child = location.child_loc
        if isinstance(child, ir.FileLineColLoc):
            frames.append(Frame(child.filename, child.start_line, location.name_str))
            return scope
        inner = _walk_location(child, scope, frames)
        return location.name_str or inner
    if isinstance(location, ir.FileLineColLoc):
        frames.append(Frame(location.filename, location.start_line, ""))
    elif isinstance(location, ir.FusedLoc):
        for part in location.locations:
            scope = _walk_location(part, scope, frames) or scope
    return scope


# ---------------------------------------------------------------------------------------------
# Attributes.


def entries_of(op: Any) -> tuple[tuple[str, Any], ...]:
    """An op's attributes; a complex constant, which the bindings have no class for, as text.

    Raises:
      FrontendError: another attribute that they have no class for.
    """
    try:
        return tuple([(name, op.attributes[name]) for name in op.attributes])
    except TypeError:
        text = op.get_asm(print_generic_op_form=True)
        match = re.search(r"(?s)<\{value = (dense<.*> : tensor<.*>)\}> : \(", text)
        if match is None:
            raise FrontendError(f"cannot read the attributes of {op.name}", op=text[:80]) from None
        return (("value", match[1]),)


def attribute(op_name: str, name: str, attr: Any) -> Attribute:
    """One MLIR attribute as plain data; None drops it."""
    if isinstance(attr, ir.DenseElementsAttr) and name == "value":
        return _dense(attr)
    if isinstance(attr, ir.BoolAttr):
        return bool(attr.value)
    if isinstance(attr, ir.IntegerAttr) and str(attr.type) == "i64":
        return int(attr.value)
    if isinstance(attr, ir.DenseBoolArrayAttr):
        return tuple(attr) or None  # an empty tuple would be emitted as one of integers
    if isinstance(attr, ir.DenseI64ArrayAttr):
        return tuple(attr)
    if isinstance(attr, ir.StringAttr):
        return str(attr.value)
    if (op_name, name) in _DIMS:
        return _dims(_DIMS[op_name, name], attr)
    if name == "padding" and isinstance(attr, ir.DenseIntElementsAttr):
        return tuple((int(low), int(high)) for low, high in np.asarray(attr)) or None
    if op_name == "sdy.sharding_constraint":
        return sharding_attr(attr)
    if name == "sdy.sharding_rule":  # its sizes are global ones; rules are ours
        return None
    text = str(attr)
    if name == "value" and text.startswith("dense"):
        return _dense(attr)
    return Opaque(text)


def composite_attribute(attr: Any) -> Attribute:
    """One attribute of a composite, as a Python value where there is a fitting type."""
    if isinstance(attr, ir.DenseElementsAttr):
        return _dense(attr)
    if isinstance(attr, ir.BoolAttr):
        return bool(attr.value)
    if isinstance(attr, ir.IntegerAttr):
        return int(attr.value)
    if isinstance(attr, ir.FloatAttr):
        return float(attr.value)
    if isinstance(attr, ir.StringAttr):
        return str(attr.value)
    if isinstance(attr, ir.ArrayAttr):
        return tuple(composite_attribute(part) for part in attr)
    return Opaque(str(attr))


def items_of(dictionary: Any) -> dict[str, Any]:
    """The entries of a dictionary attribute."""
    entries: Any = ir.DictAttr(dictionary)  # iterable, which its stub does not say
    return {entry.name: entry.attr for entry in entries}


def function_type(function: Any) -> tuple[list[Any], list[Any]]:
    """The types of a function's arguments and results, as the bindings have them."""
    type_ = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    return list(type_.inputs), list(type_.results)


def defining_op(value: Any) -> Any:
    """The op that makes a value; None for the argument of a block."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def integer_of(attr: Any) -> int:
    """An integer attribute."""
    return int(ir.IntegerAttr(attr).value)


def symbol_of(attr: Any) -> str:
    """The name of the function that an attribute names."""
    return str(ir.FlatSymbolRefAttr(attr).value)


def string_of(attr: Any) -> str:
    """A string attribute."""
    return str(ir.StringAttr(attr).value)


_NUMBERS: Mapping[type, tuple[Any, Sequence[str]]] = {
    ConvDims: (
        hlo.ConvDimensionNumbers,
        [f"{n}_dimension{'s' * n.endswith('spatial')}" for n in ConvDims._fields],
    ),
    DotDims: (hlo.DotDimensionNumbers, DIM_NUMBERS[DotDims][1]),
    GatherDims: (hlo.GatherDimensionNumbers, GatherDims._fields),
    ScatterDims: (
        hlo.ScatterDimensionNumbers,
        [n.replace("scatter_dims", "scattered_dims") for n in ScatterDims._fields],
    ),
}
"""Attributes that say which dim is what -> their class in the bindings, and its fields."""

_DIMS: Mapping[tuple[str, str], type] = {
    ("stablehlo.convolution", "dimension_numbers"): ConvDims,
    ("stablehlo.dot_general", "dot_dimension_numbers"): DotDims,
    ("stablehlo.dynamic_conv", "dimension_numbers"): ConvDims,
    ("stablehlo.dynamic_gather", "dimension_numbers"): GatherDims,
    ("stablehlo.gather", "dimension_numbers"): GatherDims,
    ("stablehlo.scatter", "scatter_dimension_numbers"): ScatterDims,
}
"""(op, attribute) -> what it is as data."""


def _dims(kind: type, attr: Any) -> Attribute:
    numbers, names = _NUMBERS[kind]
    fields = [getattr(numbers(attr), name) for name in names]
    return kind(*(field if isinstance(field, int) else tuple(field) for field in fields))


# ---------------------------------------------------------------------------------------------
# Meshes, shardings, collectives.


def sharding_attr(attr: Any) -> ShardingAttr:
    """An `sdy.sharding` of one value as plain data."""
    dims, is_open = [], []
    for item in sdy.TensorShardingAttr(attr).dimension_shardings:
        dim = sdy.DimensionShardingAttr(item)
        axes = []
        for ref in map(sdy.AxisRefAttr, dim.axes):
            info = ref.sub_axis_info
            sub = sdy.SubAxisInfoAttr(info) if info is not None else None
            axes.append((ref.name, sub.pre_size if sub else 1, sub.size if sub else 0))
        dims.append(tuple(axes))
        is_open.append(not dim.is_closed)
    return ShardingAttr(tuple(dims), tuple(is_open))


def shardings_of(attr: Any) -> list[Any]:
    """The shardings of several values."""
    return list(sdy.TensorShardingPerValueAttr(attr).shardings)


def mesh_of_sharding(attr: Any) -> Any:
    """The mesh of an `sdy.sharding`: a symbol, or the mesh itself."""
    return sdy.TensorShardingAttr(attr).mesh_or_ref


def mesh_axes(attr: Any) -> tuple[tuple[str, int], ...]:
    """The axes of an `sdy.mesh` with their sizes."""
    axes = (sdy.MeshAxisAttr(x) for x in sdy.MeshAttr(attr).axes)
    return tuple((axis.name, axis.size) for axis in axes)


def partitions_of(module: ir.Module) -> int:
    """The number of devices that a module says it is for."""
    found = module.operation.attributes
    names = ("mhlo.num_partitions", "mhlo.num_replicas")
    return math.prod(integer_of(found[name]) for name in names if name in found)


def exchange_of(op: Any) -> Exchange:
    """A collective's groups, dims and channel, as data."""
    attrs = op.attributes
    permutes = op.name == "stablehlo.collective_permute"
    stated = attrs["source_target_pairs" if permutes else "replica_groups"]
    is_dense = isinstance(stated, ir.DenseIntElementsAttr)
    rows = np.asarray(stated).tolist() if is_dense else []
    channel = str(attrs["channel_handle"]) if "channel_handle" in attrs else ""
    number = re.search(r"handle = (\d+)", channel)
    return Exchange(
        op.name,
        {name: integer_of(attrs[name]) for name in COLLECTIVE_DIMS if name in attrs},
        tuple(tuple(row) for row in rows),
        "" if is_dense else str(stated),
        int(number[1]) if number else 0,
        "use_global_device_ids" in attrs,
    )
