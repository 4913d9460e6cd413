"""Calls and composites written out, for passes that compute shapes; composites put together again.

    %1 = composite "f" %0 {@f}    becomes    %a = barrier %0 {begin 7}; ops of @f on %a;
                                             %1 = barrier of what it returns {end 7}

The passes see one function and compute the type of every value in it, as often as it takes. What is
then between two barriers is the decomposition at these shapes. Shardy's marks, which the passes do
not know either, are barriers meanwhile, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.errors import FrontendError
from spmd.frontend.importer.attributes import defining_op, items_of
from spmd.frontend.importer.handlers import DEEPEST_CALLS, SAME, is_manual_call
from spmd.frontend.importer.ops import MOST_OPS

BEGIN, END = "spmd.begin", "spmd.end"  # attributes of barriers: the number of what they stand for

_CALLEES = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Op that calls a function -> its attribute that names it."""

_MARK = "sdy.sharding"


class Taken(NamedTuple):
    """What barriers do not say of the op that they stand for."""

    name: str
    attributes: Mapping[str, Any]
    location: Any


# ---------------------------------------------------------------------------------------------
# Modules.


def functions_of(module: ir.Module) -> dict[str, Any]:
    """Name -> function."""
    operations: list[Any] = [item.operation for item in module.body.operations]
    return {op.attributes["sym_name"].value: op for op in operations if op.name == "func.func"}


