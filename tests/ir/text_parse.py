"""Reads the text form of a program that `spmd.ir.text` writes."""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from spmd.ir.dialect.reducers import REDUCER_OPS, reducer_body
from spmd.ir.program import Body, Loc, Op, OpKind, Program, Region, Value
from spmd.ir.text import NAME, STRUCTS, element_bytes
from spmd.ir.types import Attribute, Dense, Opaque, TensorType, numpy_dtype
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import parse_axes

_SPACE = re.compile(r"(?:\s|//[^\n]*)*")
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_TICKED = re.compile(r"`(?:[^`\\\n]|\\.)*`")
_NUMBER = re.compile(r"-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?!\w)", re.ASCII)
_VALUE = re.compile(r"%\d+", re.ASCII)
_TENSOR = re.compile(r"((?:\d+x)*)(.+)", re.ASCII)
_ELEMENTS = re.compile(r"[^:\n]*")

Found = TypeVar("Found")


def parse_program(text: str, mesh: Mesh | None = None) -> Program:
    """Reads what `format_program` writes; `spmd.ir.legality` checks what the program says.

    Args:
      text: one program.
      mesh: the mesh whose axes the text names, if it does.

    Raises:
      ValueError: text that is not a program, with its line.
    """
    return _Parser(text, mesh).program()


def without_locs(program: Program) -> Program:
    """The program as it is when read back from text: no op says where it comes from."""

    def bare(region: Region) -> Region:
        ops = (op._replace(regions=tuple(map(bare, op.regions)), loc=Loc()) for op in region.ops)
        return region._replace(ops=tuple(ops))

    return program._replace(body=bare(program.body))


