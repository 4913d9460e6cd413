"""A module with dynamic shapes, and sizes for its arguments -> the same module, all static.

    func @main(%n: i32, %x: ?x4) { %1 = composite "f" %n, %x {@f} }       and n = 8, x 8x4
    func @main(%x: 8x4) { %1 = composite "f" %x {@f} : 8x4 }              with @f for 8x4, too

Shapes are computed by StableHLO's own passes, which jax runs too when it compiles what was exported
with symbolic dims. `jax.extend.mlir.refine_polymorphic_shapes` is the same in one call, but refuses
composites.
"""

from __future__ import annotations

import ast
import io
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo
from jaxlib.mlir.passmanager import PassManager

from spmd.errors import FrontendError
from spmd.frontend.importer.attributes import function_type, items_of, location_of, tensor_type
from spmd.frontend.importer.contents import Contents
from spmd.frontend.importer.module import malformed
from spmd.frontend.inlined import (
    calls_in,
    functions_of,
    is_static,
    ops_in,
    put_together,
    replace,
    take_apart,
)
from spmd.frontend.sizes import LONGEST, Dim, size_of
from spmd.ir.program import Loc

hlo.register_stablehlo_passes()

NO_SYMBOLS: Mapping[str, int] = MappingProxyType({})

SYMBOL = "jax.global_constant"
"""How jax names an argument that is the value of a symbol: it is in front of the others."""

DIM = "spmd.dim: "  # begins an attribute of a composite that is a symbolic dim: `spmd.dim: 2*n`

_PASSES = (
    "builtin.module(stablehlo-refine-arguments{{types={types}}},stablehlo-refine-shapes,"
    "func.func(stablehlo-canonicalize-dynamism,stablehlo-check-shape-assertions))"
)


_ASSERTION = "shape_assertion"
_SPECIFICATIONS = "polymorphic shapes specifications: "
_SHAPE = ".shape = ("

ArgumentDims = tuple[Dim | None, ...]
"""The size of each dim, as a number or an expression of symbols; None: the module says nothing."""


@malformed()
def is_dynamic(module: ir.Module) -> bool:
    """Whether a function of a module takes or gives dynamic dims, or takes a symbol's value."""
    with module.context:
        return any(
            _symbols(function) or not all(map(is_static, itertools.chain(*function_type(function))))
            for function in functions_of(module).values()
        )


@malformed()
def symbols_of(module: ir.Module) -> tuple[str, ...]:
    """The symbols whose values a module's function takes in front of its arguments."""
    with module.context:
        return tuple(_symbols(Contents(module).main()).values())


@malformed()
def refine(
    module: ir.Module, shapes: Sequence[Sequence[int]], symbols: Mapping[str, int] = NO_SYMBOLS
) -> ir.Module:
    """A module at static shapes of its arguments, without those that are a symbol's value.

    `symbols` has the values of symbols, for modules whose functions take such. The module returned
    has no dynamic shapes, shape assertions, or arguments for symbols. FrontendError for shapes or
    values that do not fit, or dims that depend on data.
    """
    with module.context, ir.Location.unknown():
        copy = _copied(module)
        main = Contents(copy).main()
        _bind(copy, _symbols(main), symbols)
        types = _types(main, shapes)
        taken = take_apart(copy, main)
        try:
            PassManager.parse(_PASSES.format(types=",".join(map(str, types)))).run(copy.operation)
        except ir.MLIRError as error:
            raise _refusal(error) from error
        put_together(copy, main, taken)
        PassManager.parse("builtin.module(symbol-dce)").run(copy.operation)
        _check_static(copy)
    return copy


def _copied(module: ir.Module) -> ir.Module:
    data = io.BytesIO()
    module.operation.write_bytecode(data)
    return ir.Module.parse(data.getvalue())


def _dims(type_: Any) -> tuple[int | None, ...]:
    if not isinstance(type_, ir.RankedTensorType):
        return tensor_type(type_).shape
    return tuple(
        None if type_.is_dynamic_dim(dim) else type_.get_dim_size(dim) for dim in range(type_.rank)
    )


