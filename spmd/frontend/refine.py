"""Makes all shapes of a module with dynamic shapes static, given those of its arguments.

    func @main(%n: i32, %x: ?x4) { %1 = composite "f" %n, %x {@f} }       and n = 8, x 8x4
    func @main(%x: 8x4) { %1 = composite "f" %x {@f} : 8x4 }              with @f for 8x4, too

StableHLO's own passes compute the shapes; jax runs the same to compile an export with symbolic
dims. `jax.extend.mlir.refine_polymorphic_shapes` runs them in one call, but refuses composites.
"""

from __future__ import annotations

import ast
import io
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import stablehlo as hlo
from jaxlib.mlir.passmanager import PassManager

from spmd.errors import FrontendError
from spmd.frontend.importer.contents import (
    Contents,
    cloned,
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
from spmd.ir.program import Loc

hlo.register_stablehlo_passes()

NO_SYMBOLS: Mapping[str, int] = MappingProxyType({})

SYMBOL = "jax.global_constant"
"""Attribute of arguments that are symbols' values; it names the symbol. They come first."""

PLATFORM = "_platform_index"  # jax's symbol for the number of the platform that is compiled for

DIM = "spmd.dim: "  # begins an attribute of a composite that is a symbolic dim: `spmd.dim: 2*n`

_PASSES = (
    "builtin.module(stablehlo-refine-arguments{{types={types}}},stablehlo-refine-shapes,"
    "func.func(stablehlo-canonicalize-dynamism,stablehlo-check-shape-assertions))"
)

ArgumentDims = tuple[Dim | None, ...]
"""The sizes of an argument's dims: a number, an expression such as `2*n`, or None if unknown."""


@malformed()
def is_dynamic(module: ir.Module) -> bool:
    """Returns whether any function of a module has a dynamic dim, or takes a symbol's value."""
    with module.context:
        return any(
            _symbols(function)
            or not all(map(_is_static, itertools.chain(*function_type(function))))
            for function in named_ops(module, "func.func").values()
        )


@malformed()
def symbols_of(module: ir.Module) -> tuple[str, ...]:
    """Returns the names (`n`) of the symbols whose values are a module's first arguments."""
    with module.context:
        return tuple(_symbols(Contents(module).main()).values())


@malformed()
def refine(
    module: ir.Module, shapes: Sequence[Sequence[int]], symbols: Mapping[str, int] = NO_SYMBOLS
) -> ir.Module:
    """Returns a copy of a module with static shapes, given those of its arguments.

    The copy has no dynamic shapes, shape assertions, or arguments for symbols' values. `shapes` has
    none for these; `symbols` has the values by name. FrontendError: shapes or values that do not
    fit, or a dim that depends on data.
    """
    with module.context, ir.Location.unknown():
        data = io.BytesIO()
        module.operation.write_bytecode(data)
        copy = ir.Module.parse(data.getvalue())
        main = Contents(copy).main()
        _bind(main, symbols)
        types = function_type(main)[0]
        if len(types) != len(shapes):
            raise FrontendError(
                f"{len(shapes)} shapes are given for {len(types)} arguments",
                required="one for each argument",
            )
        static = [_refined(i, *pair) for i, pair in enumerate(zip(types, shapes, strict=True))]
        taken = _take_apart(copy, main, symbols)
        _announce(copy.operation)
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
        _settle(copy.operation, named_ops(copy, "func.func"))
        _put_back(copy, taken)
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
    """Returns the dims of arguments of a `jax.export.Exported`'s module, symbolic ones as text."""
    shapes = [exported.in_avals[i].shape for i in exported.module_kept_var_idx]
    return [tuple(d if isinstance(d, int) else str(d) for d in shape) for shape in shapes]


def constraints_of(dim: Any) -> list[str]:
    """Returns the user's constraints on a jax dim's symbols as text, such as `mod(n, 8) == 0`."""
    # jax keeps constraints to itself. For one on a remainder it adds `8*floordiv(n, 8) == n`, which
    # nobody wrote.
    stated = [constraint.debug_str for constraint in dim.scope._explicit_constraints]
    return [text for text in stated if "*floordiv(" not in text]


@malformed()
def stated_dims(module: ir.Module) -> list[ArgumentDims]:
    """Returns the dims of each argument: numbers, expressions of symbols, or None if unknown.

    Symbols' values are left out. A dynamic dim is `?` in a type. But modules of `jax.export` check
    their arguments' shapes, and the message of a failure has the expressions:

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
    """Returns the shapes in the error message of the first shape assertion; [] without one."""
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
    """Parses a shape up to its closing bracket: `n, 4), ...` -> `("n", 4)`; () if it is none."""
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
# Symbols that are arguments of `main` become constants; the passes fold what calls get of them.


def _symbols(function: Any) -> dict[int, str]:
    """Returns position -> symbol of the arguments that are values of symbols."""
    stated = enumerate(stated_of(function, "arg_attrs"))
    return {i: str(attrs[SYMBOL].value) for i, attrs in stated if SYMBOL in attrs}


def _bind(function: Any, symbols: Mapping[str, int]) -> None:
    """Replaces a function's arguments that are symbols' values by constants."""
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
    inputs, results = function_type(function)
    kept = [i for i in range(len(inputs)) if i not in own]
    type_ = ir.FunctionType.get([inputs[i] for i in kept], results)
    attrs = list(function.attributes["arg_attrs"])
    function.attributes["function_type"] = ir.TypeAttr.get(type_)
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([attrs[i] for i in kept])


# ---------------------------------------------------------------------------------------------
# Calls are inlined, so that the passes fold what functions compute for sizes. Composites, which
# they do not know, are calls meanwhile, each of a function of its own, whose types they find:
#
#   %1 = composite "f" %0 {@f}    becomes    %a = barrier %0; %1 = call @f.7(%a)
#
# Behind a barrier, an operand that is constant stays one. Shardy's marks, which the passes do not
# know either, are barriers meanwhile, too.

TAKEN = "spmd.taken"  # attribute of such a barrier: the number of the mark, "" before a call

_CALLEES = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Name of an op that calls a function -> its attribute that names the function."""


class Taken(NamedTuple):
    """Holds name, attributes and location of an op that others replace while the passes run."""

    name: str
    attributes: Mapping[str, Any]
    location: Any

    @staticmethod
    def of(op: Any, **more: Any) -> Taken:
        """Returns what `op` is, with attributes `more`."""
        return Taken(op.name, {**dict(entries_of(op)), **more}, op.location)


def _is_static(type_: Any) -> bool:
    return not isinstance(type_, ir.RankedTensorType) or bool(type_.has_static_shape)


def _replace(op: Any, by: Taken, operands: Sequence[Any], regions: int = 0) -> Any:
    types, at = [value.type for value in op.results], {"loc": by.location}
    at |= {"ip": ir.InsertionPoint(op), "regions": regions}
    made = ir.Operation.create(by.name, types, operands, dict(by.attributes), **at)
    _replace_results(op, made.results)
    return made


def _replace_results(op: Any, values: Sequence[Any]) -> None:
    for old, new in zip(op.results, values, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def _sized(composite: Any, symbols: Mapping[str, int]) -> dict[str, Any]:
    """Returns a composite's attributes, if it has any, with sizes for symbolic dims (`DIM`)."""
    name = "composite_attributes"
    found = items_of(composite.attributes[name]) if name in composite.attributes else {}
    for key, attr in found.items():
        if isinstance(attr, ir.StringAttr) and attr.value.startswith(DIM):
            size = size_of(attr.value.removeprefix(DIM), symbols)
            found[key] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), size)
    return {name: ir.DictAttr.get(found)} if found else {}


