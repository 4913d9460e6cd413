"""Turns a module with dynamic shapes, given sizes for its arguments, into one that is all static.

    func @main(%n: i32, %x: ?x4) { %1 = composite "f" %n, %x {@f} }       and n = 8, x 8x4
    func @main(%x: 8x4) { %1 = composite "f" %x {@f.7} : 8x4 }            with @f.7 for 8x4, too

Shapes are computed by StableHLO's own passes, which jax runs too when it compiles what was exported
with symbolic dims. `jax.extend.mlir.refine_polymorphic_shapes` is the same in one call, but refuses
composites.
"""

import ast
import io
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo
from jaxlib.mlir.passmanager import PassManager

from spmd.errors import FrontendError
from spmd.frontend.importer.contents import (
    Contents,
    defining_op,
    entries_of,
    function_type,
    items_of,
    location_of,
    named_ops,
    ops_in,
    stated_of,
    tensor_type,
)
from spmd.frontend.importer.handlers import DEEPEST_CALLS, SAME
from spmd.frontend.importer.module import malformed
from spmd.frontend.importer.ops import MOST_OPS
from spmd.frontend.sizes import LONGEST, Dim, size_of
from spmd.ir.description import BARRIER
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

ArgumentDims = tuple[Dim | None, ...]
"""The size of each dim, as a number or an expression of symbols; None: the module says nothing."""


@malformed()
def is_dynamic(module: ir.Module) -> bool:
    """Whether a function of a module has dynamic dims, or an argument that is a symbol's value."""
    with module.context:
        return any(
            _symbols(function)
            or not all(map(_is_static, itertools.chain(*function_type(function))))
            for function in named_ops(module, "func.func").values()
        )


@malformed()
def symbols_of(module: ir.Module) -> tuple[str, ...]:
    """Returns the symbols, as `n`, whose values a module's function takes as first arguments."""
    with module.context:
        return tuple(_symbols(Contents(module).main()).values())


@malformed()
def refine(
    module: ir.Module, shapes: Sequence[Sequence[int]], symbols: Mapping[str, int] = NO_SYMBOLS
) -> ir.Module:
    """Returns a copy of a module with static shapes, given those of its arguments.

    `symbols` has the values of symbols, for modules whose functions take such. The module returned
    has no dynamic shapes, shape assertions, or arguments for symbols. FrontendError for shapes or
    values that do not fit, or dims that depend on data.
    """
    with module.context, ir.Location.unknown():
        data = io.BytesIO()
        module.operation.write_bytecode(data)
        copy = ir.Module.parse(data.getvalue())
        main = Contents(copy).main()
        own = _symbols(main).values()
        missing = [name for name in own if name not in symbols]
        if missing:
            raise FrontendError(
                f"the module has the symbolic dim {missing[0]}, which has no size",
                fix=f"give it: symbols={{{missing[0]!r}: 128}}",
            )
        # A `main` that takes none computes them from its arguments' shapes; the passes fold that.
        symbols = symbols if own else NO_SYMBOLS
        _bind(main, symbols)
        types = function_type(main)[0]
        if len(types) != len(shapes):
            raise FrontendError(
                f"{len(shapes)} shapes are given for {len(types)} arguments",
                required="one for each argument",
            )
        static = [_refined(i, *pair) for i, pair in enumerate(zip(types, shapes, strict=True))]
        taken = _take_apart(copy, main, symbols)
        try:
            PassManager.parse(_PASSES.format(types=",".join(static))).run(copy.operation)
        except ir.MLIRError as error:
            text = str(error)
            _, found, assertion = text.partition("Input shapes do not match")
            raise FrontendError(
                "the module cannot have these shapes",
                actual=(found + assertion).split("Please see")[0].strip()[:600]
                if found
                else text.strip().replace("\n", " ")[:400],
                fix="correct the sizes of its symbolic dims",
            ) from error
        _put_together(copy, taken)
        PassManager.parse("builtin.module(symbol-dce)").run(copy.operation)
        for op in ops_in(copy.operation):
            dynamic = next((v.type for v in op.results if not _is_static(v.type)), None)
            if dynamic is not None:
                scope, frames = location_of(op.location)
                raise FrontendError(
                    f"a dim depends on data: {op.name} gives {dynamic}",
                    source=Loc(scope, tuple(frames)).source,
                    required="dims that follow from those of the arguments",
                    fix="compute sizes from shapes alone",
                )
    return copy


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


