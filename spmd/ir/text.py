"""The text form of a program: an op a line, deterministic, and it reads back exactly.

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

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from spmd.errors import FrontendError, SpecError
from spmd.ir.builder import reducer_body
from spmd.ir.program import (
    REDUCER_OPS,
    Body,
    Loc,
    Op,
    OpKind,
    Program,
    Region,
    Value,
    body_reducer,
    walk_region,
)
from spmd.ir.types import (
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
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import format_axes, parse_axes

Annotate = Callable[[Value], str]

READABLE_ELEMENTS = 16
"""Constants of more elements are written as the hexadecimal digits of their bytes."""

_STRUCTS: dict[str, Any] = {
    "conv": ConvDims,
    "dot": DotDims,
    "gather": GatherDims,
    "scatter": ScatterDims,
    "sharding": ShardingAttr,
}
_STRUCT_NAMES = {cls: name for name, cls in _STRUCTS.items()}
_OP_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", re.ASCII)
_ATTR_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_][\w.$-]*", re.ASCII)


def format_program(
    program: Program,
    annotate: Annotate | None = None,
    mesh: Mesh | None = None,
    *,
    locs: bool = False,
) -> str:
    """A program as text.

    Args:
      program: of any stage.
      annotate: what to say about a value in a comment behind its definition.
      mesh: writes the `axes` of collectives as axis names instead of atoms.
      locs: whether to say behind each op which line of the user's code it comes from.

    Returns:
      Text that `parse_program` reads back, but for the ops' locations.
    """
    return "\n".join(_Printer(mesh, annotate, locs).program(program)) + "\n"


def format_op(op: Op, mesh: Mesh | None = None) -> str:
    """One op on one line; what is inside its regions and bodies is left out."""
    return _Printer(mesh, whole=False).head(op) + (" {...}" if op.regions else "")


def parse_program(text: str, mesh: Mesh | None = None) -> Program:
    """Reads what `format_program` writes.

    It checks the grammar alone; `spmd.ir.legality` checks what the program says.

    Args:
      text: one program.
      mesh: the mesh whose axes the text names, if it does.

    Raises:
      FrontendError: text that is not a program, with its line.
    """
    return _Parser(text, mesh).program()


def without_locs(program: Program) -> Program:
    """The program as it is when read back from text: no op says where it comes from."""

    def bare(region: Region) -> Region:
        ops = (op._replace(regions=tuple(map(bare, op.regions)), loc=Loc()) for op in region.ops)
        return region._replace(ops=tuple(ops))

    return program._replace(body=bare(program.body))


# ---------------------------------------------------------------------------------------------
# Writing.


class _Printer:
    def __init__(
        self,
        mesh: Mesh | None = None,
        annotate: Annotate | None = None,
        locs: bool = False,
        whole: bool = True,
    ) -> None:
        self.mesh = mesh
        self.annotate = annotate
        self.locs = locs
        self.whole = whole

    def program(self, program: Program) -> Iterator[str]:
        body, types = program.body, program.types
        yield f"program @{_name(program.name, _SYMBOL)}("
        for i, (v, name) in enumerate(zip(body.args, program.arg_names, strict=True)):
            comma = "," if i + 1 < len(body.args) else ""
            yield f"  %{v}: {types[v]} {_quote(name)}{comma}{self.comment((v,))}"
        yield ") {"
        yield from _indent(self.ops(body, types))
        yield "  return"
        for i, (v, name) in enumerate(zip(body.results, program.result_names, strict=True)):
            comma = "," if i + 1 < len(body.results) else ""
            yield f"    %{v} {_quote(name)}{comma}"
        yield from _indent(_unused(body, types))
        yield "}"

    def ops(self, region: Region, types: Sequence[TensorType]) -> Iterator[str]:
        for op in region.ops:
            yield from self.op(op, types)

    def op(self, op: Op, types: Sequence[TensorType]) -> Iterator[str]:
        *before, last = self.head(op).split("\n")
        yield from before
        opening = " {" if op.regions else ""
        yield last + opening + self.comment(op.results, op.loc)
        for region in op.regions:
            yield f"  region({_arguments(region, types)}) {{{self.comment(region.args)}"
            yield from _indent(self.ops(region, types), 2)
            yield f"    {_return(region)}"
            yield "  }"
        if op.regions:
            yield "}"

    def head(self, op: Op) -> str:
        """All of an op but its regions; a line, unless it has a body that is worth several."""
        kind = op.kind
        text = _values(op.results) + " = " if op.results else ""
        text += _name(kind.name, _OP_NAME)
        if op.operands:
            text += " " + _values(op.operands)
        if kind.attrs:
            attrs = (
                f"{_name(n, _ATTR_NAME)} = {self.attribute(n, a)}" for n, a in kind.attrs.items()
            )
            text += f" {{{', '.join(attrs)}}}"
        results = _types(kind.results)
        if len(kind.results) == 1:
            results = str(kind.results[0])
        return f"{text} : {_types(kind.operands)} -> {results}"

    def comment(self, values: Sequence[Value], loc: Loc = Loc()) -> str:  # noqa: B008 (frozen)
        """What is said behind a definition, two spaces and `//` included."""
        parts = [self.annotate(v) for v in values] if self.annotate else []
        text = ", ".join(part for part in parts if part)
        if self.locs and loc.source:
            text += f" @ {loc.source.rpartition('/')[2]}"
        if self.locs and loc.note:
            text += f": {loc.note}"
        return "  // " + " ".join(text.split()) if text else ""

    def attribute(self, name: str, value: Attribute) -> str:
        if name == "axes" and self.mesh is not None and (axes := self.axes(value)):
            return axes
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, str):
            return _quote(value)
        if isinstance(value, Opaque):
            return _quote(value.text, "`")
        if isinstance(value, Dense):
            return f"dense<{_elements(value)} : {value.type}>"
        if isinstance(value, Body):
            return self.body(value)
        if type(value) in _STRUCT_NAMES:
            fields = (
                f"{n} = {self.attribute(n, v)}" for n, v in value._asdict().items() if v != ()
            )
            return f"{_STRUCT_NAMES[type(value)]}({', '.join(fields)})"
        if type(value) is tuple:
            return "[" + ", ".join([self.attribute("", v) for v in value]) + "]"
        raise TypeError(f"attribute {name} = {value!r} has no text form")

    def axes(self, value: Attribute) -> str | None:
        """Atoms by the names of their axes; None where that would not read back."""
        assert self.mesh is not None
        try:
            text = format_axes(value, self.mesh)
            same = parse_axes(text[1:-1], self.mesh) == value
        except (IndexError, TypeError, SpecError):
            return None
        return text if same and not re.search(r"[{}\n]", text[1:-1]) else None

    def body(self, body: Body) -> str:
        reducer = body_reducer(body)
        if reducer and body == reducer_body(reducer, body.types[0].dtype):
            return f"{reducer}<{body.types[0].dtype}>"
        head = f"({_arguments(body.region, body.types)}) {{"
        if not self.whole:
            return head + "...}"
        lines = [
            *_Printer(self.mesh).ops(body.region, body.types),
            _return(body.region),
            *_unused(body.region, body.types),
        ]
        return "\n".join([head, *_indent(lines), "}"])


def _indent(lines: Iterable[str], levels: int = 1) -> Iterator[str]:
    return ("  " * levels + line for line in lines)


def _name(name: str, pattern: re.Pattern[str]) -> str:
    return name if pattern.fullmatch(name) else _quote(name)


def _values(values: Sequence[Value]) -> str:
    return ", ".join([f"%{v}" for v in values])


def _types(types: Sequence[TensorType]) -> str:
    return "(" + ", ".join(map(str, types)) + ")"


def _arguments(region: Region, types: Sequence[TensorType]) -> str:
    return ", ".join([f"%{v}: {types[v]}" for v in region.args])


def _return(region: Region) -> str:
    return f"return {_values(region.results)}".rstrip()


def _unused(region: Region, types: Sequence[TensorType]) -> Iterator[str]:
    """Numbers that rewrites left over: they have a type and no definition."""
    defined = set(region.args)
    for op in walk_region(region):
        defined.update(op.results, *(inner.args for inner in op.regions))
    left: dict[TensorType, list[Value]] = {}
    for value, type_ in enumerate(types):
        if value not in defined:
            left.setdefault(type_, []).append(value)
    return (f"unused {_values(values)} : {type_}" for type_, values in left.items())


_ESCAPES = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", '"': '\\"', "`": "\\`"}
_UNESCAPES = {escape: char for char, escape in _ESCAPES.items()}


def _quote(text: str, mark: str = '"') -> str:
    """Text between quotation marks, on one line whatever it contains."""

    def escape(char: str) -> str:
        if char in ("\\", mark) or not char.isprintable():
            return _ESCAPES.get(char) or f"\\u{{{ord(char):x}}}"
        return char

    return mark + "".join(map(escape, text)) + mark


def _unquote(quoted: str) -> str:
    def char(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else _UNESCAPES[match[0]]

    return re.sub(r"\\u\{([0-9a-f]+)\}|\\.", char, quoted[1:-1])


def _elements(dense: Dense) -> str:
    """The elements of a constant; whatever would not read back bit by bit is hexadecimal."""
    try:
        dtype = numpy_dtype(dense.type.dtype)
    except KeyError:
        return f"splat {dense.data.hex()}" if dense.splat else f"hex {dense.data.hex()}"
    size = dtype.itemsize
    whole = len(dense.data) == (1 if dense.splat else dense.type.size) * size
    if whole and dense.splat:
        return _element(dense.data, dtype)
    if whole and dense.type.size <= READABLE_ELEMENTS:
        texts = [_element(dense.data[i : i + size], dtype) for i in range(0, len(dense.data), size)]
        return _nested(texts, dense.type.shape or (1,))
    return f"splat {dense.data.hex()}" if dense.splat else f"hex {dense.data.hex()}"


def _nested(texts: Sequence[str], shape: Sequence[int]) -> str:
    if not shape:
        return texts[0]
    if not texts:
        return "[]"
    piece = len(texts) // shape[0]
    rows = [_nested(texts[i * piece :][:piece], shape[1:]) for i in range(shape[0])]
    return "[" + ", ".join(rows) + "]"


def _element(raw: bytes, dtype: np.dtype[Any]) -> str:
    scalar = np.frombuffer(raw, dtype)[0]
    text = str(scalar).lower() if dtype == np.bool_ else str(scalar)
    try:
        same = _element_bytes(text, dtype) == raw
    except (ValueError, OverflowError):
        same = False
    return text if same else "0x" + raw[::-1].hex()


def _element_bytes(text: str, dtype: np.dtype[Any]) -> bytes:
    if text.startswith("0x"):
        return bytes.fromhex(text[2:])[::-1]
    number: Any
    if dtype == np.bool_:
        number = {"true": True, "false": False}.get(text)
        if number is None:
            raise ValueError(f"{text!r} is neither true nor false")
    elif dtype.kind == "c":
        number = complex(text)
    else:
        number = int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    with np.errstate(all="ignore"):
        return np.asarray([number]).astype(dtype).tobytes()


# ---------------------------------------------------------------------------------------------
# Reading.

_SPACE = re.compile(r"(?:\s|//[^\n]*)*")
_NUMBER = re.compile(r"-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?!\w)", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_VALUE = re.compile(r"%\d+", re.ASCII)
_TENSOR = re.compile(r"tensor<")
_ELEMENTS = re.compile(r"[^:\n]*")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_TICKED = re.compile(r"`(?:[^`\\\n]|\\.)*`")


class _Parser:
    def __init__(self, text: str, mesh: Mesh | None) -> None:
        self.text = text
        self.mesh = mesh
        self.at = 0
        self.types: dict[Value, TensorType] = {}

    # Tokens.

    def fail(self, expected: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        rest = self.text[self.at :].partition("\n")[0]
        raise FrontendError(
            f"line {line} of the text is not a program: expected {expected}",
            actual=rest[:80] or "the end of the text",
        )

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def peek(self, literal: str) -> bool:
        self.skip()
        if not self.text.startswith(literal, self.at):
            return False
        following = self.text[self.at + len(literal) : self.at + len(literal) + 1]
        return not (literal[-1].isalnum() and (following.isalnum() or following in ("_", ".")))

    def take(self, literal: str) -> bool:
        found = self.peek(literal)
        if found:
            self.at += len(literal)
        return found

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            self.fail(f"`{literal}`")

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            self.fail(expected)
        self.at = match.end()
        return match[0]

    def until(self, opening: str, closing: str) -> str:
        """The text up to the bracket that closes the one just taken; takes that too."""
        depth, start = 1, self.at
        for found in re.compile(f"[{opening}{closing}\n]").finditer(self.text, start):
            depth += {opening: 1, closing: -1}.get(found[0], 0)
            if found[0] == "\n":
                break
            if depth == 0:
                self.at = found.end()
                return self.text[start : found.start()]
        self.fail(f"text that ends in `{closing}`")

    def quoted(self, pattern: re.Pattern[str] = _QUOTED) -> str:
        start = self.at
        raw = self.match(pattern, "a string")
        try:
            return _unquote(raw)
        except (KeyError, ValueError, OverflowError):
            self.at = start
            self.fail("a string with escapes that exist")

    def name(self, pattern: re.Pattern[str], expected: str) -> str:
        return self.quoted() if self.peek('"') else self.match(pattern, expected)

    # Structure.

    def program(self) -> Program:
        self.expect("program")
        self.expect("@")
        name = self.name(_SYMBOL, "the program's name")
        self.expect("(")
        args, arg_names = self.named(")", typed=True)
        self.expect(")")
        self.expect("{")
        ops = self.ops()
        self.expect("return")
        results, result_names = self.named("}", typed=False)
        types = self.finish()
        self.skip()
        if self.at < len(self.text):
            self.fail("the end of the text")
        return Program(name, types, Region(args, ops, results), arg_names, result_names)

    def named(self, end: str, typed: bool) -> tuple[tuple[Value, ...], tuple[str, ...]]:
        values: list[Value] = []
        names: list[str] = []
        while not self.peek(end) and not self.peek("unused"):
            if values and not self.take(","):
                self.fail(f"`,` or `{end}`")
            values.append(self.argument() if typed else self.value())
            names.append(self.quoted())
        return tuple(values), tuple(names)

    def finish(self) -> tuple[TensorType, ...]:
        """The numbers left over, the closing bracket, and the types of all values."""
        while self.take("unused"):
            values = self.values()
            self.expect(":")
            type_ = self.type()
            for value in values:
                self.define(value, type_)
        self.expect("}")
        missing = next((v for v in range(len(self.types)) if v not in self.types), None)
        if missing is not None:
            self.fail(f"a definition of %{missing} before this, values being numbered from 0")
        return tuple(self.types[v] for v in range(len(self.types)))

    def ops(self) -> tuple[Op, ...]:
        found = []
        while not self.peek("return"):
            found.append(self.op())
        return tuple(found)

    def op(self) -> Op:
        self.skip()
        start = self.at
        results: tuple[Value, ...] = ()
        if self.peek("%"):
            results = self.values()
            self.expect("=")
        name = self.name(_OP_NAME, "an op, or `return`")
        operands = self.values()
        attrs = self.attributes() if self.take("{") else {}
        self.expect(":")
        operand_types = self.type_list()
        self.expect("->")
        result_types = self.type_list() if self.peek("(") else (self.type(),)
        if len(operand_types) != len(operands) or len(result_types) != len(results):
            self.fail(f"one type for each operand and result of {name} before this")
        regions = []
        if self.take("{"):
            while not self.take("}"):
                regions.append(self.region())
        for value, type_ in zip(results, result_types, strict=True):
            self.define(value, type_, start)
        return Op(OpKind(name, operand_types, result_types, attrs), operands, results,
                  tuple(regions))  # fmt: skip

    def region(self) -> Region:
        self.expect("region")
        self.expect("(")
        region = self.block()
        self.expect("}")
        return region

    def block(self) -> Region:
        """Arguments, ops and `return`, from behind `(` to before the closing bracket."""
        args: list[Value] = []
        while not self.take(")"):
            if args:
                self.expect(",")
            args.append(self.argument())
        self.expect("{")
        ops = self.ops()
        self.expect("return")
        return Region(tuple(args), ops, self.values())

    # Values and types.

    def value(self) -> Value:
        return int(self.match(_VALUE, "a value like %0")[1:])

    def values(self) -> tuple[Value, ...]:
        found: list[Value] = []
        while self.peek("%") or found:
            found.append(self.value())
            if not self.take(","):
                break
        return tuple(found)

    def argument(self) -> Value:
        value = self.value()
        self.expect(":")
        self.define(value, self.type())
        return value

    def define(self, value: Value, type_: TensorType, start: int | None = None) -> None:
        if value in self.types:
            self.at = self.at if start is None else start
            self.fail(f"a value without a definition, and %{value} has one")
        self.types[value] = type_

    def type(self) -> TensorType:
        if self.take("!stablehlo.token"):
            return TensorType((), "token")
        self.match(_TENSOR, "a type like tensor<2xf32>")
        match = re.fullmatch(r"((?:\d+x)*)(.+)", self.until("<", ">"), re.ASCII)
        if match is None:
            self.fail("an element type before this")
        return TensorType(tuple(int(n) for n in match[1].split("x")[:-1]), match[2])

    def type_list(self) -> tuple[TensorType, ...]:
        self.expect("(")
        found: list[TensorType] = []
        while not self.take(")"):
            if found:
                self.expect(",")
            found.append(self.type())
        return tuple(found)

    # Attributes.

    def attributes(self) -> dict[str, Attribute]:
        attrs: dict[str, Attribute] = {}
        while not self.take("}"):
            if attrs:
                self.expect(",")
            name = self.name(_ATTR_NAME, "the name of an attribute")
            if name in attrs:
                self.fail(f"a single attribute {name} before this")
            self.expect("=")
            attrs[name] = self.attribute()
        return attrs

    def attribute(self) -> Attribute:
        if self.peek('"'):
            return self.quoted()
        if self.peek("`"):
            return Opaque(self.quoted(_TICKED))
        if self.take("["):
            return self.items()
        if self.take("{"):
            return self.axes()
        if self.take("("):
            return self.body()
        if _NUMBER.match(self.text, self.at):
            text = self.match(_NUMBER, "a number")
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        start = self.at
        word = self.match(_WORD, "the value of an attribute")
        if word in ("true", "false"):
            return word == "true"
        if word == "dense" and self.take("<"):
            return self.dense()
        if word in REDUCER_OPS and self.take("<"):
            return reducer_body(word, self.until("<", ">"))
        if word in _STRUCTS and self.take("("):
            return self.struct(_STRUCTS[word])
        self.at = start
        self.fail("the value of an attribute")

    def items(self) -> tuple[Attribute, ...]:
        found: list[Attribute] = []
        while not self.take("]"):
            if found:
                self.expect(",")
            found.append(self.attribute())
        return tuple(found)

    def axes(self) -> tuple[int, ...]:
        start = self.at
        if self.mesh is None:
            self.fail("atoms like [0, 1]: axes can only be named where a mesh is given")
        try:
            return parse_axes(self.until("{", "}"), self.mesh)
        except SpecError as error:
            self.at = start
            self.fail(f"axes of the mesh ({error.what})")

    def struct(self, cls: Any) -> Any:
        fields: dict[str, Attribute] = {}
        while not self.take(")"):
            if fields:
                self.expect(",")
            name = self.match(_WORD, "the name of a field")
            if name not in cls._fields or name in fields:
                self.fail(f"one of the fields {', '.join(cls._fields)}, once, before this")
            self.expect("=")
            fields[name] = self.attribute()
        if "index_vector_dim" in cls._fields and "index_vector_dim" not in fields:
            self.fail("the field index_vector_dim before this")
        return cls(**{name: fields.get(name, ()) for name in cls._fields})

    def body(self) -> Body:
        outer, self.types = self.types, {}
        region = self.block()
        types = self.finish()
        self.types = outer
        return Body(types, region)

    def dense(self) -> Dense:
        start = self.at
        elements = self.match(_ELEMENTS, "elements").strip()
        self.expect(":")
        type_ = self.type()
        self.expect(">")
        try:
            return _dense(elements, type_)
        except (ValueError, OverflowError, KeyError):
            self.at = start
            self.fail(f"elements of {type_}")


def _dense(elements: str, type_: TensorType) -> Dense:
    word, _, digits = elements.partition(" ")
    if word in ("hex", "splat") or elements == "hex":
        return Dense(type_, bytes.fromhex(digits), word == "splat")
    dtype = numpy_dtype(type_.dtype)
    texts = re.findall(r"[^\s,\[\]]+", elements)
    splat = not elements.startswith("[")
    if len(texts) != (1 if splat else type_.size):
        raise ValueError("not as many elements as the type has")
    return Dense(type_, b"".join([_element_bytes(text, dtype) for text in texts]), splat)