def _take_apart(module: ir.Module, main: Any, values: Mapping[str, int]) -> dict[str, Taken]:
    """Inlines calls, and replaces composites by calls, Shardy's marks by barriers.

    Returns what they were by the names of their functions, or the numbers of their barriers.
    FrontendError: a function without a body, recursion, or too many ops.
    """
    functions, taken = named_ops(module, "func.func"), dict[str, Taken]()
    calls: list[tuple[Any, Any]] = []  # each with a function that nothing else calls
    own, count = main.attributes["sym_name"].value, 0
    kept = {own}  # and bodies of custom calls
    waiting: list[tuple[Any, tuple[str, ...]]] = [(op, (own,)) for op in ops_in(main)]
    while waiting:
        op, around = waiting.pop()
        count += 1
        if op.name in SAME and op.results and not _is_static(op.results[0].type):
            taken[str(count)] = Taken.of(op)
            stands_for = {TAKEN: ir.StringAttr.get(str(count))}
            by = Taken("stablehlo.optimization_barrier", stands_for, op.location)
            _replace(op, by, list(op.operands))
            continue
        kept.update(body.value for body in op.attributes.get("called_computations", ()))
        if op.name not in _CALLEES:
            continue
        callee = op.attributes[_CALLEES[op.name]].value
        problem = None
        if callee in around:
            problem = "calls itself"
        elif callee not in functions or not functions[callee].regions[0].blocks:
            problem = "has no body in the module"
        elif len(around) > DEEPEST_CALLS or count > MOST_OPS:
            problem = f"leads to more than {MOST_OPS} ops, or {DEEPEST_CALLS} calls in turn"
        if problem:
            raise FrontendError(f"function @{callee} {problem}")
        with ir.InsertionPoint(module.body):
            function = functions[callee].clone().operation
        name = f"{callee}.{count}"
        function.attributes["sym_name"] = ir.StringAttr.get(name)
        named = ir.FlatSymbolRefAttr.get(name)
        if op.name == "func.call":
            calls.append((op, function))
        else:
            taken[name] = Taken.of(op, decomposition=named, **_sized(op, values))
            operands, symbols = list(op.operands), len(_symbols(function))
            if operands[symbols:]:
                with ir.InsertionPoint(op), op.location:
                    barrier = hlo.OptimizationBarrierOp(operands[symbols:])
                barrier.operation.attributes[TAKEN] = ir.StringAttr.get("")
                operands[symbols:] = barrier.operation.results
            _replace(op, Taken("func.call", {"callee": named}, op.location), operands)
        waiting += [(item, (*around, callee)) for item in ops_in(function)]
    for op, function in reversed(calls):  # the innermost first
        with ir.InsertionPoint(op):
            _replace_results(op, _jax_mlir_ext.inlined_func_call(function, list(op.operands)))
        function.erase()
    for function in (function for name, function in functions.items() if name not in kept):
        function.erase()
    return taken


