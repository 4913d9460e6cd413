"""Reads StableHLO modules and imports them as `Program`s: the entry points of the importer.

Function calls, and composites without a registered rule, are inlined on the way in, so that later
stages see one function. Scalar bodies (of reduce, scatter, sort, ...) become hashable attributes;
`while`, `case` and `if` keep their regions. MLIR uniques types, attributes and locations, so each
distinct one is converted once.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from spmd.errors import FrontendError, SpmdError
from spmd.frontend.bytecode import MAGIC, bytecode_to_text
from spmd.frontend.importer import contents
from spmd.frontend.importer.handlers import CHLO_COMPOSITES, HANDLERS
from spmd.frontend.importer.ops import Importer
from spmd.ir.program import Callback, Program
from spmd.ir.types import Attribute, ShardingAttr, TensorType
from spmd.mesh.mesh import Mesh

DEEPEST = 1000  # how many brackets of a module's text may be open at once
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|->|[(){}\[\]<>]')
_NONE: Mapping[str, Mapping[str, Attribute]] = MappingProxyType({})


class Imported(NamedTuple):
    """Holds an imported program, and the module's mark, or None, of each argument and result."""

    program: Program
    arg_marks: tuple[ShardingAttr | None, ...]
    result_marks: tuple[ShardingAttr | None, ...]


