"""Ops that stand for others: calls and composites, tuples, and custom calls that name a function.

Each handler here and in `regions` enters an op's results into the environment, and appends the ops
that it becomes, if any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.errors import FrontendError
from spmd.frontend.importer.attributes import composite_attribute, entries_of, items_of
from spmd.frontend.importer.contents import ends_of
from spmd.frontend.importer.ops import Env, Handler, Importer, keep
from spmd.frontend.importer.shard_shapes import (
    ENTERS,
    LEAVES,
    cross,
    import_manual_call,
    is_manual_call,
)
from spmd.frontend.importer.unsupported import refuse
from spmd.ir.dialect.callbacks import CALLBACK
from spmd.ir.program import Op, OpKind, Value
from spmd.ir.types import Attribute, ShardingAttr

DEEPEST_CALLS = 100  # how many functions may call each other in turn
_CHLO_COMPOSITES = {
    f"chlo.{name}"
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "cosh", "digamma", "erf",
        "erf_inv", "erfc", "lgamma", "next_after", "polygamma", "sinh", "square", "tan", "top_k",
        "zeta",
    )
}  # fmt: skip
"""CHLO ops that an exported module carries as composites of the same name."""


_SHARDING_CALLS = ("Sharding", "xla.sdy.FuncResultSharding")
"""Custom calls that return their operand; their attributes mark it."""


_OF_CALLBACKS = ("number", "called", "ordered", "partitioned")


def call_handlers(
    composites: Mapping[str, Mapping[str, Attribute]], callbacks: int = 0
) -> dict[str, Handler]:
    """The handlers of one import, at which so many Python functions are there to be called.

    `composites` has the name of each composite that stays one op -> attributes besides its own.
    """
    # A tuple never becomes a value: it is remembered as the values that it was made of.
    #   %3 = tuple %1, %2; %4 = get_tuple_element %3[1]      %4 is %2, and no op is appended
    tuples: dict[Any, tuple[Value, ...]] = {}

    def composite(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
        name = op.attributes["name"].value
        has_own = "composite_attributes" in op.attributes
        own = items_of(op.attributes["composite_attributes"]) if has_own else {}
        if name in _CHLO_COMPOSITES:
            attrs = {n: importer.attribute(n, attr) for n, attr in own.items()}
            ops.append(importer.op(op, env, name, attrs))
        elif name in composites:
            attrs = {f"with.{n}": composite_attribute(attr) for n, attr in own.items()}
            attrs = {"name": name, **composites[name], **attrs}
            ops.append(importer.op(op, env, attrs=attrs))
        else:
            _inline(importer, op, op.attributes["decomposition"].value, env, ops)

    def call(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
        if is_manual_call(op):
            import_manual_call(importer, op, env, ops, _call)
        else:
            _call(importer, op, env, ops)

    def custom_call(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
        if op.attributes["call_target_name"].value == CALLBACK:
            ops.append(_callback(importer, op, env, callbacks))
        else:
            _custom_call(importer, op, env, ops)

    def make_tuple(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
        if not all(v in env for v in op.operands):
            raise _foreign_tuple(importer, op)
        tuples[op.results[0]] = tuple([env[v] for v in op.operands])

    def take_element(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
        if op.operands[0] not in tuples:
            raise _foreign_tuple(importer, op)
        env[op.results[0]] = tuples[op.operands[0]][op.attributes["index"].value]

    return {
        "func.call": call,
        "stablehlo.composite": composite,
        "stablehlo.custom_call": custom_call,
        "stablehlo.get_tuple_element": take_element,
        "stablehlo.tuple": make_tuple,
    }


def _call(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    _inline(importer, op, op.attributes["callee"].value, env, ops)


def _inline(importer: Importer, op: Any, callee: str, env: Env, ops: list[Op]) -> None:
    """The ops of a function in place of its call."""
    # before: func @f(%a) { %b = tanh %a; return %b }   and   %5 = call @f(%4); %6 = call @f(%5)
    # after:  %5 = tanh %4; %6 = tanh %5
    # The body is imported anew for each call, with `inner` naming the arguments: two calls may get
    # different shardings, and their ops carry the line of their own call.
    function = importer.contents.functions.get(callee)
    if callee in importer.calls or function is None or not function.regions[0].blocks:
        problem = "calls itself" if callee in importer.calls else "has no body in the module"
        source = importer.loc(op.location).source
        raise FrontendError(f"function @{callee} {problem}", source=source)
    if len(importer.calls) >= DEEPEST_CALLS:
        raise FrontendError(f"functions call each other more than {DEEPEST_CALLS} deep")
    outer = importer.call_loc
    importer.call_loc = importer.loc(op.location)
    importer.calls.append(callee)
    block = function.regions[0].blocks[0]
    arguments = [env[v] for v in op.operands]
    args, ends = map(importer.contents.meshes.boundary_marks, ends_of(function))
    inner = dict(zip(block.arguments, _marked(importer, ops, arguments, args), strict=True))
    inner_ops, results = importer.block(block, inner)
    ops.extend(inner_ops)
    env.update(zip(op.results, _marked(importer, ops, results, ends), strict=True))
    importer.calls.pop()
    importer.call_loc = outer


def _marked(
    importer: Importer, ops: list[Op], values: Sequence[Value], marks: Sequence[ShardingAttr | None]
) -> list[Value]:
    """Values as a function's signature marks its arguments or results, at its call."""
    loc = importer.call_loc
    pairs = zip(values, marks, strict=True)
    return [importer.mark(ops, value, mark, loc) for value, mark in pairs]


def _callback(importer: Importer, op: Any, env: Env, known: int) -> Op:
    """A call of a Python function, with the manual axes around it."""
    loc = importer.loc(op.location)
    stated = dict(entries_of(op))
    attrs = {n: importer.attribute(n, stated[n]) for n in _OF_CALLBACKS if n in stated}
    if not 0 <= int(attrs.get("number", -1)) < known:
        refuse(f"custom_call:{CALLBACK}", loc)
    attrs["held"] = importer.scopes[-1].held if importer.scopes else ()
    operands = tuple([env[v] for v in op.operands])
    results = tuple([importer.bind(env, result) for result in op.results])
    reads, makes = (tuple([importer.types[v] for v in values]) for values in (operands, results))
    return Op(OpKind(CALLBACK, reads, makes, attrs), operands, results, (), loc)


def _custom_call(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    """A custom call; the one scalar function that it may name becomes its `body`."""
    target = op.attributes["call_target_name"].value
    if target in _SHARDING_CALLS:
        env[op.results[0]] = env[op.operands[0]]
        return
    if target in (ENTERS, LEAVES):
        cross(importer, op, env)
        return
    if "called_computations" not in op.attributes:
        keep(importer.op(op, env), ops)
        return
    attrs = {name: importer.attribute(name, attr) for name, attr in entries_of(op)}
    names = [attr.value for attr in op.attributes["called_computations"]]
    function = importer.contents.functions.get(names[0]) if len(names) == 1 else None
    if function is not None:
        del attrs["called_computations"]
        attrs["body"] = importer.body(function.regions[0], op.name)
    keep(importer.op(op, env, attrs=attrs), ops)


def _foreign_tuple(importer: Importer, op: Any) -> FrontendError:
    """The error of a tuple that is an argument, or made by anything but `tuple`."""
    return FrontendError(
        f"{op.name} of tuples that the module does not make itself",
        source=importer.loc(op.location).source,
        fix="pass the elements one by one, without nesting",
    )
