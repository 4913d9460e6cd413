"""Writes the text form of a program: an op a line, deterministic (tests parse it back).

    program @step(
      %0: tensor<4x8xf32> "params/w",
      %1: tensor<8xf32> "batch"
    ) {
      %2 = stablehlo.constant {value = dense<0.0 : tensor<f32>>} : () -> tensor<f32>
      %3 = stablehlo.reduce %0, %2 {body = add<f32>, dimensions = [1]} : (...) -> tensor<4xf32>
      return
        %3 "['loss']"
    }

Value numbers are kept, so that texts of one program at several stages can be laid side by side.
What follows `//` is for people and is not read back.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd.ir.dialect.reducers import body_reducer, reducer_body
from spmd.ir.program import Body, Op, Program, Region, Value, walk_region
from spmd.ir.types import (
    DIM_NUMBERS,
    Attribute,
    ConvDims,
    Dense,
    Opaque,
    ShardingAttr,
    TensorType,
    numpy_dtype,
    types_text,
)
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import format_axes

Annotate = Callable[[Value], str]

NAME = re.compile(r"[A-Za-z_][\w.$-]*", re.ASCII)
STRUCTS: dict[str, Any] = {"conv": ConvDims, "sharding": ShardingAttr}
STRUCTS |= {name: dims for dims, (name, _) in DIM_NUMBERS.items()}
"""Maps the word in front of a structured attribute's fields, `dot(...)`, to its class."""

_STRUCT_NAMES = {cls: name for name, cls in STRUCTS.items()}


def format_program(
    program: Program, annotate: Annotate | None = None, mesh: Mesh | None = None
) -> str:
    """Returns a program of any stage as text.

    `annotate` returns the comment behind a value's definition. With a `mesh` the atoms in `axes`
    are written as names of axes. Tests read the text back, but for comments and for constants
    above `LARGEST` bytes.
    """
    return "\n".join(_Printer(mesh, annotate).program(program)) + "\n"


def format_op(op: Op, mesh: Mesh | None = None) -> str:
    """Returns an op as one line of text, without what its regions and bodies contain."""
    text = _Printer(mesh).head(op) + (" {...}" if op.regions else "")
    return re.sub(r"\{\n.*?\n\}", "{...}", text, flags=re.DOTALL)


@dataclass
class _Printer:
    mesh: Mesh | None = None
    annotate: Annotate | None = None

    def program(self, program: Program) -> Iterator[str]:
        body, types = program.body, program.types
        yield f"program @{_name(program.name)}("
        for i, (v, name) in enumerate(zip(body.args, program.arg_names, strict=True)):
            comma = "," if i + 1 < len(body.args) else ""
            yield f"  %{v}: {types[v]} {json.dumps(name)}{comma}{self.comment((v,))}"
        yield ") {"
        yield from _indent(self.ops(body, types))
        yield "  return"
        for i, (v, name) in enumerate(zip(body.results, program.result_names, strict=True)):
            comma = "," if i + 1 < len(body.results) else ""
            yield f"    %{v} {json.dumps(name)}{comma}"
        yield from _indent(_unused(body, types))
        yield "}"

    def ops(self, region: Region, types: Sequence[TensorType]) -> Iterator[str]:
        for op in region.ops:
            *before, last = self.head(op).split("\n")
            yield from before
            opening = " {" if op.regions else ""
            yield last + opening + self.comment(op.results)
            for inner in op.regions:
                yield f"  region({_arguments(inner, types)}) {{{self.comment(inner.args)}"
                yield from _indent(self.ops(inner, types), 2)
                yield f"    {_return(inner)}"
                yield "  }"
            if op.regions:
                yield "}"

    def head(self, op: Op) -> str:
        """Returns an op's text without its regions: one line, more if it has an unnamed body."""
        kind = op.kind
        text = _values(op.results) + " = " if op.results else ""
        text += _name(kind.name)
        if op.operands:
            text += " " + _values(op.operands)
        if kind.attrs:
            attrs = (f"{_name(n)} = {self.attribute(n, a)}" for n, a in kind.attrs.items())
            text += f" {{{', '.join(attrs)}}}"
        results = str(kind.results[0]) if len(kind.results) == 1 else types_text(kind.results)
        return f"{text} : {types_text(kind.operands)} -> {results}"

    def comment(self, values: Sequence[Value]) -> str:
        text = ", ".join(filter(None, map(self.annotate, values))) if self.annotate else ""
        return "  // " + " ".join(text.split()) if text else ""

    def attribute(self, name: str, value: Attribute) -> str:
        if name == "axes" and self.mesh is not None:
            with suppress(IndexError, TypeError):  # of a program that is wrong
                return format_axes(value, self.mesh)
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, str):
            return json.dumps(value)
        if isinstance(value, Opaque):
            return "`" + json.dumps(value.text)[1:-1].replace("`", r"\u0060") + "`"
        if isinstance(value, Dense):
            return f"dense<{dense_text(value)} : {value.type}>"
        if isinstance(value, Body):
            return self.body(value)
        if type(value) in _STRUCT_NAMES:
            pairs = value._asdict().items()
            fields = (f"{n} = {self.attribute(n, v)}" for n, v in pairs if v != ())
            return f"{_STRUCT_NAMES[type(value)]}({', '.join(fields)})"
        if type(value) is tuple:
            return "[" + ", ".join([self.attribute("", v) for v in value]) + "]"
        raise TypeError(f"attribute {name} = {value!r} has no text form")

    def body(self, body: Body) -> str:
        reducer = body_reducer(body)
        if reducer and body == reducer_body(reducer, body.types[0].dtype):
            return f"{reducer}<{body.types[0].dtype}>"
        types, region = body
        ops = _Printer(self.mesh).ops(region, types)
        lines = _indent([*ops, _return(region), *_unused(region, types)])
        return "\n".join([f"({_arguments(region, types)}) {{", *lines, "}"])