# ---------------------------------------------------------------------------------------------
# What modules say of the dims of their arguments.


def exported_dims(exported: Any) -> list[ArgumentDims]:
    """Returns the dims of the arguments of a `jax.export.Exported`, symbolic ones as text."""
    shapes = [exported.in_avals[i].shape for i in exported.module_kept_var_idx]
    return [tuple(d if isinstance(d, int) else str(d) for d in shape) for shape in shapes]


def constraints_of(dim: Any) -> list[str]:
    """Returns the constraints that a dim's symbols were made with: `n >= 2`, `mod(n, 8) == 0`."""
    # jax keeps constraints to itself. For one on a remainder it adds `8*floordiv(n, 8) == n`, which
    # nobody wrote.
    stated = [constraint.debug_str for constraint in dim.scope._explicit_constraints]
    return [text for text in stated if "*floordiv(" not in text]


@malformed()
def stated_dims(module: ir.Module) -> list[ArgumentDims]:
    """Returns the dims of a module's arguments: numbers, expressions of symbols, None if unknown.

    A type has `?` for a dim that is not static. Modules of `jax.export` check the arguments'
    shapes, and name the symbols in the message of a failure:

        ... polymorphic shapes specifications: args[0].shape = (n, 4),args[2].shape = (2*n,). ...
    """
    with module.context:
        main = Contents(module).main()
        types, own = function_type(main)[0], _symbols(main)
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
        return tensor_type(type_).shape
    return tuple(
        None if type_.is_dynamic_dim(dim) else type_.get_dim_size(dim) for dim in range(type_.rank)
    )


def _specifications(module: ir.Module) -> list[ArgumentDims]:
    """Reads the shapes in the message of the first shape assertion."""
    for op in ops_in(module.operation):
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
    """Reads `n, 2*m, 4), ...` as dims, up to the closing bracket; () where it is no shape."""
    depth = 1
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            text = text[:position]
            break
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
    """Maps the position of an argument to the symbol whose value it is."""
    stated = enumerate(stated_of(function, "arg_attrs"))
    return {i: str(attrs[SYMBOL].value) for i, attrs in stated if SYMBOL in attrs}


def _bind(function: Any, symbols: Mapping[str, int]) -> set[int]:
    """Makes constants of the arguments that are values of symbols; returns which these were."""
    own = _symbols(function)
    if not own:
        return set()
    block = function.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        for position, symbol in own.items():
            type_ = block.arguments[position].type
            number = ir.IntegerAttr.get(ir.ShapedType(type_).element_type, symbols[symbol])
            constant = hlo.ConstantOp(ir.DenseElementsAttr.get_splat(type_, number))
            block.arguments[position].replace_all_uses_with(constant.result)
    for position in sorted(own, reverse=True):
        block.erase_argument(position)
    inputs, results = function_type(function)
    kept = [i for i in range(len(inputs)) if i not in own]
    attrs = list(function.attributes["arg_attrs"])
    type_ = ir.FunctionType.get([inputs[i] for i in kept], results)
    function.attributes["function_type"] = ir.TypeAttr.get(type_)
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([attrs[i] for i in kept])
    return set(own)


def _sized(attributes: Mapping[str, Any], symbols: Mapping[str, int]) -> Mapping[str, Any]:
    """Returns a composite's attributes with sizes in place of symbolic dims among its own."""

    def sized(attr: Any) -> Any:
        if not isinstance(attr, ir.StringAttr) or not attr.value.startswith(DIM):
            return attr
        size = size_of(attr.value.removeprefix(DIM), symbols)
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), size)

    key = "composite_attributes"
    if not symbols or key not in attributes:
        return attributes
    own = {name: sized(attr) for name, attr in items_of(attributes[key]).items()}
    return {**attributes, key: ir.DictAttr.get(own)}


# ---------------------------------------------------------------------------------------------
# Calls and composites at the sizes that they have. The passes give a function the types with which
# it is called, so each call gets a copy of its function. They don't know composites, and would
# write constant operands into functions:
#
#   %1 = composite "f" %0 {@f}    becomes    %a = barrier %0; %1 = call @f.7 %a
#
# and a composite again, with @f.7 as its decomposition at these shapes. Shardy's marks, which the
# passes do not know either, are barriers meanwhile, too.