# ---------------------------------------------------------------------------------------------
# What modules say of the dims of their arguments.


def exported_dims(exported: Any) -> list[ArgumentDims]:
    """The dims of the arguments of a `jax.export.Exported`."""
    shapes = [exported.in_avals[i].shape for i in exported.module_kept_var_idx]
    return [tuple(d if isinstance(d, int) else str(d) for d in shape) for shape in shapes]


def constraints_of(dim: Any) -> list[str]:
    """What `jax.export.symbolic_shape` was told of a dim's symbols: `n >= 2`, `mod(n, 8) == 0`."""
    # jax keeps constraints to itself. For one on a remainder it adds `8*floordiv(n, 8) == n`, which
    # nobody wrote.
    stated = [constraint.debug_str for constraint in dim.scope._explicit_constraints]
    return [text for text in stated if "*floordiv(" not in text]


@malformed()
def stated_dims(module: ir.Module) -> list[ArgumentDims]:
    """The dims of the arguments of a module, as far as it says something of them.

    A type has `?` for a dim that is not static. What `jax.export` writes checks the arguments'
    shapes, and names the symbols in the message of a failure:

        ... polymorphic shapes specifications: args[0].shape = (n, 4),args[2].shape = (2*n,). ...
    """
    dims: list[ArgumentDims]
    with module.context:
        main = Contents(module).main()
        types, own = function_type(main)[0], _symbols(main)
        dims = [_dims(type_) for i, type_ in enumerate(types) if i not in own]
    dynamic = [i for i, argument in enumerate(dims) if None in argument]
    specifications = _specifications(module)
    if len(specifications) == len(dynamic):  # it names the arguments with symbolic dims, in order
        for i, stated in zip(dynamic, specifications, strict=True):
            if len(stated) == len(dims[i]):
                dims[i] = stated
    return dims


def _specifications(module: ir.Module) -> list[ArgumentDims]:
    for message in _messages(module):
        _, found, text = message.partition(_SPECIFICATIONS)
        if found:
            stated = text.partition(". Obtained")[0].split(_SHAPE)[1:]
            return [_shape(_in_brackets(part)) for part in stated]
    return []


def _in_brackets(text: str) -> str:
    """What stands in front of the bracket that closes one in front of the text."""
    depth = 1
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:position]
    return text


def _messages(module: ir.Module) -> Sequence[str]:
    """What the assertions of a module's function say when they fail."""
    found: list[str] = []

    def visit(op: Any) -> Any:
        is_call = op.name == "stablehlo.custom_call"
        if is_call and op.attributes["call_target_name"].value == _ASSERTION:
            if "error_message" in op.attributes:
                found.append(op.attributes["error_message"].value)
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return found


def _shape(text: str) -> ArgumentDims:
    """`n, 2*m, 4` as dims; nothing where it is no shape."""
    try:
        if len(text) > LONGEST:
            return ()
        parts = ast.parse(f"({text.rstrip(',')},)".replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    if not isinstance(parts, ast.Tuple):
        return ()
    return tuple(
        part.value
        if isinstance(part, ast.Constant) and isinstance(part.value, int)
        else ast.unparse(part)
        for part in parts.elts
    )


# ---------------------------------------------------------------------------------------------
# Symbols that are arguments: they become constants, and no function takes them any more.


def _symbols(function: Any) -> dict[int, str]:
    """Position of an argument -> the symbol whose value it is."""
    if "arg_attrs" not in function.attributes:
        return {}
    stated = [items_of(item) for item in function.attributes["arg_attrs"]]
    return {i: str(attrs[SYMBOL].value) for i, attrs in enumerate(stated) if SYMBOL in attrs}


def _bind(module: ir.Module, own: Mapping[int, str], symbols: Mapping[str, int]) -> None:
    """Writes values in the place of arguments, where `main` takes them (`own`)."""
    missing = [name for name in own.values() if name not in symbols]
    if missing:
        raise FrontendError(
            f"the module has the symbolic dim {missing[0]}, which has no size",
            fix=f"give it: symbols={{{missing[0]!r}: 128}}",
        )
    if not own:  # `main` computes them from the shapes of its arguments, and the passes fold that
        return
    gone: dict[str, set[int]] = {}
    for name, function in functions_of(module).items():
        found = _symbols(function)
        if found:
            _drop_arguments(function, {i: symbols[symbol] for i, symbol in found.items()})
            gone[name] = set(found)
    for op, callee in list(calls_in(module.operation)):
        if op.name == "stablehlo.composite" and "composite_attributes" in op.attributes:
            stated = items_of(op.attributes["composite_attributes"])
            sized = {name: _sized(attr, symbols) for name, attr in stated.items()}
            op.attributes["composite_attributes"] = ir.DictAttr.get(sized)
        if callee in gone:
            operands = [value for i, value in enumerate(op.operands) if i not in gone[callee]]
            attrs = {name: op.attributes[name] for name in op.attributes}
            replace(op, op.name, operands, attrs, op.location)


def _sized(attr: Any, symbols: Mapping[str, int]) -> Any:
    """An attribute of a composite; what is a symbolic dim is a number."""
    if not isinstance(attr, ir.StringAttr) or not attr.value.startswith(DIM):
        return attr
    size = size_of(attr.value.removeprefix(DIM), symbols)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), size)