def import_module(
    module: ir.Module,
    arg_names: Sequence[str] = (),
    composites: Mapping[str, Mapping[str, Attribute]] = _NONE,
    function: tuple[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
    mesh: Mesh | None = None,
) -> Imported:
    """Imports the public function `main` (or the only function) of a module.

    Arguments are called `arg_names`; `arg0`, `arg1`, ... when left out. `composites` maps the name
    of each composite that stays one op to attributes to add to its own; the names of its own get
    the prefix `with.`. Those of `CHLO_COMPOSITES` become CHLO ops, all others are inlined.
    `function` is the file and qualified name of the function that was traced: ops' stacks end
    there. `callbacks` are the Python functions that the module calls, by number. `mesh` is the mesh
    to compile for, else the module's first; marks and regions over others are put in its axes.

    Raises:
      UnsupportedOpError: an op in `REFUSED`, or a collective or sizes that are not supported.
      FrontendError: a dynamic shape, a recursive call, or something that is not StableHLO.
      MeshError: a mesh of the module whose axes are not made of axes of `mesh`.
      SpecError: an argument or result is partial, or a mark splits over axes that are manual.
    """
    with module.context, malformed():
        inside = contents.Contents(module, mesh)
        inside.check_calls({*composites, *CHLO_COMPOSITES})
        main = inside.main()
        importer = Importer(inside, HANDLERS, function, composites, len(callbacks))
        body = importer.region(main.regions[0].blocks[0], {})
        program = Program(
            main.attributes["sym_name"].value,
            tuple(importer.b.types),
            body,
            tuple(arg_names) or tuple(f"arg{i}" for i in range(len(body.args))),
            contents.result_names(main),
            tuple(callbacks),
        )
        sides = "argument", "result"
        return Imported(program, *(inside.boundary_marks(main, side, True) for side in sides))


def parse_module(source: Any) -> ir.Module:
    """Reads a module from text, bytecode or a path, or takes a module; FrontendError if invalid."""
    if isinstance(source, ir.Module):
        return _with_shardings(source)
    if isinstance(source, os.PathLike) or (isinstance(source, str) and "\n" not in source):
        path = Path(source)
        try:
            source = path.read_bytes()
        except (OSError, ValueError) as error:
            known = isinstance(error, FileNotFoundError)
            raise FrontendError(
                f"no file {path}" if known else f"the file {str(path)[:200]} cannot be read",
                actual=None if known else str(error)[:200],
                fix="give a path, or the module itself",
            ) from error
    try:
        if not isinstance(source, str):
            data = bytes(source)
            source = bytecode_to_text(data) if data.startswith(MAGIC) else data.decode()
        _check_text(source)
        with mlir.make_ir_context():
            return _with_shardings(ir.Module.parse(source))
    except (ir.MLIRError, ValueError, TypeError) as error:
        place = re.search(r'error: "-":(\d+):', str(error))
        number = int(place[1]) if place and isinstance(source, str) else None
        lines = [] if number is None else source.split("\n", number)
        line = lines[number - 1] if number is not None and len(lines) >= number else None
        raise FrontendError(
            "the module cannot be read",
            op=None if line is None else line.strip()[:200],
            actual=str(error).strip().replace("\n", " ")[:400],
            required="StableHLO text, bytecode or portable artifact, without quantized types",
        ) from error


def module_text(module: ir.Module, has_locations: bool = False) -> str:
    """Returns a module as text, without locations unless they are asked for."""
    return str(module.operation.get_asm(enable_debug_info=has_locations, assume_verified=True))


def signature(module: ir.Module) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """Returns the types of the arguments, and those of the results, of the function to compile."""
    with module.context, malformed():
        args, results = contents.function_type(contents.Contents(module).main())
        return tuple(map(contents.tensor_type, args)), tuple(map(contents.tensor_type, results))


def boundary_names(module: ir.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the arguments, and those of the results, as paths such as `params/w`.

    They come from the arguments' locations and the results' attributes. If an argument has no name
    or two share one, all are `arg0`, `arg1`, ...; likewise for results, `result0`, ...
    """
    arguments = argument_names(module)
    with module.context, malformed():
        results = map(contents.path_of, contents.result_names(contents.Contents(module).main()))
        return arguments, _unique("result", list(results))


def argument_names(module: ir.Module, start: int = 0) -> tuple[str, ...]:
    """Returns the names of the arguments from number `start` on, as `boundary_names` does."""
    with module.context, malformed():
        arguments = contents.Contents(module).main().regions[0].blocks[0].arguments
        paths = [contents.path_of(contents.location_of(arg.location)[0]) for arg in arguments]
        return _unique("arg", paths[start:])


def _with_shardings(module: ir.Module) -> ir.Module:
    """Returns the module with Shardy's attributes in place of strings that encode them."""
    # Modules that jax exported until 2025 hold shardings, and XLA's own dumps do, as strings in
    # `mhlo.frontend_attributes`. jaxlib has a pass that reads them, jax runs the same.
    attributes = module.operation.attributes
    name = "mhlo.frontend_attributes"
    if name not in attributes or "xla.sdy.meshes" not in ir.DictAttr(attributes[name]):
        return module
    with module.context:
        copy = ir.Module.parse(str(module.operation.get_asm(enable_debug_info=True)))
        PassManager.parse("builtin.module(xla-sdy-round-trip-import-shardy-attrs)").run(
            copy.operation
        )
    return copy


def _unique(what: str, names: list[str]) -> tuple[str, ...]:
    if all(names) and len(set(names)) == len(names):
        return tuple(names)
    return tuple(f"{what}{i}" for i in range(len(names)))


@contextlib.contextmanager
def malformed() -> Iterator[None]:
    """Converts errors that MLIR's bindings raise inside on malformed modules to FrontendErrors."""
    try:
        yield
    except SpmdError:
        raise
    except RecursionError as error:
        raise FrontendError("the module nests regions or calls too deeply") from error
    except Exception as error:
        raise FrontendError(
            "the module is malformed",
            actual=f"{type(error).__name__}: {error}".strip()[:400],
            fix="export it again; if it is as its framework wrote it, please report this",
        ) from error


def _check_text(text: str) -> None:
    """Raises FrontendError (nested too deep) or ValueError (not UTF-8) for what crashes MLIR."""
    # It calls itself for each bracket inside another and has no limit of its own.
    depth = 0
    is_deep = sum(map(text.count, "({[<")) > DEEPEST
    for part in _BRACKETS.finditer(text) if is_deep else ():
        depth += 1 if part[0] in "({[<" else -1 if part[0] in ")}]>" else 0
        if depth > DEEPEST:
            raise FrontendError(
                f"the module nests more than {DEEPEST} brackets",
                source=f"line {text.count(chr(10), 0, part.start()) + 1} of the module",
            )
    # It aborts when it has to complain about a name that is not UTF-8.
    has_escapes = re.search(r"\\[89a-fA-F][0-9a-fA-F]", text) is not None
    for part in _BRACKETS.finditer(text) if has_escapes else ():
        if part[0].startswith('"') and "\\" in part[0]:
            raw, escape = part[0].encode(), rb"\\([0-9a-fA-F]{2})"
            re.sub(escape, lambda found: bytes.fromhex(found[1].decode()), raw).decode()