def _indent(lines: Iterable[str], levels: int = 1) -> Iterator[str]:
    return ("  " * levels + line for line in lines)


def _name(name: str) -> str:
    return name if NAME.fullmatch(name) else json.dumps(name)


def _values(values: Sequence[Value]) -> str:
    return ", ".join([f"%{v}" for v in values])


def _arguments(region: Region, types: Sequence[TensorType]) -> str:
    return ", ".join([f"%{v}: {types[v]}" for v in region.args])


def _return(region: Region) -> str:
    return f"return {_values(region.results)}".rstrip()


def _unused(region: Region, types: Sequence[TensorType]) -> Iterator[str]:
    """Returns lines `unused %3, %7 : tensor<8xf32>` for value numbers that nothing defines."""
    inner = (r.args for op in walk_region(region) for r in op.regions)
    defined = set(region.args).union(*inner, *(op.results for op in walk_region(region)))
    left: dict[TensorType, list[Value]] = {}
    for value in sorted(set(range(len(types))) - defined):
        left.setdefault(types[value], []).append(value)
    return (f"unused {_values(values)} : {type_}" for type_, values in left.items())


READABLE_ELEMENTS = 16
"""Constants of more elements, if not all equal, are written as their bytes in hexadecimal."""

LARGEST = 1 << 16
"""Constants of more bytes are written as a SHA-256 digest, from which they cannot be read back."""


def dense_text(dense: Dense) -> str:
    """Returns a constant's elements as text: decimals where exact, hexadecimal, or a digest."""
    if len(dense.data) > LARGEST:
        return f"sha256 {hashlib.sha256(dense.data).hexdigest()}"
    raw = f"{'splat' if dense.splat else 'hex'} {dense.data.hex()}"
    if not dense.splat and dense.type.size > READABLE_ELEMENTS:
        return raw
    try:
        dtype = numpy_dtype(dense.type.dtype)
        texts = [str(x).lower() for x in np.frombuffer(dense.data, dtype)]
        if b"".join([element_bytes(text, dtype) for text in texts]) != dense.data:
            return raw
    except (KeyError, ValueError, OverflowError):
        return raw
    if dense.splat:
        return texts[0]
    shape = (dense.type.shape or (1,)) if texts else (0,)
    return str(np.array(texts, object).reshape(shape).tolist()).replace("'", "")


def element_bytes(text: str, dtype: np.dtype[Any]) -> bytes:
    """Returns an element's bytes from text: `1.5`, `true`, or `0x3f`, its bits as an integer."""
    if text.startswith("0x"):
        return int(text, 16).to_bytes(dtype.itemsize, "little")
    kind: Any = complex if dtype.kind == "c" else int if re.fullmatch(r"-?\d+", text) else float
    number = {"true": True, "false": False}[text] if dtype == np.bool_ else kind(text)
    with np.errstate(all="ignore"):
        return np.asarray([number]).astype(dtype).tobytes()
