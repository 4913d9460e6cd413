"""Makes all shapes of a module with dynamic shapes static, given those of its arguments.

    func @main(%n: i32, %x: ?x4) { %1 = composite "f" %n, %x {@f} }       and n = 8, x 8x4
    func @main(%x: 8x4) { %1 = composite "f" %x {@f} : 8x4 }              with @f for 8x4, too

`jax.extend.mlir.refine_polymorphic_shapes` computes the shapes, as jax compiles an export with
symbolic dims, but refuses composites.
"""

import ast
import io
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from jax.extend.mlir import refine_polymorphic_shapes
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from jaxlib.mlir.dialects import stablehlo as hlo
from jaxlib.mlir.passmanager import PassManager

from spmd.errors import FrontendError
from spmd.frontend.importer import contents
from spmd.frontend.importer.module import malformed
from spmd.frontend.sizes import LONGEST, Dim, size_of
from spmd.ir.program import Loc

NO_SYMBOLS: Mapping[str, int] = MappingProxyType({})

SYMBOL = "jax.global_constant"
"""Attribute of arguments that are symbols' values; it names the symbol. They come first."""

PLATFORM = "_platform_index"  # jax's symbol for the number of the platform that is compiled for

DIM = "spmd.dim: "  # begins an attribute of a composite that is a symbolic dim: `spmd.dim: 2*n`

_ARGUMENTS = "builtin.module(stablehlo-refine-arguments{{types={}}})"

ArgumentDims = tuple[Dim | None, ...]
"""The sizes of an argument's dims: a number, an expression such as `2*n`, or None if unknown."""


@malformed()
def is_dynamic(module: ir.Module) -> bool:
    """Returns whether any function of a module has a dynamic dim, or takes a symbol's value."""
    with module.context:
        return any(
            _symbols(function)
            or not all(map(_is_static, itertools.chain(*contents.function_type(function))))
            for function in contents.named_ops(module, "func.func").values()
        )


@malformed()
def symbols_of(module: ir.Module) -> tuple[str, ...]:
    """Returns the names (`n`) of the symbols whose values are a module's first arguments."""
    with module.context:
        return tuple(_symbols(contents.Contents(module).main()).values())


@malformed()
def refine(
    module: ir.Module, shapes: Sequence[Sequence[int]], symbols: Mapping[str, int] = NO_SYMBOLS
) -> ir.Module:
    """Returns a copy of a module with static shapes, given those of its arguments.

    The copy has no dynamic shapes, shape assertions, or arguments for symbols' values. `symbols`
    has these values by name, `shapes` the shapes of the other arguments. FrontendError: shapes or
    values that are missing or do not fit, or a dim that depends on data.
    """
    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(_bytes(module))
        inside = contents.Contents(copy)
        inside.check_calls()
        main = inside.main()
        _bind(main, symbols)
        types = contents.function_type(main)[0]
        if len(types) != len(shapes):
            raise FrontendError(
                f"{len(shapes)} shapes are given for {len(types)} arguments",
                required="one for each argument",
            )
        static = [_refined(i, *pair) for i, pair in enumerate(zip(types, shapes, strict=True))]
        taken = _to_calls(copy, symbols)
        try:
            PassManager.parse(_ARGUMENTS.format(",".join(static))).run(copy.operation)
            refined = refine_polymorphic_shapes(_bytes(copy), validate_static_shapes=False)
            copy = ir.Module.parse(refined)
        except (ir.MLIRError, ValueError, RuntimeError) as error:
            text = str(error)
            _, found, assertion = text.partition("Input shapes do not match")
            raise FrontendError(
                "the module cannot have these shapes",
                actual=(found + assertion).split("Please see")[0].strip()[:600]
                if found
                else text.strip().replace("\n", " ")[:400],
                fix="correct the sizes of its symbolic dims",
            ) from error
        _to_composites(copy, taken)
        for op in contents.ops_in(copy.operation):
            dynamic = next((v.type for v in op.results if not _is_static(v.type)), None)
            if dynamic is not None:
                scope, frames = contents.location_of(op.location)
                raise FrontendError(
                    f"a dim depends on data: {op.name} gives {dynamic}",
                    source=Loc(scope, tuple(frames)).source,
                    required="dims that follow from those of the arguments",
                    fix="compute sizes from shapes alone",
                )
    return copy