def _drop_arguments(function: Any, values: Mapping[int, int]) -> None:
    block = function.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        for position, value in values.items():
            argument = block.arguments[position]
            number = ir.IntegerAttr.get(ir.ShapedType(argument.type).element_type, value)
            constant = hlo.ConstantOp(ir.DenseElementsAttr.get_splat(argument.type, number))
            argument.replace_all_uses_with(constant.result)
    for position in sorted(values, reverse=True):
        block.erase_argument(position)
    inputs, results = function_type(function)
    kept = [i for i in range(len(inputs)) if i not in values]
    type_ = ir.FunctionType.get([inputs[i] for i in kept], results)
    attrs = list(function.attributes["arg_attrs"])
    function.attributes["function_type"] = ir.TypeAttr.get(type_)
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([attrs[i] for i in kept])


# ---------------------------------------------------------------------------------------------
# What does not fit.


def _types(main: Any, shapes: Sequence[Sequence[int]]) -> list[Any]:
    types = function_type(main)[0]
    if len(types) != len(shapes):
        raise FrontendError(
            f"{len(shapes)} shapes are given for {len(types)} arguments",
            required="one for each argument",
        )
    return [_type(i, *pair) for i, pair in enumerate(zip(types, shapes, strict=True))]


def _type(number: int, type_: Any, shape: Sequence[int]) -> Any:
    if not isinstance(type_, ir.RankedTensorType):  # a token
        return type_
    ranked: Any = ir.RankedTensorType(type_)
    fits = len(shape) == ranked.rank and all(
        ranked.is_dynamic_dim(dim) or ranked.get_dim_size(dim) == size
        for dim, size in enumerate(shape)
    )
    if not fits:
        raise FrontendError(
            f"argument {number} cannot have the shape {tuple(shape)}",
            required=str(type_),
            fix="correct its shape, or the values of the symbols",
        )
    return ir.RankedTensorType.get(list(shape), ranked.element_type, ranked.encoding)


def _refusal(error: Exception) -> FrontendError:
    text = str(error)
    _, found, assertion = text.partition("Input shapes do not match")
    return FrontendError(
        "the module cannot have these shapes",
        actual=(found + assertion).split("Please see")[0].strip()[:600]
        if found
        else text.strip().replace("\n", " ")[:400],
        fix="correct the sizes of its symbolic dims",
    )


def _check_static(module: ir.Module) -> None:
    """Raise if a dim stayed dynamic."""
    for op in ops_in(module.operation):
        for value in op.results:
            if not is_static(value.type):
                scope, frames = location_of(op.location)
                raise FrontendError(
                    f"a dim depends on data: {op.name} gives {value.type}",
                    source=Loc(scope, tuple(frames)).source,
                    required="dims that follow from those of the arguments",
                    fix="compute sizes from shapes alone",
                )
