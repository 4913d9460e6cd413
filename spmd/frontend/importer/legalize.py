"""Ops that StableHLO's own passes write with others, one at a time.

before: `%2 = stablehlo.dynamic_pad %x, %zero, %low, %high, %inner` with constant amounts
after:  `%2 = stablehlo.pad %x, %zero {edge_padding_low = ..., ...}`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func
from jaxlib.mlir.dialects import stablehlo as hlo
from jaxlib.mlir.passmanager import PassManager

from spmd.errors import UnsupportedOpError
from spmd.frontend.importer.attributes import defining_op
from spmd.frontend.importer.ops import Env, Handler, Importer
from spmd.ir.program import Op

hlo.register_stablehlo_passes()

# `refine-shapes` folds the sizes and amounts, which the pass for dynamic ops reads from constants.
_PASSES = (
    "builtin.module(stablehlo-refine-shapes,func.func(chlo-legalize-to-stablehlo,"
    "stablehlo-legalize-deprecated-ops,stablehlo-canonicalize-dynamism,cse))"
)
_DATA = {
    "chlo.constant_like": 1,
    "chlo.mulhi": 2,
    "stablehlo.broadcast": 1,
    "stablehlo.dot": 2,
    "stablehlo.dynamic_conv": 2,
    "stablehlo.dynamic_gather": 2,
    "stablehlo.dynamic_pad": 2,
    "stablehlo.get_dimension_size": 1,
    "stablehlo.real_dynamic_slice": 1,
    "stablehlo.set_dimension_size": 1,
}
"""Op -> how many of its operands are data; those behind them are sizes and amounts."""

_FOLDED = {
    f"stablehlo.{name}"
    for name in ("add", "concatenate", "constant", "convert", "get_dimension_size", "reshape")
}
"""Ops that sizes and amounts are made of."""


def _legalize(importer: Importer, op: Any, env: Env, ops: list[Op]) -> None:
    for result in op.results:
        importer.type(result.type)  # a dynamic shape is refused before the passes see it
    amounts = op.operands[_DATA[op.name] :]
    chain = [*dict.fromkeys(_makers(amounts)), op]
    made = {value for item in chain for value in item.results}
    given = [*dict.fromkeys(v for item in chain for v in item.operands if v not in made)]
    # The op is alone in a function, so that the passes take nothing else apart: CHLO's would also
    # write out `erf` and `top_k`, which stay one op. With it are the constants that it reads.
    builder: Any = func  # its stub lacks the extensions of the class
    with ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):

            @builder.FuncOp.from_py_func(*[value.type for value in given])  # type: ignore[untyped-decorator]
            def main(*arguments: Any) -> Any:
                values = dict(zip(given, arguments, strict=True))
                for item in chain:
                    copy = item.clone()
                    for i, value in enumerate(item.operands):
                        copy.operands[i] = values[value]
                    values.update(zip(item.results, copy.results, strict=True))
                return list(copy.results)

        PassManager.parse(_PASSES).run(module.operation)  # `module` keeps its block alive
    block = module.body.operations[0].regions[0].blocks[0]
    if any(item.name in LEGALIZED for item in block.operations):
        types = ", ".join(str(value.type) for value in op.operands)
        raise UnsupportedOpError(
            f"{op.name} cannot be partitioned: its sizes, amounts or strides are computed at run "
            "time",
            op=f"{op.name}({types}) -> {op.results[0].type}",
            source=importer.loc(op.location).source,
            fix="make these operands constants (refine the shapes, or fold constants first)",
        )
    inner = dict(zip(block.arguments, [env[v] for v in given], strict=True))
    found, results = importer.block(block, inner)
    ops += found
    env.update(zip(op.results, results, strict=True))


def _makers(values: Iterable[Any]) -> Iterator[Any]:
    """The ops that values are folded from, each behind those that it reads."""
    for maker in map(defining_op, values):
        if maker is not None and maker.name in _FOLDED:
            yield from _makers(maker.operands)
            yield maker


LEGALIZED: Mapping[str, Handler] = MappingProxyType(dict.fromkeys(_DATA, _legalize))
"""Ops that the passes write with others."""