class _Parser:
    def __init__(self, text: str, mesh: Mesh | None) -> None:
        self.text = text
        self.mesh = mesh
        self.at = 0
        self.types: dict[Value, TensorType] = {}

    # Words.

    def skip(self) -> None:
        self.at += len(_SPACE.match(self.text, self.at)[0])  # type: ignore[index]

    def peek(self, literal: str) -> bool:
        """Whether a literal comes next, not just as the start of a longer word."""
        self.skip()
        if not self.text.startswith(literal, self.at):
            return False
        following = self.text[self.at + len(literal) : self.at + len(literal) + 1]
        return not (literal[-1].isalnum() and (following.isalnum() or following in ("_", ".")))

    def take(self, literal: str) -> bool:
        found = self.peek(literal)
        self.at += len(literal) if found else 0
        return found

    def expect(self, *literals: str) -> None:
        for literal in literals:
            self.match(re.compile(re.escape(literal)))

    def match(self, pattern: re.Pattern[str]) -> str:
        self.skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            line = self.text.count("\n", 0, self.at) + 1
            rest = self.text[self.at :].partition("\n")[0]
            raise ValueError(f"line {line} has {rest!r} in place of {pattern.pattern}")
        self.at = found.end()
        return found[0]

    def inside(self, opening: str, closing: str) -> str:
        """The text up to the bracket that closes the one just taken; takes that too."""
        depth, start = 1, self.at
        while depth:
            found = self.text[self.at]
            depth += (found == opening) - (found == closing)
            self.at += 1
        return self.text[start : self.at - 1]

    def quoted(self, pattern: re.Pattern[str] = _QUOTED) -> str:
        """Takes a string with its marks; the text inside."""
        return str(json.loads(f'"{self.match(pattern)[1:-1]}"'))

    def name(self) -> str:
        return self.quoted() if self.peek('"') else self.match(NAME)

    def listed(self, read: Callable[[], Found], end: str) -> tuple[Found, ...]:
        found: list[Found] = []
        while not self.take(end):
            if found:
                self.expect(",")
            found.append(read())
        return tuple(found)

    # Structure.

    def program(self) -> Program:
        self.expect("program", "@")
        name = self.name()
        self.expect("(")
        args = self.listed(lambda: (self.argument(), self.quoted()), ")")
        self.expect("{")
        ops = self.ops()
        results: list[tuple[Value, str]] = []
        while not self.peek("}") and not self.peek("unused"):
            if results:
                self.expect(",")
            results.append((self.value(), self.quoted()))
        types = self.finish()
        body = Region(tuple(v for v, _ in args), ops, tuple(v for v, _ in results))
        return Program(name, types, body, tuple(n for _, n in args), tuple(n for _, n in results))

    def finish(self) -> tuple[TensorType, ...]:
        """The numbers left over, the closing bracket, and the types of all values."""
        while self.take("unused"):
            values = self.values()
            self.expect(":")
            self.types.update(dict.fromkeys(values, self.type()))
        self.expect("}")
        return tuple(self.types[v] for v in range(len(self.types)))

    def ops(self) -> tuple[Op, ...]:
        found = []
        while not self.take("return"):
            found.append(self.op())
        return tuple(found)

    def op(self) -> Op:
        results: tuple[Value, ...] = ()
        if self.peek("%"):
            results = self.values()
            self.expect("=")
        name = self.name()
        operands = self.values()
        attrs = dict(self.listed(self.named_attribute, "}")) if self.take("{") else {}
        self.expect(":", "(")
        operand_types = self.listed(self.type, ")")
        self.expect("->")
        result_types = self.listed(self.type, ")") if self.take("(") else (self.type(),)
        regions = []
        if self.take("{"):
            while not self.take("}"):
                self.expect("region", "(")
                regions.append(self.block())
                self.expect("}")
        self.types.update(zip(results, result_types, strict=True))
        return Op(OpKind(name, operand_types, result_types, attrs), operands, results,
                  tuple(regions))  # fmt: skip

    def block(self) -> Region:
        args = self.listed(self.argument, ")")
        self.expect("{")
        return Region(args, self.ops(), self.values())

    # Values and types.

    def value(self) -> Value:
        return int(self.match(_VALUE)[1:])

    def values(self) -> tuple[Value, ...]:
        found: list[Value] = []
        while self.take(",") if found else self.peek("%"):
            found.append(self.value())
        return tuple(found)

    def argument(self) -> Value:
        value = self.value()
        self.expect(":")
        self.types[value] = self.type()
        return value

    def type(self) -> TensorType:
        if self.take("!stablehlo.token"):
            return TensorType((), "token")
        self.expect("tensor<")
        shape, dtype = _TENSOR.fullmatch(self.inside("<", ">")).groups()  # type: ignore[union-attr]
        return TensorType(tuple(int(n) for n in shape.split("x")[:-1]), dtype)

    # Attributes.

    def named_attribute(self) -> tuple[str, Attribute]:
        name = self.name()
        self.expect("=")
        return name, self.attribute()

    def attribute(self) -> Attribute:
        if self.peek('"'):
            return self.quoted()
        if self.peek("`"):
            return Opaque(self.quoted(_TICKED))
        if self.take("["):
            return self.listed(self.attribute, "]")
        if self.take("{"):
            assert self.mesh is not None, "axes can only be named where a mesh is given"
            return parse_axes(self.inside("{", "}"), self.mesh)
        if self.take("("):
            return self.body()
        if _NUMBER.match(self.text, self.at):
            text = self.match(_NUMBER)
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        word = self.match(_WORD)
        if word in ("true", "false"):
            return word == "true"
        if word == "dense":
            return self.dense()
        if word in REDUCER_OPS:
            self.expect("<")
            return reducer_body(word, self.inside("<", ">"))
        return self.struct(STRUCTS[word])

    def struct(self, cls: Any) -> Any:
        self.expect("(")
        fields = dict(self.listed(self.named_attribute, ")"))
        return cls(**{name: fields.get(name, ()) for name in cls._fields})

    def body(self) -> Body:
        outer, self.types = self.types, {}
        region = self.block()
        types = self.finish()
        self.types = outer
        return Body(types, region)

    def dense(self) -> Dense:
        self.expect("<")
        elements = self.match(_ELEMENTS).strip()
        self.expect(":")
        type_ = self.type()
        self.expect(">")
        word, _, digits = elements.partition(" ")
        if word in ("hex", "splat"):
            return Dense(type_, bytes.fromhex(digits), word == "splat")
        dtype, splat = numpy_dtype(type_.dtype), not elements.startswith("[")
        texts = re.findall(r"[^\s,\[\]]+", elements)
        return Dense(type_, b"".join([element_bytes(text, dtype) for text in texts]), splat)