def _put_back(module: ir.Module, taken: Mapping[str, Taken]) -> None:
    """Makes composites and marks of their calls and barriers, which have static shapes now."""
    for op in ops_in(module.operation):
        callee = op.attributes["callee"].value if op.name == "func.call" else ""
        if TAKEN in op.attributes and not op.attributes[TAKEN].value:
            _replace_results(op, list(op.operands))
        elif TAKEN in op.attributes or callee in taken:
            by = taken[callee or op.attributes[TAKEN].value]
            _replace(op, by, list(op.operands))


# ---------------------------------------------------------------------------------------------
# Calls by which jax writes ops whose attributes would be symbolic dims become these ops again.
#
#   for any n:   %3 = custom_call @stablehlo.dynamic_reduce_window(%x, %zero, %window, ...) : ?x4
#   for n = 8:   %3 = reduce_window(%x, %zero) {window_dimensions = [8, 1], ...} : 8x4
#
# The passes do not know these calls. So the shapes of their results are added as operands, by which
# the passes find the types of all values; then the ops are made.

_APPROX_TOP_K, _TOP_K = "stablehlo.dynamic_approx_top_k", "stablehlo.dynamic_top_k"
_RANDOM, _WINDOW = "stablehlo.dynamic_rng_bit_generator", "stablehlo.dynamic_reduce_window"
_AMOUNTS = {_APPROX_TOP_K: 1, _RANDOM: 1, _TOP_K: 1, _WINDOW: 5}
"""Call -> how many of its last operands are attributes of the op."""

_ELEMENTS: Any = ir.DenseElementsAttr  # its stub does not know arrays


