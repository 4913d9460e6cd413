"""Calls by which jax writes ops whose attributes would be symbolic dims, as these ops again.

    for any n:    %3 = custom_call @stablehlo.dynamic_reduce_window(%x, %zero, %window, ...) : ?x4
    for n = 8:    %3 = reduce_window(%x, %zero) {window_dimensions = [8, 1], ...} : 8x4

StableHLO's passes do not know these calls. `announce` adds the shapes of their results to them as
operands, by which the passes find the types of all values; then `settle` makes the ops.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.frontend.importer.contents import cloned, defining_op, entries_of, items_of, ops_in

_APPROX_TOP_K, _TOP_K = "stablehlo.dynamic_approx_top_k", "stablehlo.dynamic_top_k"
_RANDOM, _WINDOW = "stablehlo.dynamic_rng_bit_generator", "stablehlo.dynamic_reduce_window"
_AMOUNTS = {_APPROX_TOP_K: 1, _RANDOM: 1, _TOP_K: 1, _WINDOW: 5}
"""Call -> how many of its last operands are attributes of the op."""

_ELEMENTS: Any = ir.DenseElementsAttr  # its stub does not know arrays


def announce(root: Any) -> None:
    """Adds the shapes of their results to the dynamic calls inside an op, as operands."""
    stated = "indices_of_shape_operands"
    for op in ops_in(root):
        if _target(op) in _AMOUNTS and stated not in op.attributes:
            with ir.InsertionPoint(op), op.location:
                operands = [*op.operands, *_result_shapes(op)]
            numbers = _ELEMENTS.get(np.arange(len(op.operands), len(operands)))
            _replaced(op, op.name, operands, {**dict(entries_of(op)), stated: numbers})


def settle(root: Any, functions: Mapping[str, Any]) -> None:
    """Makes the ops that the dynamic calls inside an op stand for, once their dims are known."""
    for op in ops_in(root):
        count = _AMOUNTS.get(_target(op), 0)
        makers = [defining_op(value) for value in list(op.operands)[-count:]] if count else []
        if not makers or any(m is None or m.name != "stablehlo.constant" for m in makers):
            continue
        name, attributes = _settled(op, [np.asarray(m.attributes["value"]) for m in makers])
        bodies = op.attributes["called_computations"] if name == "stablehlo.reduce_window" else ()
        sources = [functions[body.value].regions[0].blocks[0] for body in bodies]
        made = _replaced(op, name, list(op.operands)[:-count], attributes, len(sources))
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


def _replaced(op: Any, name: str, operands: Any, attributes: Any, regions: int = 0) -> Any:
    types, place = [value.type for value in op.results], ir.InsertionPoint(op)
    made = ir.Operation.create(
        name, types, operands, attributes, regions=regions, loc=op.location, ip=place
    )
    for old, new in zip(op.results, made.results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()
    return made


def _result_shapes(op: Any) -> Sequence[Any]:
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
    """Returns the name and the attributes of the op that a call stands for."""
    if _target(op) == _RANDOM:
        return "stablehlo.rng_bit_generator", {"rng_algorithm": op.attributes["rng_algorithm"]}
    if _target(op) == _WINDOW:
        names = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
        arrays = [ir.DenseI64ArrayAttr.get(amount.tolist()) for amount in amounts[:-1]]
        padding = _ELEMENTS.get(amounts[-1].astype(np.int64))
        return "stablehlo.reduce_window", {
            **dict(zip(names, arrays, strict=True)),
            "padding": padding,
        }
    k = {"top_k": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), int(amounts[0]))}
    if _target(op) == _TOP_K:
        return "chlo.top_k", {"k": k["top_k"]}
    config = ir.DictAttr.get({**items_of(op.attributes["mhlo.backend_config"]), **k})
    own = {"mhlo.backend_config": config, "call_target_name": ir.StringAttr.get("ApproxTopK")}
    return op.name, {**dict(entries_of(op)), **own}