def _bytes(module: ir.Module) -> bytes:
    data = io.BytesIO()
    module.operation.write_bytecode(data)
    return data.getvalue()


def _refined(number: int, type_: Any, shape: Sequence[int]) -> str:
    if not isinstance(type_, ir.RankedTensorType):  # a token
        return str(type_)
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
    return str(ir.RankedTensorType.get(list(shape), ranked.element_type, ranked.encoding))


def exported_dims(exported: Any) -> list[ArgumentDims]:
    """Returns the dims of each argument of a `jax.export.Exported`'s module, symbolic as text."""
    shapes = [exported.in_avals[i].shape for i in exported.module_kept_var_idx]
    return [tuple(d if isinstance(d, int) else str(d) for d in shape) for shape in shapes]


@malformed()
def stated_dims(module: ir.Module) -> list[ArgumentDims]:
    """Returns the dims of each argument: numbers, expressions of symbols, or None if unknown.

    Arguments that are symbols' values are left out. A dynamic dim is `?` in a type. But modules of
    `jax.export` check their arguments' shapes, and the message of a failure has the expressions:

        ... polymorphic shapes specifications: args[0].shape = (n, 4),args[2].shape = (2*n,). ...
    """
    with module.context:
        main = contents.Contents(module).main()
        types, own = contents.function_type(main)[0], _symbols(main)
        dims = [_dims(type_) for i, type_ in enumerate(types) if i not in own]
        specifications = _specifications(module)
    dynamic = [i for i, argument in enumerate(dims) if None in argument]
    if len(specifications) == len(dynamic):  # it names the arguments with symbolic dims, in order
        for i, stated in zip(dynamic, specifications, strict=True):
            if len(stated) == len(dims[i]):
                dims[i] = stated
    return dims


def _dims(type_: Any) -> ArgumentDims:
    if not isinstance(type_, ir.RankedTensorType):
        return contents.tensor_type(type_).shape
    return tuple(
        None if type_.is_dynamic_dim(dim) else type_.get_dim_size(dim) for dim in range(type_.rank)
    )


def _specifications(module: ir.Module) -> list[ArgumentDims]:
    """Returns the shapes in the error message of the first shape assertion; [] without one."""
    for op in contents.ops_in(module.operation):
        attributes = op.attributes
        is_call = op.name == "stablehlo.custom_call"
        if is_call and attributes["call_target_name"].value == "shape_assertion":
            message = attributes["error_message"].value if "error_message" in attributes else ""
            stated = message.partition("polymorphic shapes specifications: ")[2]
            return [
                _shape(part) for part in stated.partition(". Obtained")[0].split(".shape = (")[1:]
            ]
    return []


def _shape(text: str) -> ArgumentDims:
    """Parses a shape up to the last bracket: `n, 4), ...` -> `("n", 4)`; () if it is none."""
    text = text.rpartition(")")[0]
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


# Symbols that are arguments of `main` become constants; the passes fold what calls get of them.


def _symbols(function: Any) -> dict[int, str]:
    """Returns position -> symbol of the arguments that are values of symbols."""
    stated = enumerate(contents.stated_of(function, "arg_attrs"))
    return {i: str(attrs[SYMBOL].value) for i, attrs in stated if SYMBOL in attrs}