STANDS_FOR = "spmd.stands_for"  # attribute of a barrier: which op it stands for

_CALLEES = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Op that calls a function -> its attribute that names it."""


class Taken(NamedTuple):
    """The name, attributes and location of an op that others stand for meanwhile."""

    name: str
    attributes: Mapping[str, Any]
    location: Any


def _is_static(type_: Any) -> bool:
    return not isinstance(type_, ir.RankedTensorType) or bool(type_.has_static_shape)


def _replace(op: Any, by: Taken, operands: Sequence[Any]) -> Taken:
    """Puts another op in the place of one; returns what the old one was."""
    was = Taken(op.name, dict(entries_of(op)), op.location)
    types, place = [value.type for value in op.results], ir.InsertionPoint(op)
    attributes = dict(by.attributes)
    made = ir.Operation.create(by.name, types, operands, attributes, loc=by.location, ip=place)
    for old, new in zip(op.results, made.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()
    return was


def _take_apart(module: ir.Module, main: Any, symbols: Mapping[str, int]) -> dict[str, Taken]:
    """Gives each call a function of its own; puts calls and barriers in place of what is not known.

    Returns the ops for which they stand, which `_put_together` restores: composites by the name of
    the function that is called, Shardy's ops with dynamic results by a number. FrontendError if a
    call has no body, or calls never end.
    """
    functions, count = named_ops(module, "func.func"), 0
    taken: dict[str, Taken] = {}
    own = main.attributes["sym_name"].value
    waiting: list[tuple[Any, tuple[str, ...]]] = [(op, (own,)) for op in ops_in(main)]
    while waiting:
        op, around = waiting.pop()
        count += 1
        if op.name in SAME and op.results and not _is_static(op.results[0].type):
            barrier = Taken(BARRIER, {STANDS_FOR: ir.StringAttr.get(str(count))}, op.location)
            taken[str(count)] = _replace(op, barrier, list(op.operands))
            continue
        if op.name not in _CALLEES:
            continue
        callee, problem = op.attributes[_CALLEES[op.name]].value, None
        if callee in around:
            problem = "calls itself"
        elif callee not in functions or not functions[callee].regions[0].blocks:
            problem = "has no body in the module"
        elif len(around) > DEEPEST_CALLS or count > MOST_OPS:
            problem = f"leads to more than {MOST_OPS} ops, or {DEEPEST_CALLS} calls in turn"
        if problem:
            raise FrontendError(f"function @{callee} {problem}")
        with ir.InsertionPoint(module.body):
            copy = functions[callee].clone().operation
        name = f"{callee}.{count}"
        copy.attributes["sym_name"] = ir.StringAttr.get(name)
        copy.attributes["sym_visibility"] = ir.StringAttr.get("private")
        bound = _bind(copy, symbols) if symbols else ()
        operands = [value for i, value in enumerate(op.operands) if i not in bound]
        waiting += [(item, (*around, callee)) for item in ops_in(copy)]
        stated = dict(entries_of(op)) if op.name == "func.call" else {}
        called = {**stated, "callee": ir.FlatSymbolRefAttr.get(name)}
        is_composite = op.name != "func.call" and operands and op.results
        if is_composite:
            with ir.InsertionPoint(op):
                operands = list(hlo.OptimizationBarrierOp(operands).results)
        was = _replace(op, Taken("func.call", called, op.location), operands)
        if is_composite:
            taken[name] = was._replace(attributes=_sized(was.attributes, symbols))
    for function in functions.values():
        if function != main:
            function.erase()
    return taken


def _put_together(module: ir.Module, taken: Mapping[str, Taken]) -> None:
    """Restores the ops that `_take_apart` took, at the shapes that there are now."""
    for op in ops_in(module.operation):
        if STANDS_FOR in op.attributes:
            _replace(op, taken[op.attributes[STANDS_FOR].value], list(op.operands))
        elif op.name == "func.call" and (name := op.attributes["callee"].value) in taken:
            composite, barrier = taken[name], defining_op(op.operands[0])
            function = ir.FlatSymbolRefAttr.get(name)
            attributes = {**composite.attributes, "decomposition": function}
            _replace(op, composite._replace(attributes=attributes), list(barrier.operands))
            barrier.erase()