def _announce(root: Any) -> None:
    """Adds the shapes of their results to the dynamic calls inside an op, as operands."""
    stated = "indices_of_shape_operands"
    for op in ops_in(root):
        if _target(op) in _AMOUNTS and stated not in op.attributes:
            with ir.InsertionPoint(op), op.location:
                operands = [*op.operands, *_call_shapes(op)]
            numbers = _ELEMENTS.get(np.arange(len(op.operands), len(operands)))
            _replace(op, Taken.of(op, **{stated: numbers}), operands)


def _settle(root: Any, functions: Mapping[str, Any]) -> None:
    """Makes the ops that the dynamic calls inside an op stand for, once their dims are known."""
    for op in ops_in(root):
        count = _AMOUNTS.get(_target(op), 0)
        makers = [defining_op(value) for value in list(op.operands)[-count:]] if count else []
        if not makers or any(m is None or m.name != "stablehlo.constant" for m in makers):
            continue
        name, attributes = _settled(op, [np.asarray(m.attributes["value"]) for m in makers])
        bodies = op.attributes["called_computations"] if name == "stablehlo.reduce_window" else ()
        sources = [functions[body.value].regions[0].blocks[0] for body in bodies]
        by = Taken(name, attributes, op.location)
        made = _replace(op, by, list(op.operands)[:-count], len(sources))
        for source, region in zip(sources, made.regions, strict=True):
            block = region.blocks.append(*[argument.type for argument in source.arguments])
            values = dict(zip(source.arguments, block.arguments, strict=True))
            *ops, returns = source.operations
            with ir.InsertionPoint(block):
                for item in ops:
                    cloned(item.operation, values)
                hlo.ReturnOp([values[value] for value in returns.operands])


def _target(op: Any) -> str:
    is_call = op.name == "stablehlo.custom_call"
    return str(op.attributes["call_target_name"].value) if is_call else ""


def _call_shapes(op: Any) -> Sequence[Any]:
    """Appends ops that compute the shapes of a call's results, which the passes fold."""
    x, rank = op.operands[0], op.operands[0].type.rank
    one = ir.RankedTensorType.get([1], ir.IntegerType.get_signless(32))
    sizes = [hlo.reshape(one, hlo.get_dimension_size(x, dim)) for dim in range(rank)]
    if _target(op) == _RANDOM:
        return [hlo.concatenate(sizes, 0), op.operands[1]]
    if _target(op) == _TOP_K:
        k = hlo.convert(ir.RankedTensorType.get([], one.element_type), op.operands[1])
        return [hlo.concatenate([*sizes[:-1], hlo.reshape(one, k)], 0)] * 2
    window, strides, base, dilation, padding = list(op.operands)[-5:]
    ends = (hlo.slice(padding, [0, i], [rank, i + 1], [1, 1]) for i in (0, 1))
    low, high = (hlo.reshape(window.type, end) for end in ends)
    ones = hlo.constant(_ELEMENTS.get(np.ones(rank, np.int32)))

    def spread(size: Any, by: Any) -> Any:
        return hlo.add(hlo.multiply(hlo.subtract(size, ones), by), ones)

    padded = hlo.add(spread(hlo.concatenate(sizes, 0), base), hlo.add(low, high))
    steps = hlo.divide(hlo.subtract(padded, spread(window, dilation)), strides)
    return [hlo.add(steps, ones)] * len(op.results)


def _settled(op: Any, amounts: list[Any]) -> tuple[str, dict[str, Any]]:
    if _target(op) == _RANDOM:
        return "stablehlo.rng_bit_generator", {"rng_algorithm": op.attributes["rng_algorithm"]}
    if _target(op) == _WINDOW:
        names = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
        arrays = [ir.DenseI64ArrayAttr.get(amount.tolist()) for amount in amounts[:-1]]
        own = {"padding": _ELEMENTS.get(amounts[-1].astype(np.int64))}
        return "stablehlo.reduce_window", {**dict(zip(names, arrays, strict=True)), **own}
    k = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), int(amounts[0]))
    if _target(op) == _TOP_K:
        return "chlo.top_k", {"k": k}
    config = ir.DictAttr.get({**items_of(op.attributes["mhlo.backend_config"]), "top_k": k})
    own = {"mhlo.backend_config": config, "call_target_name": ir.StringAttr.get("ApproxTopK")}
    return op.name, {**dict(entries_of(op)), **own}