def _bind(function: Any, symbols: Mapping[str, int]) -> None:
    """Replaces arguments that are symbols' values by constants; FrontendError if one is missing."""
    own = _symbols(function)
    missing = [name for name in own.values() if name not in symbols]
    if PLATFORM in missing:
        raise FrontendError(
            "the module is for several platforms, and does not say which platform is which",
            fix="give the number of yours among those that it was exported for: symbols="
            f"{ {PLATFORM: 0} }",
        )
    if missing:
        raise FrontendError(
            f"the module has the symbolic dim {missing[0]}, which has no size",
            fix=f"give it: symbols={{{missing[0]!r}: 128}}",
        )
    if not own:  # `main` computes them from the shapes of its arguments, and the passes fold that
        return
    block = function.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        for position, name in own.items():
            argument = block.arguments[position]
            number = ir.IntegerAttr.get(ir.ShapedType(argument.type).element_type, symbols[name])
            constant = hlo.ConstantOp(ir.DenseElementsAttr.get_splat(argument.type, number))
            argument.replace_all_uses_with(constant.result)
    for position in sorted(own, reverse=True):
        block.erase_argument(position)
    inputs, results = contents.function_type(function)
    kept = [i for i in range(len(inputs)) if i not in own]
    type_ = ir.FunctionType.get([inputs[i] for i in kept], results)
    attrs = list(function.attributes["arg_attrs"])
    function.attributes["function_type"] = ir.TypeAttr.get(type_)
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([attrs[i] for i in kept])


# Composites, which jaxlib refuses, are calls meanwhile, each of a function of its own:
#
#   %1 = composite "f" %0 {@f}    becomes    %a = barrier %0; %1 = call @f.7(%a)
#
# Behind a barrier, an operand that is constant stays an operand.

BEHIND = "spmd.composite"  # attribute of such a barrier

Taken = dict[str, tuple[dict[str, Any], Any]]
"""Function -> attributes and location of the composite that is a call of it meanwhile."""


def _is_static(type_: Any) -> bool:
    return not isinstance(type_, ir.RankedTensorType) or bool(type_.has_static_shape)


def _sized(composite: Any, symbols: Mapping[str, int]) -> dict[str, Any]:
    """Returns a composite's attributes, with sizes in place of symbolic dims (`DIM`)."""
    attributes, name = dict(contents.entries_of(composite)), "composite_attributes"
    found = contents.items_of(attributes.get(name, ()))
    for key, attr in found.items():
        if isinstance(attr, ir.StringAttr) and attr.value.startswith(DIM):
            size = size_of(attr.value.removeprefix(DIM), symbols)
            found[key] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), size)
    return attributes | ({name: ir.DictAttr.get(found)} if found else {})


def _to_calls(module: ir.Module, symbols: Mapping[str, int]) -> Taken:
    """Replaces composites by calls; returns function -> the composite's (attributes, location)."""
    functions, taken, builder = contents.named_ops(module, "func.func"), Taken(), cast(Any, func)
    for op in contents.ops_in(module.operation):
        if op.name != "stablehlo.composite":
            continue
        (callee,) = contents.callees(op)
        name = f"{callee}.{len(taken)}"
        taken[name] = _sized(op, symbols), op.location
        operands, results = list(op.operands), [result.type for result in op.results]
        first = len(_symbols(functions[callee]))  # these are constants and become none
        with ir.InsertionPoint(op), op.location:
            if operands[first:]:
                barrier = hlo.OptimizationBarrierOp(operands[first:]).operation
                barrier.attributes[BEHIND] = ir.UnitAttr.get()
                operands[first:] = barrier.results
            call = builder.CallOp(results, name, operands)
        with ir.InsertionPoint(module.body):
            types = [value.type for value in operands], results
            function = builder.FuncOp(name, types, visibility="private")
        function.attributes["no_inline"] = ir.UnitAttr.get()
        with ir.InsertionPoint(function.add_entry_block()) as at:
            func.ReturnOp(list(builder.CallOp(results, callee, list(at.block.arguments)).results))
        contents.replace_op(op, call.results)
    return taken


def _to_composites(module: ir.Module, taken: Taken) -> None:
    """Replaces the calls of functions in `taken` by the composites that they were."""
    for op in contents.ops_in(module.operation):
        if BEHIND in op.attributes:
            contents.replace_op(op, op.operands)
        elif op.name == "func.call" and (by := taken.get(op.attributes["callee"].value)):
            attributes, at = {**by[0], "decomposition": op.attributes["callee"]}, by[1]
            types, operands = [value.type for value in op.results], list(op.operands)
            with ir.InsertionPoint(op), at:
                made = ir.Operation.create("stablehlo.composite", types, operands, attributes)
            contents.replace_op(op, made.results)
