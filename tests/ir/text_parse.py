"""Reads the text form of a program that `spmd.ir.text` writes."""

from __future__ import annotations

import re
from typing import Any

from spmd.errors import SpecError
from spmd.ir.dialect.reducers import REDUCER_OPS, reducer_body
from spmd.ir.program import Body, Loc, Op, OpKind, Program, Region, Value
from spmd.ir.text import ATTR_NAME, OP_NAME, STRUCTS, SYMBOL
from spmd.ir.types import Attribute, Dense, Opaque, TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import parse_axes
from tests.ir.text_scan import TICKED, WORD, Scanner, parse_dense

_NUMBER = re.compile(r"-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?!\w)", re.ASCII)
_VALUE = re.compile(r"%\d+", re.ASCII)
_TENSOR = re.compile(r"tensor<")
_ELEMENTS = re.compile(r"[^:\n]*")


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


class _Parser(Scanner):
    def __init__(self, text: str, mesh: Mesh | None) -> None:
        super().__init__(text)
        self.mesh = mesh
        self.types: dict[Value, TensorType] = {}

    # Structure.

    def program(self) -> Program:
        self.expect("program")
        self.expect("@")
        name = self.name(SYMBOL, "the program's name")
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
        name = self.name(OP_NAME, "an op, or `return`")
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
            name = self.name(ATTR_NAME, "the name of an attribute")
            if name in attrs:
                self.fail(f"a single attribute {name} before this")
            self.expect("=")
            attrs[name] = self.attribute()
        return attrs

    def attribute(self) -> Attribute:
        if self.peek('"'):
            return self.quoted()
        if self.peek("`"):
            return Opaque(self.quoted(TICKED))
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
        word = self.match(WORD, "the value of an attribute")
        if word in ("true", "false"):
            return word == "true"
        if word == "dense" and self.take("<"):
            return self.dense()
        if word in REDUCER_OPS and self.take("<"):
            return reducer_body(word, self.until("<", ">"))
        if word in STRUCTS and self.take("("):
            return self.struct(STRUCTS[word])
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
            name = self.match(WORD, "the name of a field")
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
            return parse_dense(elements, type_)
        except (ValueError, OverflowError, KeyError):
            self.at = start
            self.fail(f"elements of {type_}")
