"""Shardy's propagation, the peer that ours is measured against: marks in, shardings out.

jaxlib carries Shardy's passes. `run_all` runs them on any number of modules in a process of their
own, because a broken assertion inside them ends the process.

A module's text is parsed without locations, so that an op's location is its line in that text:
that is how values of Shardy's result and of our program find each other.
"""

import multiprocessing
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from spmd.compiler import Request
from spmd.frontend.importer.contents import axes_of
from spmd.frontend.marks import Entries
from spmd.mesh.mesh import Mesh

PIPELINE = "builtin.module(sdy-propagation-pipeline)"
TIMEOUT = 600

Axis = tuple[str, int, int]
"""An axis's name; product of the sizes of its more major sub-axes, and the size (0: all of it)."""


class Value(NamedTuple):
    """One value of a module after Shardy's propagation."""

    # line of the op that makes it, then of the calls around that, innermost first; empty for
    # arguments and results of the module
    lines: tuple[int, ...]
    op: str  # the op's name, `argument` or `result`
    number: int  # which of the op's results
    dims: tuple[tuple[Axis, ...], ...]  # axes of each dim, major first


class Failure(NamedTuple):
    """What became of a module that Shardy could not process."""

    message: str


def marked_module(request: Request) -> Any:
    """A copy of the module with the marks of its arguments and results written into it."""
    module = request.module
    with module.context:
        copy = ir.Module.parse(module.operation.get_asm(binary=True))
        main = main_of(copy)
        for name, marks in (
            ("arg_attrs", request.arg_entries),
            ("res_attrs", request.result_entries),
        ):
            if any(marks):
                attrs = [ir.Attribute.parse(_mark_text(entries, request.mesh)) for entries in marks]
                main.attributes[name] = ir.ArrayAttr.get(attrs)
    return copy


def marked_text(request: Request) -> str:
    """The text of `marked_module`, an op on every line."""
    return str(marked_module(request).operation.get_asm(enable_debug_info=False))


def main_of(module: Any) -> Any:
    """The function that a module is for."""
    functions = [op.operation for op in module.body.operations if op.operation.name == "func.func"]
    named = [f for f in functions if ir.StringAttr(f.attributes["sym_name"]).value == "main"]
    return (named or functions)[0]


def _mark_text(entries: Entries | None, mesh: Mesh) -> str:
    if not entries:
        return "{}"
    axes = ", ".join(f'"{n}"={s}' for n, s in zip(mesh.axis_names, mesh.sizes, strict=True))
    dims = ", ".join(
        "{?}" if names is None else "{" + ", ".join(f'"{n}"' for n in names) + "}"
        for names in entries
    )
    return f"{{sdy.sharding = #sdy.sharding<mesh<[{axes}]>, [{dims}]>}}"


def run(module: Any) -> float:
    """Runs Shardy's propagation on a module in place; the seconds that it took."""
    with module.context:
        pipeline = PassManager.parse(PIPELINE)
        start = time.perf_counter()
        pipeline.run(module.operation)
        return time.perf_counter() - start


# Reading a propagated module.


def values_of(module: Any) -> Iterator[Value]:
    """Arguments, op results (as if calls were inlined) and results of a propagated module."""
    functions = {
        ir.StringAttr(op.attributes["sym_name"]).value: op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    main = main_of(module)
    type_ = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    for what, types in (("argument", type_.inputs), ("result", type_.results)):
        attrs = main.attributes
        key = "arg_attrs" if what == "argument" else "res_attrs"
        entries = list(ir.ArrayAttr(attrs[key])) if key in attrs else [None] * len(types)
        for number, (item, own) in enumerate(zip(entries, types, strict=True)):
            yield Value((), what, number, _entry_dims(item, _rank(own)))
    yield from _block_values(main.regions[0].blocks[0], functions, ())


def _block_values(
    block: Any, functions: Mapping[str, Any], calls: tuple[int, ...]
) -> Iterator[Value]:
    for item in block.operations:
        op = item.operation
        lines = (_line(op.location), *calls)
        if op.name in ("func.call", "sdy.named_computation"):
            callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            yield from _block_values(functions[callee].regions[0].blocks[0], functions, lines)
            continue
        if op.name.startswith("stablehlo.") and op.name.partition(".")[2] in _REGIONS:
            for region in op.regions:
                yield from _block_values(region.blocks[0], functions, calls)
        shardings = _per_value(op)
        for number, result in enumerate(op.results):
            rank = _rank(result.type)
            dims = shardings[number] if shardings else ((),) * rank
            yield Value(lines, _NAMES.get(op.name, op.name), number, dims or ((),) * rank)


_REGIONS = ("while", "case", "if")
_NAMES = {"sdy.constant": "stablehlo.constant", "sdy.reshard": "sdy.sharding_constraint"}


def _line(location: Any) -> int:
    while isinstance(location, (ir.NameLoc, ir.CallSiteLoc)):
        location = location.child_loc if isinstance(location, ir.NameLoc) else location.callee
    return location.start_line if isinstance(location, ir.FileLineColLoc) else 0


def _rank(type_: Any) -> int:
    return ir.ShapedType(type_).rank if isinstance(type_, ir.ShapedType) else 0


def _per_value(op: Any) -> list[tuple[tuple[Axis, ...], ...]]:
    """Shardings of an op's results; empty where it has none."""
    if op.name in ("sdy.reshard", "sdy.sharding_constraint"):
        return [axes_of(op.attributes["sharding"])]
    if "sdy.sharding" not in op.attributes:
        return []
    from jaxlib.mlir.dialects import sdy

    per_value = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"])
    return [axes_of(sharding) for sharding in per_value.shardings]


def _entry_dims(item: Any, rank: int) -> tuple[tuple[Axis, ...], ...]:
    dictionary: Any = ir.DictAttr(item) if item is not None else ()
    entries = {e.name: e.attr for e in dictionary}
    return axes_of(entries["sdy.sharding"]) if "sdy.sharding" in entries else ((),) * rank


# Many modules in a process of their own.


def run_all(texts: Mapping[str, str]) -> dict[str, list[Value] | Failure]:
    """Shardy's result for each of some modules, given by name as text."""
    found: dict[str, list[Value] | Failure] = {}
    while rest := [name for name in texts if name not in found]:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            for name in rest:
                try:
                    found[name] = process.submit(propagated, texts[name]).result(TIMEOUT)
                except BrokenProcessPool as error:
                    found[name] = Failure(str(error))
                    break
    return found


def propagated(text: str) -> list[Value] | Failure:
    """Shardy's result for a module."""
    try:
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
            run(module)
            return list(values_of(module))
    except ir.MLIRError as error:
        return Failure(str(error)[:400])
