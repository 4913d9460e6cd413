"""StableHLO module -> `Program`. One of the places where MLIR bindings are touched.

Function calls and composites that nobody registered are inlined on the way in, so that later
stages see one function. Scalar bodies (of reduce, scatter, sort, ...) become hashable attributes;
`while`, `case` and `if` keep their regions. MLIR uniques types, attributes and locations, so each
distinct one is converted once.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, sdy
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.errors import FrontendError, SpmdError
from spmd.frontend.bytecode import MAGIC, bytecode_to_text
from spmd.frontend.import_manual import (
    BY_USER,
    COLLECTIVE_DIMS,
    Exchange,
    Scope,
    collective,
    manual_axes,
    says_nothing,
    scope_of,
)
from spmd.frontend.unsupported import refuse
from spmd.ir.builder import identity_element
from spmd.ir.control_flow import ALONE, FROM_MANUAL, MANUAL, TO_MANUAL
from spmd.ir.legality import COLLECTIVES, DEVICE_IDS
from spmd.ir.program import Body, Frame, Loc, Op, OpKind, Program, Region, body_reducer, walk_region
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

_CONTROL_FLOW = {"stablehlo.while", "stablehlo.case", "stablehlo.if"}
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|->|[(){}\[\]<>]')
DEEPEST = 1000
"""How many brackets of a module's text may be open at once."""
DEEPEST_REGIONS = 64
"""How many loops and branches may be inside each other."""
DEEPEST_CALLS = 100
"""How many functions may call each other in turn."""
MOST_OPS = 250_000
"""How many ops a program may have with its calls inlined."""
_NEUTRAL_OPERAND = {"stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.pad"}
_RETURNS = {"func.return", "stablehlo.return", "sdy.return"}
_TUPLES = {"stablehlo.tuple", "stablehlo.get_tuple_element"}
_WHOLE_COMPOSITES = {
    f"chlo.{name}"
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "cosh", "digamma", "erf",
        "erf_inv", "erfc", "lgamma", "next_after", "polygamma", "sinh", "square", "tan", "top_k",
        "zeta",
    )
}  # fmt: skip
"""CHLO ops that an exported module carries as composites of the same name."""
NO_COMPOSITES: Mapping[str, Mapping[str, Attribute]] = MappingProxyType({})


class Imported(NamedTuple):
    """A program, and what its module says about shardings.

    Attributes:
      program: the function `main`.
      arg_marks, result_marks: `sdy.sharding` of each argument and result, or None.
      meshes: the distinct meshes of the module, as ((axis, size), ...).
    """

    program: Program
    arg_marks: tuple[ShardingAttr | None, ...]
    result_marks: tuple[ShardingAttr | None, ...]
    meshes: tuple[tuple[tuple[str, int], ...], ...]


def import_module(
    module: ir.Module,
    arg_names: Sequence[str] = (),
    composites: Mapping[str, Mapping[str, Attribute]] = NO_COMPOSITES,
) -> Imported:
    """Imports the public function `main` (or the only function) of a module.

    Args:
      module: a StableHLO module in memory.
      arg_names: names for the arguments; `arg0`, `arg1`, ... when left out.
      composites: those that stay whole -> attributes that they get besides their own, which have
        `with.` in front of their names. All others are inlined.

    Raises:
      FrontendError: a dynamic shape, a recursive call, or something that is not StableHLO.
    """
    with module.context, _malformed():
        return _Importer(module, composites).run(arg_names)


def parse_module(source: Any) -> ir.Module:
    """A module in memory from itself, its text or bytecode, or the path of a file with either.

    Raises:
      FrontendError: no such file, or something that MLIR cannot read.
    """
    if isinstance(source, ir.Module):
        return source
    if isinstance(source, os.PathLike) or (isinstance(source, str) and "\n" not in source):
        source = _read_file(Path(source))
    try:
        if not isinstance(source, str):
            data = bytes(source)
            source = bytecode_to_text(data) if data.startswith(MAGIC) else data.decode()
        _check_depth(source)
        _check_strings(source)
        with mlir.make_ir_context():
            return ir.Module.parse(source)
    except (ir.MLIRError, ValueError, TypeError) as error:
        raise FrontendError(
            "the module cannot be read",
            op=_line_of(error, source),
            actual=str(error).strip().replace("\n", " ")[:400],
            required="StableHLO text, bytecode or portable artifact, without quantized types",
        ) from error