def ops_in(root: Any) -> list[Any]:
    """An op and all ops inside it, so that one may replace them."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


def calls_in(root: Any) -> Iterator[tuple[Any, str]]:
    """The calls and composites inside an op, with the names of their functions."""
    for op in ops_in(root):
        if op.name in _CALLEES:
            yield op, op.attributes[_CALLEES[op.name]].value


def is_static(type_: Any) -> bool:
    """Whether a type has no dynamic dim."""
    return not isinstance(type_, ir.RankedTensorType) or bool(type_.has_static_shape)


def replace(op: Any, name: str, operands: Sequence[Any], attrs: Any, location: Any) -> Any:
    """Puts another op with results of the same types in the place of an op."""
    results = [value.type for value in op.results]
    made = ir.Operation.create(
        name, results, operands, dict(attrs), loc=location, ip=ir.InsertionPoint(op)
    )
    _replace_results(op, made.results)
    return made


def _replace_results(op: Any, values: Sequence[Any]) -> None:
    for old, new in zip(op.results, values, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


# ---------------------------------------------------------------------------------------------
# Taking apart.


def take_apart(module: ir.Module, main: Any) -> dict[int, Taken]:
    """Writes out what the function `main` calls, in place; other functions go.

    Returns what the barriers of each number stand for. FrontendError if functions call each other
    without end.
    """
    functions, count = functions_of(module), 0
    taken: dict[int, Taken] = {}
    own = main.attributes["sym_name"].value
    waiting: list[tuple[Any, tuple[str, ...]]] = [(op, (own,)) for op in ops_in(main)]
    while waiting:
        op, around = waiting.pop()
        count += 1
        if op.name in SAME and op.results and not is_static(op.results[0].type):
            taken[len(taken)] = Taken(op.name, _attributes(op), op.location)
            _replace_results(op, _barrier(op, END, len(taken) - 1, op.operands))
        elif op.name in _CALLEES and not is_manual_call(op):
            callee = op.attributes[_CALLEES[op.name]].value
            _check_call(callee, functions, around, count)
            inside = _written_out(op, functions[callee], taken)
            waiting += [(item, (*around, callee)) for made in inside for item in ops_in(made)]
    if not any(calls_in(main)):
        for function in functions.values():
            if function != main:
                function.erase()
    return taken


def _attributes(op: Any) -> dict[str, Any]:
    return {name: op.attributes[name] for name in op.attributes}


def _check_call(
    callee: str, functions: Mapping[str, Any], around: Sequence[str], count: int
) -> None:
    problem = None
    if callee in around:
        problem = "calls itself"
    elif callee not in functions or not functions[callee].regions[0].blocks:
        problem = "has no body in the module"
    elif len(around) > DEEPEST_CALLS or count > MOST_OPS:
        problem = f"leads to more than {MOST_OPS} ops, or {DEEPEST_CALLS} calls in turn"
    if problem:
        raise FrontendError(f"function @{callee} {problem}")


def _written_out(op: Any, function: Any, taken: dict[int, Taken]) -> list[Any]:
    """The ops of a function in the place of its call, or between the barriers of a composite."""
    operands, number = list(op.operands), None
    if op.name == "stablehlo.composite" and operands and op.results:
        number = len(taken)
        taken[number] = Taken(op.name, _attributes(op), op.location)
        operands = _barrier(op, BEGIN, number, operands)
    block = function.regions[0].blocks[0]
    made: list[Any] = []
    returned: list[Any] = []
    arguments = _marked(op, function, "arg_attrs", operands, made)
    values = dict(zip(block.arguments, arguments, strict=True))
    with ir.InsertionPoint(op):
        for item in block.operations:
            if item.operation.name == "func.return":
                returned = [values[value] for value in item.operands]
            else:
                made.append(_cloned(item.operation, values))
    results = _marked(op, function, "res_attrs", returned, made)
    _replace_results(op, results if number is None else _barrier(op, END, number, results))
    return made


def _cloned(op: Any, values: dict[Any, Any]) -> Any:
    """A copy of an op at the insertion point, which reads other values; its results join them."""
    copy = op.clone().operation
    for inner in ops_in(copy):
        for i, value in enumerate(inner.operands):
            if value in values:
                inner.operands[i] = values[value]
    values.update(zip(op.results, copy.results, strict=True))
    return copy


def _marked(op: Any, function: Any, name: str, values: Sequence[Any], made: list[Any]) -> list[Any]:
    """Values, in front of an op, as a function marks its arguments or results."""
    if name not in function.attributes:
        return list(values)
    marks = [items_of(item).get(_MARK) for item in function.attributes[name]]
    found = []
    for value, mark in zip(values, marks, strict=True):
        if mark is not None:
            with ir.InsertionPoint(op):
                made.append(sdy.ShardingConstraintOp(value, mark).operation)
            value = made[-1].results[0]
        found.append(value)
    return found


def _barrier(op: Any, name: str, number: int, operands: Any) -> list[Any]:
    """What a barrier in front of an op makes of operands."""
    with ir.InsertionPoint(op):
        barrier = hlo.OptimizationBarrierOp(list(operands))
    number_type = ir.IntegerType.get_signless(64)
    barrier.operation.attributes[name] = ir.IntegerAttr.get(number_type, number)
    return list(barrier.operation.results)


# ---------------------------------------------------------------------------------------------
# Putting together.


def put_together(module: ir.Module, main: Any, taken: Mapping[int, Taken]) -> None:
    """Puts back what `take_apart` took, at the shapes that there are now."""
    if taken:
        for region in main.regions:
            _region(module, region, taken)


def _region(module: ir.Module, region: Any, taken: Mapping[int, Taken]) -> None:
    for block in region.blocks:
        line: list[Any] = []
        begins: dict[int, int] = {}  # number -> where its first barrier is in the line
        for op in [item.operation for item in block.operations]:
            for inner in op.regions:
                _region(module, inner, taken)
            if BEGIN in op.attributes:
                begins[op.attributes[BEGIN].value] = len(line)
            if END not in op.attributes:
                line.append(op)
                continue
            number = op.attributes[END].value
            if number not in begins:
                name, attributes, location = taken[number]
                line.append(replace(op, name, list(op.operands), attributes, location))
                continue
            first, *inside = line[begins[number] :]
            composite = _composite(module, first, inside, op, taken[number], number)
            line[begins[number] :] = [*_left(first, inside), composite]


def _composite(
    module: ir.Module, first: Any, inside: list[Any], last: Any, taken: Taken, number: int
) -> Any:
    """A composite in the place of its last barrier, and its function from what is in front."""
    returned = list(last.operands)
    needed, ops = set(returned), []
    for op in reversed(inside):
        if any(value in needed for value in op.results):
            ops.append(op)
            needed |= _read(op)
    made = {value for op in (first, *ops) for value in op.results}
    outside = [defining_op(value) for value in needed - made]
    if not all(op is not None and op.name == "stablehlo.constant" for op in outside):
        raise FrontendError(f"the decomposition of {taken.name} reads a value from around it")
    name = f"{taken.attributes['decomposition'].value}.{number}"
    ends = [value.type for value in first.operands], [value.type for value in returned]
    builder: Any = func  # its stub lacks the extensions of the class
    with ir.InsertionPoint(module.body):
        block = builder.FuncOp(name, ends, visibility="private").add_entry_block()
    values = dict(zip(first.results, block.arguments, strict=True))
    with ir.InsertionPoint(block):
        for op in (*outside, *reversed(ops)):
            _cloned(op, values)
        func.ReturnOp([values[value] for value in returned])
    attributes = {**taken.attributes, "decomposition": ir.FlatSymbolRefAttr.get(name)}
    return replace(last, taken.name, list(first.operands), attributes, taken.location)


def _read(op: Any) -> set[Any]:
    """The values that an op, or what is inside it, reads from around it."""
    items = ops_in(op)
    own = {value for item in items for value in item.results}
    own |= {
        argument
        for item in items
        for region in item.regions
        for block in region.blocks
        for argument in block.arguments
    }
    return {value for item in items for value in item.operands} - own


def _left(first: Any, inside: list[Any]) -> list[Any]:
    """What stays of the ops between two barriers: what others read, too, such as constants."""
    left = []
    for op in (*reversed(inside), first):
        if op.results and not any(True for value in op.results for _ in value.uses):
            op.erase()
        else:
            left.append(op)
    return left[::-1]
