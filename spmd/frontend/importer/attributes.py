"""Turns MLIR's types, constants, attributes and locations into plain data; finds and copies ops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.errors import FrontendError
from spmd.ir.program import Frame
from spmd.ir.text import element_bytes
from spmd.ir.types import (
    DIM_NUMBERS,
    Attribute,
    ConvDims,
    Dense,
    DotDims,
    GatherDims,
    Opaque,
    ScatterDims,
    TensorType,
    numpy_dtype,
)

MARKS = ("sdy.sharding", "mhlo.sharding")
"""Attributes that say how an op's results, an argument or a result are split."""


def tensor_type(type_: Any) -> TensorType:
    """Reads a type of the bindings or text; FrontendError unless a static tensor or a token."""
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
            fix="give the sizes of symbolic dims, as in compile_stablehlo(..., symbols={'n': 8}), "
            "or export it with static shapes",
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
    """Reads a constant of a dtype that the bindings don't convert (bf16, fp8, int4, complex)."""
    match = re.fullmatch(r"(?s)dense<(.*)> : (tensor<.*>)", text)
    if match is None:
        raise FrontendError(f"cannot read the constant {text[:60]}")
    type_ = tensor_type(match[2])
    if match[1].startswith('"0x'):
        raw = bytes.fromhex(match[1][3:-1])
    else:
        part = numpy_dtype(re.sub(r"complex<(.*)>", r"\1", type_.dtype))
        raw = b"".join(
            [element_bytes(word, part) for word in re.findall(r"[^\s,()\[\]]+", match[1])]
        )
    elements = np.frombuffer(raw, numpy_dtype(type_.dtype))
    if elements.size == 1:
        return Dense.of(np.broadcast_to(elements.reshape(()), type_.shape), type_.dtype)
    return Dense.of(elements.reshape(type_.shape), type_.dtype)


def location_of(location: Any) -> tuple[str, list[Frame]]:
    """Returns the outermost scope name and the frames, innermost first, of an MLIR location."""
    # jax writes "jit(f)/sin"(callsite("f"("a.py":3) at "<module>"("a.py":9))): a name around call
    # sites is a scope, a name around a file is the function of a frame. A module from elsewhere may
    # fuse several locations; the last one that has a scope gives it.
    frames: list[Frame] = []

    def walk(location: Any, scope: str) -> str:
        if isinstance(location, ir.CallSiteLoc):
            scope = walk(location.callee, scope)
            walk(location.caller, scope)
        elif isinstance(location, ir.NameLoc):
            child = location.child_loc
            if isinstance(child, ir.FileLineColLoc):
                frames.append(Frame(child.filename, child.start_line, location.name_str))
                return scope
            inner = walk(child, scope)
            return location.name_str or inner
        elif isinstance(location, ir.FileLineColLoc):
            frames.append(Frame(location.filename, location.start_line, ""))
        elif isinstance(location, ir.FusedLoc):
            for part in location.locations:
                scope = walk(part, scope) or scope
        return scope

    return walk(location, ""), frames


def entries_of(op: Any) -> tuple[tuple[str, Any], ...]:
    """Returns an op's attributes; complex constants, which the bindings have no class for, as text.

    FrontendError for another attribute that they have no class for.
    """
    try:
        return tuple([(name, op.attributes[name]) for name in op.attributes])
    except TypeError:
        text = op.get_asm(print_generic_op_form=True)
        match = re.search(r"(?s)<\{value = (dense<.*> : tensor<.*>)\}> : \(", text)
        if match is None:
            raise FrontendError(f"cannot read the attributes of {op.name}", op=text[:80]) from None
        return (("value", match[1]),)


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


def attribute(name: str, attr: Any) -> Attribute:
    """Turns an MLIR attribute into plain data; None for one that programs don't keep."""
    if isinstance(attr, str):  # a constant, from `entries_of`
        return _dense_from_text(attr)
    if isinstance(attr, ir.DenseElementsAttr) and name == "value":
        return _dense(attr)
    if isinstance(attr, ir.BoolAttr | ir.StringAttr):
        return attr.value
    if isinstance(attr, ir.IntegerAttr) and str(attr.type) == "i64":
        return attr.value
    if isinstance(attr, ir.DenseBoolArrayAttr):
        return tuple(attr) or None  # an empty tuple would be emitted as one of integers
    if isinstance(attr, ir.DenseI64ArrayAttr):
        return tuple(attr)
    for kind, (numbers, fields) in _NUMBERS.items():
        if numbers.isinstance(attr):
            values = [getattr(numbers(attr), field) for field in fields]
            return kind(*(value if isinstance(value, int) else tuple(value) for value in values))
    if name == "padding" and isinstance(attr, ir.DenseIntElementsAttr):
        return tuple((int(low), int(high)) for low, high in np.asarray(attr)) or None
    if name in (*MARKS, "sdy.sharding_rule"):  # marks become ops, and rules are ours
        return None
    text = str(attr)
    if name == "value" and text.startswith("dense"):
        return _dense(attr)
    return Opaque(text)


def composite_attribute(attr: Any) -> Attribute:
    """One attribute of a composite, as a Python value where there is a fitting type."""
    if isinstance(attr, ir.DenseElementsAttr):
        return _dense(attr)
    if isinstance(attr, ir.BoolAttr | ir.IntegerAttr | ir.FloatAttr | ir.StringAttr):
        return attr.value
    if isinstance(attr, ir.ArrayAttr):
        return tuple(composite_attribute(part) for part in attr)
    return Opaque(str(attr))


def items_of(dictionary: Any) -> dict[str, Any]:
    """The entries of a dictionary attribute."""
    return {entry.name: entry.attr for entry in dictionary}


def function_type(function: Any) -> tuple[list[Any], list[Any]]:
    """The types of a function's arguments and results, as the bindings have them."""
    type_ = function.attributes["function_type"].value
    return list(type_.inputs), list(type_.results)


def defining_op(value: Any) -> Any:
    """The op that makes a value; None for the argument of a block."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def ops_in(root: Any) -> list[Any]:
    """Returns an op and all ops inside it as a list, so that they may be replaced meanwhile."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


def cloned(op: Any, values: dict[Any, Any]) -> Any:
    """Copies an op to the insertion point, operands mapped by `values`, which gets its results."""
    copy = op.clone().operation
    for inner in ops_in(copy):
        for i, value in enumerate(inner.operands):
            if value in values:
                inner.operands[i] = values[value]
    values.update(zip(op.results, copy.results, strict=True))
    return copy