def _line_of(error: Exception, source: Any) -> str | None:
    """The line of a module's text that MLIR complains about."""
    found = re.search(r'error: "-":(\d+):', str(error))
    if found is None or not isinstance(source, str):
        return None
    lines = source.split("\n", int(found[1]))
    return lines[int(found[1]) - 1].strip()[:200] if len(lines) >= int(found[1]) else None


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        known = isinstance(error, FileNotFoundError)
        raise FrontendError(
            f"no file {path}" if known else f"the file {str(path)[:200]} cannot be read",
            actual=None if known else str(error)[:200],
            fix="give a path, or the module itself",
        ) from error


def dialect_ops() -> tuple[str, ...]:
    """Names of every op of StableHLO and CHLO that the installed jaxlib knows, sorted."""
    found = set()
    for dialect in (hlo, chlo):
        for item in vars(dialect).values():
            name = getattr(item, "OPERATION_NAME", None)
            if isinstance(name, str) and name.startswith(("stablehlo.", "chlo.")):
                found.add(name)
    return tuple(sorted(found))


def signature(module: ir.Module) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """Types of the arguments and results of a module's function."""
    with module.context, _malformed():
        main = _Importer(module).main()
        type_ = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        return tuple(map(_tensor_type, type_.inputs)), tuple(map(_tensor_type, type_.results))


def boundary_names(module: ir.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the arguments and results of a module's function, as paths: `params/w`.

    A module says so in its arguments' locations and its results' attributes, if at all: where it
    does not, or not for all of them differently, they are `arg0`, `arg1`, ... and `result0`, ...
    """
    with module.context, _malformed():
        importer = _Importer(module)
        main = importer.main()
        block = main.regions[0].blocks[0]
        args = []
        for arg in block.arguments:
            frames: list[Frame] = []
            args.append(_path(_walk_location(arg.location, "", frames)))
        type_ = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        _, results = importer.marks(main, "res_attrs", len(type_.results))
        return _unique("arg", args), _unique("result", [_path(name) for name in results])


_PATH_PART = re.compile(r"""\[\s*['"]?(.*?)['"]?\s*\]|([^\[\].]+)""")


def _path(name: str) -> str:
    """A pytree path as jax prints it, `params['w'][0].mu`, as names joined by slashes."""
    return "/".join(a or b for a, b in _PATH_PART.findall(name))


def _unique(what: str, names: list[str]) -> tuple[str, ...]:
    if all(names) and len(set(names)) == len(names):
        return tuple(names)
    return tuple(f"{what}{i}" for i in range(len(names)))


def _check_depth(text: str) -> None:
    """MLIR's parser calls itself for each bracket inside another and has no limit of its own."""
    if text.count("(") + text.count("{") + text.count("[") + text.count("<") <= DEEPEST:
        return
    depth = 0
    for part in _BRACKETS.finditer(text):
        depth += 1 if part[0] in "({[<" else -1 if part[0] in ")}]>" else 0
        if depth > DEEPEST:
            raise FrontendError(
                f"the module nests more than {DEEPEST} brackets",
                source=f"line {text.count(chr(10), 0, part.start()) + 1} of the module",
            )


def _check_strings(text: str) -> None:
    """MLIR aborts the process when it has to complain about a name that is not UTF-8.

    Raises:
      UnicodeDecodeError: a string with such escapes.
    """
    if re.search(r"\\[89a-fA-F][0-9a-fA-F]", text) is None:
        return
    for part in _BRACKETS.finditer(text):
        if part[0].startswith('"') and "\\" in part[0]:
            escape = rb"\\([0-9a-fA-F]{2})"
            re.sub(
                escape, lambda found: bytes.fromhex(found[1].decode()), part[0].encode()
            ).decode()


@contextlib.contextmanager
def _malformed() -> Iterator[None]:
    """What the bindings make of attributes that have no sense, as errors of ours."""
    try:
        yield
    except SpmdError:
        raise
    except RecursionError as error:
        raise FrontendError("the module nests regions or calls too deeply") from error
    except (
        ir.MLIRError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError,
        RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise FrontendError(
            "the module is malformed",
            actual=f"{type(error).__name__}: {error}".strip()[:400],
            fix="export it again; if it is as its framework wrote it, please report this",
        ) from error


class _Importer:
    def __init__(
        self,
        module: ir.Module,
        composites: Mapping[str, Mapping[str, Attribute]] = NO_COMPOSITES,
    ) -> None:
        self.composites = composites
        self.functions: dict[str, Any] = {}
        self.meshes: dict[str, tuple[tuple[str, int], ...]] = {}
        for item in module.body.operations:
            op = item.operation
            if op.name == "func.func":
                self.functions[ir.StringAttr(op.attributes["sym_name"]).value] = op
            elif op.name == "sdy.mesh":
                axes = _mesh_axes(op.attributes["mesh"])
                self.meshes[ir.StringAttr(op.attributes["sym_name"]).value] = axes
        self.types: list[TensorType] = []
        self.type_cache: dict[Any, TensorType] = {}
        self.attr_cache: dict[Any, Attribute] = {}
        self.loc_cache: dict[Any, Loc] = {}
        self.kind_cache: dict[Any, OpKind] = {}
        self.calls: list[str] = []
        self.count = 0
        self.depth = 0
        self.call_loc = Loc()
        self.constants: dict[int, Dense] = {}
        self.tuples: dict[Any, tuple[int, ...]] = {}
        self.scopes: list[Scope] = []
        self.in_bodies = 0
        self.partitions = _partitions(module)

    def main(self) -> Any:
        """The function to compile."""
        main = self.functions.get("main")
        if main is None and len(self.functions) == 1:
            main = next(iter(self.functions.values()))
        if main is None or not main.regions[0].blocks:
            raise FrontendError(
                "the module has no function to compile",
                actual=f"functions: {', '.join(self.functions) or 'none'}",
                required="a public function `main`, or exactly one function",
            )
        return main

    def run(self, arg_names: Sequence[str]) -> Imported:
        main = self.main()
        block = main.regions[0].blocks[0]
        env: dict[Any, int] = {}
        args = [self.bind(env, arg) for arg in block.arguments]
        ops, results = self.block(block, env)
        name = ir.StringAttr(main.attributes["sym_name"]).value
        arg_marks, _ = self.marks(main, "arg_attrs", len(args))
        result_marks, result_names = self.marks(main, "res_attrs", len(results))
        program = Program(
            name,
            tuple(self.types),
            Region(tuple(args), tuple(ops), tuple(results)),
            tuple(arg_names) or tuple(f"arg{i}" for i in range(len(args))),
            result_names,
        )
        meshes = tuple(dict.fromkeys(self.meshes.values()))
        return Imported(program, arg_marks, result_marks, meshes)

    def marks(
        self, func: Any, attr: str, count: int
    ) -> tuple[tuple[ShardingAttr | None, ...], tuple[str, ...]]:
        found: list[ShardingAttr | None] = [None] * count
        names = [f"result{i}" for i in range(count)]
        if attr in func.attributes:
            for i, item in enumerate(ir.ArrayAttr(func.attributes[attr])):
                dictionary: Any = ir.DictAttr(item)
                entries = {e.name: e.attr for e in dictionary}
                if "sdy.sharding" in entries:
                    found[i] = sharding_attr(entries["sdy.sharding"])
                if "jax.result_info" in entries:
                    info = ir.StringAttr(entries["jax.result_info"]).value
                    names[i] = re.sub(r"^result", "", info) or "result"
        return tuple(found), tuple(names)

    # Values, types, locations.

    def bind(self, env: dict[Any, int], value: Any) -> int:
        self.types.append(self.type(value.type))
        number = len(self.types) - 1
        env[value] = number
        return number

    def type(self, type_: Any) -> TensorType:
        found = self.type_cache.get(type_)
        if found is None:
            found = self.type_cache[type_] = _tensor_type(type_)
        return found

    def loc(self, location: Any) -> Loc:
        """The location as data; inside an inlined call, the caller's scope and stack are kept."""
        # Locations compare equal by identity in MLIR but hash by their Python wrapper; the
        # attribute behind one hashes properly.
        key = (location.attr, id(self.call_loc))
        found = self.loc_cache.get(key)
        if found is None:
            frames: list[Frame] = []
            scope = _walk_location(location, "", frames)
            outer = self.call_loc
            if scope.partition("/")[0] != outer.scope.partition("/")[0]:
                scope = "/".join(filter(None, (outer.scope, scope)))
            frames += [frame for frame in outer.frames if frame not in frames]
            found = self.loc_cache[key] = Loc(scope, tuple(frames))
        return found

    # Ops.

    def block(self, block: Any, env: dict[Any, int]) -> tuple[list[Op], tuple[int, ...]]:
        """Imports the ops of a block; returns them and the values that it returns."""
        ops: list[Op] = []
        for item in block.operations:
            op = item.operation
            name = op.name
            self.count += 1
            if self.count > MOST_OPS:
                raise FrontendError(
                    f"the module has more than {MOST_OPS} ops with its calls inlined",
                    fix="keep repeated parts in a loop",
                )
            if name in _RETURNS:
                return ops, tuple(env[v] for v in op.operands)
            if name in _TUPLES:
                self.fold_tuple(op, name, env)
            elif name == "stablehlo.composite" and _composite_name(op) in _WHOLE_COMPOSITES:
                ops.append(self.op(op, _composite_name(op), env))
            elif name == "stablehlo.composite" and _composite_name(op) in self.composites:
                ops.append(self.op(op, name, env))
            elif name in ("func.call", "stablehlo.composite"):
                self.inline(op, env, ops)
            elif name in COLLECTIVES:
                self.collective(op, env, ops)
            elif name == "sdy.named_computation":
                self.named(op, env, ops)
            elif name == "sdy.sharding_constraint" and self.is_idle(op):
                env[op.results[0]] = env[op.operands[0]]
            else:
                is_manual = name == "sdy.manual_computation"
                made = self.manual(op, env) if is_manual else self.op(op, name, env)
                if not _does_nothing(made):
                    ops.append(made)
        raise FrontendError("a block of the module has no terminator")

    def inline(self, op: Any, env: dict[Any, int], ops: list[Op]) -> None:
        attr = "callee" if op.name == "func.call" else "decomposition"
        callee = ir.FlatSymbolRefAttr(op.attributes[attr]).value
        function = self.functions.get(callee)
        if callee in self.calls or function is None or not function.regions[0].blocks:
            problem = "calls itself" if callee in self.calls else "has no body in the module"
            source = self.loc(op.location).source
            raise FrontendError(f"function @{callee} {problem}", source=source)
        if len(self.calls) >= DEEPEST_CALLS:
            raise FrontendError(f"functions call each other more than {DEEPEST_CALLS} deep")
        outer = self.call_loc
        self.call_loc = self.loc(op.location)
        self.calls.append(callee)
        block = function.regions[0].blocks[0]
        inner = {a: env[v] for a, v in zip(block.arguments, op.operands, strict=True)}
        inner_ops, results = self.block(block, inner)
        self.calls.pop()
        self.call_loc = outer
        ops.extend(inner_ops)
        env.update(zip(op.results, results, strict=True))

    def fold_tuple(self, op: Any, name: str, env: dict[Any, int]) -> None:
        """A tuple is the values that it was made of; taking one out gives that value."""
        if name == "stablehlo.tuple" and all(v in env for v in op.operands):
            self.tuples[op.results[0]] = tuple(env[v] for v in op.operands)
            return
        source = self.tuples.get(op.operands[0]) if name != "stablehlo.tuple" else None
        if source is None:
            raise FrontendError(
                f"{name} of tuples that the module does not make itself",
                source=self.loc(op.location).source,
                fix="pass the elements one by one, without nesting",
            )
        env[op.results[0]] = source[ir.IntegerAttr(op.attributes["index"]).value]

    def op(self, op: Any, name: str, env: dict[Any, int]) -> Op:
        loc = self.loc(op.location)
        if not (name in DEVICE_IDS and self.scopes):
            refuse(_refusal_name(op, name), loc)
        results = list(op.results)
        try:
            inputs = tuple([env[v] for v in op.operands])
        except KeyError as error:
            raise FrontendError(f"{name} reads a value that is not visible") from error
        kind = self.kind(op, name, inputs, results, loc)
        if name in _NEUTRAL_OPERAND:
            kind = self.note_neutral(kind, inputs)
        regions: tuple[Region, ...] = ()
        if name in _CONTROL_FLOW:
            regions = tuple(self.region(region, env) for region in op.regions)
        start = len(self.types)
        self.types.extend(kind.results)
        outs = tuple(range(start, len(self.types)))
        env.update(zip(results, outs, strict=True))
        if name == "stablehlo.constant" and kind.attrs["value"].splat:
            self.constants[outs[0]] = kind.attrs["value"]
        elif inputs and inputs[0] in self.constants and _is_wrapped_scalar(kind):
            self.constants[outs[0]] = self.constants[inputs[0]]
        return Op(kind, inputs, outs, regions, loc)

    def note_neutral(self, kind: OpKind, inputs: tuple[int, ...]) -> OpKind:
        """Records whether the init or padding operands are the constants that change nothing."""
        count = 1 if kind.name == "stablehlo.pad" else len(inputs) // 2
        reducer = kind.attrs.get("reducer", "add")
        neutral = bool(reducer) and all(
            value in self.constants
            and self.constants[value].array() == identity_element(reducer, self.types[value].dtype)
            for value in inputs[-count:]
        )
        attrs = {**kind.attrs, "spmd.neutral": neutral}
        return OpKind(kind.name, kind.operands, kind.results, attrs)

    def kind(
        self, op: Any, name: str, inputs: tuple[int, ...], results: list[Any], loc: Loc
    ) -> OpKind:
        entries = _entries(op) if len(op.attributes) else ()
        has_body = name not in _CONTROL_FLOW and len(op.regions) > 0
        types = self.types
        operands = tuple([types[v] for v in inputs])
        key = (
            name,
            tuple([id(t) for t in operands]),  # types are made once (see `type`)
            tuple([r.type for r in results]),
            entries,
            is_alone := name == "stablehlo.custom_call" and self.is_alone(),
        )
        if not has_body and (found := self.kind_cache.get(key)) is not None:
            return found
        attrs = {n: self.attribute(name, n, a) for n, a in entries}
        if name == "sdy.sharding_constraint":
            name = "spmd.mark"
        if is_alone:
            attrs[ALONE] = True
        if name == "stablehlo.composite":
            attrs = self.whole_composite(op)
        elif op.name == "stablehlo.composite":
            attrs = self.composite_attributes(op)
        if "called_computations" in attrs:
            attrs |= self.called_body(op, attrs)
        if has_body:
            attrs |= self.bodies(op, name)
        attrs = {n: a for n, a in attrs.items() if a is not None}
        try:
            kind = OpKind(
                name,
                operands,
                tuple([self.type(v.type) for v in results]),
                attrs,
            )
        except FrontendError as error:
            raise FrontendError(error.what, op=name, source=loc.source) from error
        if not has_body:
            self.kind_cache[key] = kind
        return kind

    def note_inline_mesh(self, attr: Any) -> None:
        """A sharding may spell its mesh out instead of naming one of the module's."""
        mesh = sdy.TensorShardingAttr(attr).mesh_or_ref
        if str(mesh).startswith("#sdy.mesh"):
            self.meshes[str(mesh)] = _mesh_axes(mesh)

    def attribute(self, op_name: str, name: str, attr: Any) -> Attribute:
        key = (name, attr)
        if key not in self.attr_cache:
            if op_name == "sdy.sharding_constraint":
                self.note_inline_mesh(attr)
            self.attr_cache[key] = _attribute(op_name, name, attr)
        return self.attr_cache[key]

    def region(self, region: Any, env: dict[Any, int]) -> Region:
        if self.depth >= DEEPEST_REGIONS:
            raise FrontendError(f"loops and branches nest more than {DEEPEST_REGIONS} deep")
        self.depth += 1
        block = region.blocks[0]
        inner = dict(env)
        args = tuple(self.bind(inner, arg) for arg in block.arguments)
        ops, results = self.block(block, inner)
        self.depth -= 1
        return Region(args, tuple(ops), results)

    def composite_attributes(self, op: Any) -> dict[str, Attribute]:
        """The attributes of the op that a composite stands for."""
        if "composite_attributes" not in op.attributes:
            return {}
        dictionary: Any = ir.DictAttr(op.attributes["composite_attributes"])
        return {e.name: self.attribute(op.name, e.name, e.attr) for e in dictionary}

    def whole_composite(self, op: Any) -> dict[str, Attribute]:
        """The attributes of a composite that stays whole: without the function that it names."""
        name = _composite_name(op)
        attrs: dict[str, Attribute] = {"name": name, **self.composites[name]}
        if "composite_attributes" in op.attributes:
            dictionary: Any = ir.DictAttr(op.attributes["composite_attributes"])
            for entry in dictionary:
                attrs[f"with.{entry.name}"] = _composite_attribute(entry.attr)
        return attrs

    def called_body(self, op: Any, attrs: dict[str, Attribute]) -> dict[str, Attribute]:
        """The one scalar function that a custom call names, as a `Body`."""
        names = [ir.FlatSymbolRefAttr(a).value for a in op.attributes["called_computations"]]
        function = self.functions.get(names[0]) if len(names) == 1 else None
        if function is None:
            return {}
        return {"called_computations": None, "body": self.body(function.regions[0], op.name)}

    # Manual regions.

    def manual(self, op: Any, env: dict[Any, int]) -> Op:
        """`sdy.manual_computation`: operands and results cross at ops inside of the region."""
        ins, outs = (_per_value(op.attributes[n]) for n in ("in_shardings", "out_shardings"))
        outer = self.scopes[-1] if self.scopes else None
        mesh = self.mesh_of([*ins, *outs]) or (outer.mesh if outer else Mesh(None, (), ()))
        scope = scope_of(manual_axes(str(op.attributes["manual_axes"])), mesh, outer)
        loc, block = self.loc(op.location), op.regions[0].blocks[0]
        ops: list[Op] = []
        inner: dict[Any, int] = {}
        for arg, value, attr in zip(block.arguments, op.operands, ins, strict=True):
            fixed, rest = scope.split(sharding_attr(attr))
            attrs = {"axes": scope.held, "dims": fixed}
            inner[arg] = self.add(ops, TO_MANUAL, env[value], self.type(arg.type), attrs, loc)
            if rest is not None:
                inner[arg] = self.mark(ops, inner[arg], rest, loc)
        self.scopes.append(scope)
        body, results = self.block(block, inner)
        self.scopes.pop()
        ops += body
        returned = []
        for result, value, attr in zip(op.results, results, outs, strict=True):
            fixed, rest = scope.split(sharding_attr(attr))
            marked = value if rest is None else self.mark(ops, value, rest, loc)
            attrs = {"axes": scope.held, "dims": fixed}
            returned.append(self.add(ops, FROM_MANUAL, marked, self.type(result.type), attrs, loc))
        found = tuple([self.bind(env, result) for result in op.results])
        kind = OpKind(MANUAL, (), tuple(self.types[v] for v in found), {"axes": scope.axes})
        return Op(kind, (), found, (Region((), tuple(ops), tuple(returned)),), loc)

    def named(self, op: Any, env: dict[Any, int], ops: list[Op]) -> None:
        """`sdy.named_computation` is what is inside, between the marks that it states."""
        loc, block = self.loc(op.location), op.regions[0].blocks[0]
        inner = {
            arg: self.mark_stated(ops, env[value], op, "in_shardings", i, loc)
            for i, (arg, value) in enumerate(zip(block.arguments, op.operands, strict=True))
        }
        body, results = self.block(block, inner)
        ops += body
        for i, (result, value) in enumerate(zip(op.results, results, strict=True)):
            env[result] = self.mark_stated(ops, value, op, "out_shardings", i, loc)

    def mark_stated(
        self, ops: list[Op], value: int, op: Any, name: str, index: int, loc: Loc
    ) -> int:
        if name not in op.attributes:
            return value
        attr = _per_value(op.attributes[name])[index]
        sharding = sharding_attr(attr)
        if says_nothing(sharding):
            return value
        self.note_inline_mesh(attr)
        return self.mark(ops, value, sharding, loc)

    def mark(self, ops: list[Op], value: int, sharding: ShardingAttr, loc: Loc) -> int:
        return self.add(ops, "spmd.mark", value, self.types[value], {"sharding": sharding}, loc)

    def add(
        self,
        ops: list[Op],
        name: str,
        operand: int,
        type_: TensorType,
        attrs: dict[str, Attribute],
        loc: Loc,
    ) -> int:
        """Appends an op of one operand and one result."""
        self.types.append(type_)
        result = len(self.types) - 1
        kind = OpKind(name, (self.types[operand],), (type_,), attrs)
        ops.append(Op(kind, (operand,), (result,), (), loc))
        return result

    def is_alone(self) -> bool:
        """Whether no axis is free here."""
        return bool(self.scopes) and self.scopes[-1].is_whole

    def is_idle(self, op: Any) -> bool:
        """Whether a constraint says nothing: jax puts them on all that is manual in part."""
        where = self.in_bodies or self.scopes
        return bool(where) and says_nothing(sharding_attr(op.attributes["sharding"]))

    def mesh_of(self, shardings: Sequence[Any]) -> Mesh | None:
        """The mesh that the first of some shardings names."""
        for attr in shardings:
            self.note_inline_mesh(attr)
        if shardings:
            name = str(sdy.TensorShardingAttr(shardings[0]).mesh_or_ref)
            return _as_mesh(self.meshes.get(name) or self.meshes[name.lstrip("@").strip('"')])
        return _as_mesh(next(iter(self.meshes.values()))) if len(self.meshes) == 1 else None

    def collective(self, op: Any, env: dict[Any, int], ops: list[Op]) -> None:
        """A collective of a manual region: one op for each of its operands."""
        loc = self.loc(op.location)
        scope = self.scopes[-1] if self.scopes else None
        meshes = {name: _as_mesh(axes) for name, axes in self.meshes.items()}
        attrs = collective(_exchange(op), scope, meshes, loc, self.partitions)
        if attrs is None:
            env.update((r, env[v]) for r, v in zip(op.results, op.operands, strict=True))
            return
        if len(op.regions):
            attrs |= self.bodies(op, op.name)
        loc = loc._replace(note=BY_USER)
        for result, value in zip(op.results, op.operands, strict=True):
            env[result] = self.add(ops, op.name, env[value], self.type(result.type), attrs, loc)

    def bodies(self, op: Any, name: str) -> dict[str, Attribute]:
        """The regions of an op as `Body` attributes, and `reducer` when it is a known one."""
        names = (
            ("select", "scatter") if name == "stablehlo.select_and_scatter" else ("body", "body1")
        )
        attrs: dict[str, Attribute] = {}
        for attr_name, region in zip(names, op.regions, strict=False):
            body = self.body(region, name)
            attrs[attr_name] = body
            if attr_name in ("body", "scatter"):
                attrs["reducer"] = body_reducer(body)
        return attrs

    def body(self, region: Any, name: str) -> Body:
        outer = self.types, self.constants  # values are numbered anew
        self.types, self.constants = [], {}
        self.in_bodies += 1
        try:
            block = region.blocks[0]
            env: dict[Any, int] = {}
            args = tuple(self.bind(env, arg) for arg in block.arguments)
            constants = self.constants_from_outside(block, env)
            ops, results = self.block(block, env)
            plain = tuple(op._replace(loc=Loc()) for op in (*constants, *ops))
            return Body(tuple(self.types), Region(args, plain, results))
        except KeyError as error:
            raise FrontendError(f"the body of {name} reads a value from outside it") from error
        finally:
            self.types, self.constants = outer
            self.in_bodies -= 1

    def constants_from_outside(self, block: Any, env: dict[Any, int]) -> list[Op]:
        """Constants that a body reads from around it, as MLIR's folding leaves them."""
        ops: list[Op] = []
        for item in block.operations:
            for value in item.operation.operands:
                if value in env or isinstance(value.owner, ir.Block):
                    continue
                owner = value.owner.operation
                if owner.block != block and owner.name == "stablehlo.constant":
                    ops.append(self.op(owner, owner.name, env))
        return ops


def _is_wrapped_scalar(kind: OpKind) -> bool:
    """A broadcast from scalar to scalar: so jax writes initial values of windows."""
    return kind.name == "stablehlo.broadcast_in_dim" and kind.results[0].rank == 0


def _does_nothing(op: Op) -> bool:
    """Control flow that gives no results; only custom calls could have an effect besides."""
    inner = (inner for region in op.regions for inner in walk_region(region))
    return (
        bool(op.regions)
        and not op.results
        and all(i.name != "stablehlo.custom_call" for i in inner)
    )


def _composite_name(op: Any) -> str:
    """The name of a composite: the op that it stands for."""
    return str(ir.StringAttr(op.attributes["name"]).value)


def _composite_attribute(attr: Any) -> Attribute:
    """One attribute of a composite's own, as what Python has for it where there is such."""
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
        return tuple(_composite_attribute(part) for part in attr)
    return Opaque(str(attr))


def _refusal_name(op: Any, name: str) -> str:
    """What `unsupported.REFUSED` calls an op."""
    if name != "stablehlo.custom_call":
        return name
    return f"custom_call:{ir.StringAttr(op.attributes['call_target_name']).value}"


def _entries(op: Any) -> tuple[tuple[str, Any], ...]:
    """An op's attributes; as text those that the bindings have no class for: complex constants."""
    try:
        return tuple([(name, op.attributes[name]) for name in op.attributes])
    except TypeError:
        text = op.get_asm(print_generic_op_form=True)
        match = re.search(r"(?s)<\{value = (dense<.*> : tensor<.*>)\}> : \(", text)
        if match is None:
            raise FrontendError(f"cannot read the attributes of {op.name}", op=text[:80]) from None
        return (("value", match[1]),)


def _walk_location(location: Any, scope: str, frames: list[Frame]) -> str:
    """Collects frames innermost first; returns the outermost scope name."""
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


def _tensor_type(type_: Any) -> TensorType:
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


def _attribute(op_name: str, name: str, attr: Any) -> Attribute:
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
    if name == "dot_dimension_numbers":
        d = hlo.DotDimensionNumbers(attr)
        return DotDims(
            tuple(d.lhs_batching_dimensions),
            tuple(d.rhs_batching_dimensions),
            tuple(d.lhs_contracting_dimensions),
            tuple(d.rhs_contracting_dimensions),
        )
    if name == "dimension_numbers" and op_name in ("stablehlo.gather", "stablehlo.dynamic_gather"):
        g = hlo.GatherDimensionNumbers(attr)
        return GatherDims(
            tuple(g.offset_dims),
            tuple(g.collapsed_slice_dims),
            tuple(g.operand_batching_dims),
            tuple(g.start_indices_batching_dims),
            tuple(g.start_index_map),
            g.index_vector_dim,
        )
    if name == "dimension_numbers" and op_name in (
        "stablehlo.convolution",
        "stablehlo.dynamic_conv",
    ):
        return _conv_dims(attr)
    if name == "padding" and isinstance(attr, ir.DenseIntElementsAttr):
        return tuple((int(low), int(high)) for low, high in np.asarray(attr)) or None
    if name == "scatter_dimension_numbers":
        s = hlo.ScatterDimensionNumbers(attr)
        return ScatterDims(
            tuple(s.update_window_dims),
            tuple(s.inserted_window_dims),
            tuple(s.input_batching_dims),
            tuple(s.scatter_indices_batching_dims),
            tuple(s.scattered_dims_to_operand_dims),
            s.index_vector_dim,
        )
    if op_name == "sdy.sharding_constraint":
        return sharding_attr(attr)
    if name == "sdy.sharding_rule":  # its sizes are global ones; rules are ours
        return None
    text = str(attr)
    if name == "value" and text.startswith("dense"):
        return _dense(attr)
    return Opaque(text)


def _exchange(op: Any) -> Exchange:
    """What a collective says of who exchanges what."""
    attrs = op.attributes
    permutes = op.name == "stablehlo.collective_permute"
    stated = attrs["source_target_pairs" if permutes else "replica_groups"]
    rows: list[list[int]] = []
    is_dense = isinstance(stated, ir.DenseIntElementsAttr)
    if is_dense:
        rows = np.asarray(stated).tolist()
    channel = str(attrs["channel_handle"]) if "channel_handle" in attrs else ""
    number = re.search(r"handle = (\d+)", channel)
    return Exchange(
        op.name,
        {name: int(ir.IntegerAttr(attrs[name]).value) for name in COLLECTIVE_DIMS if name in attrs},
        tuple(tuple(row) for row in rows),
        "" if is_dense else str(stated),
        int(number[1]) if number else 0,
        "use_global_device_ids" in attrs,
    )


def _per_value(attr: Any) -> list[Any]:
    """The shardings of several values."""
    return list(sdy.TensorShardingPerValueAttr(attr).shardings)


def _as_mesh(axes: Sequence[tuple[str, int]]) -> Mesh:
    return Mesh(None, [size for _, size in axes], [name for name, _ in axes])


def _partitions(module: ir.Module) -> int:
    """For how many devices a module says that it is."""
    found = module.operation.attributes
    count = 1
    for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
        if name in found:
            count *= int(ir.IntegerAttr(found[name]).value)
    return count


def _mesh_axes(attr: Any) -> tuple[tuple[str, int], ...]:
    axes = (sdy.MeshAxisAttr(x) for x in sdy.MeshAttr(attr).axes)
    return tuple((axis.name, axis.size) for axis in axes)


def _conv_dims(attr: Any) -> ConvDims:
    dims = hlo.ConvDimensionNumbers(attr)
    return ConvDims(
        dims.input_batch_dimension,
        dims.input_feature_dimension,
        tuple(dims.input_spatial_dimensions),
        dims.kernel_input_feature_dimension,
        dims.kernel_output_feature_dimension,
        tuple(dims.kernel_spatial_dimensions),
        dims.output_batch_dimension,
        dims.output_feature_dimension,
        tuple(dims.output_spatial_dimensions),
    )


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


def _dense(attr: Any) -> Dense:
    try:
        type_ = _tensor_type(attr.type)
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
    type_ = _tensor_type(match[2])
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
