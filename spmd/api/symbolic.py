"""Modules with symbolic dims, at the sizes that a user gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd.errors import ArgumentError
from spmd.frontend.importer.module import argument_names, parse_module
from spmd.frontend.polymorphic import ArgumentDims, exported_dims, stated_dims
from spmd.frontend.refine import is_dynamic, refine, symbols_of
from spmd.frontend.sizes import size_of, symbols_in

Shape = Sequence[int]
Shapes = Sequence[Shape | None] | Mapping[str, Shape] | None
"""For each argument its shape, or None where the module says it; or name -> shape."""


def static_module(source: Any, symbols: Mapping[str, int] | None, shapes: Shapes = None) -> Any:
    """A module in memory, without dynamic shapes.

    Args:
      source: as `parse_module` takes it, or a `jax.export.Exported`.
      symbols: symbol -> value.
      shapes: of the arguments.

    Raises:
      FrontendError: a module that cannot be read, or cannot have these shapes.
      ArgumentError: a dim whose size is not known, or sizes for what is not there.
    """
    exported = source if hasattr(source, "mlir_module_serialized") else None
    module = parse_module(source if exported is None else exported.mlir_module_serialized)
    symbols = dict(symbols or {})
    if not is_dynamic(module):
        if symbols or shapes:
            raise ArgumentError(
                "the module's shapes are static",
                actual=f"symbols={symbols or None}, arg_shapes={shapes}",
                fix="leave out `symbols` and `arg_shapes`",
            )
        return module
    dims = stated_dims(module) if exported is None else exported_dims(exported)
    names = argument_names(module, start=len(symbols_of(module)))
    given = _given(shapes, names)
    _check_symbols(module, dims, symbols)
    sizes = [
        tuple(shape) if shape is not None else _sizes(name, argument, symbols)
        for name, argument, shape in zip(names, dims, given, strict=True)
    ]
    return refine(module, sizes, symbols)


def _given(shapes: Shapes, names: Sequence[str]) -> list[Shape | None]:
    """The shape that each argument is given."""
    if isinstance(shapes, Mapping):
        unknown = sorted(shapes.keys() - set(names))
        if unknown:
            raise ArgumentError(
                f"arg_shapes has {unknown[0]!r}, which is no argument",
                actual=f"arguments: {', '.join(names)}",
            )
        return [shapes.get(name) for name in names]
    if shapes is not None and len(shapes) != len(names):
        raise ArgumentError(
            "arg_shapes needs one entry for each argument",
            actual=f"{len(shapes)} entries",
            required=f"{len(names)}: {', '.join(names)}",
            fix="write None where the module says the shape",
        )
    return list(shapes or [None] * len(names))


def _check_symbols(module: Any, dims: Sequence[ArgumentDims], symbols: Mapping[str, int]) -> None:
    stated = [dim for argument in dims for dim in argument if dim is not None]
    known = {*symbols_in(stated), *symbols_of(module)}
    unknown = sorted(symbols.keys() - known)
    if unknown:
        raise ArgumentError(
            f"the module has no symbol {unknown[0]!r}",
            actual=f"symbols: {', '.join(sorted(known)) or 'none that it names'}",
            fix="correct `symbols`" if known else "give shapes instead: arg_shapes=[(8, 4), ...]",
        )


def _sizes(name: str, dims: ArgumentDims, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an argument, from what the module says of it."""
    if None in dims:
        shown = "x".join("?" if dim is None else str(dim) for dim in dims)
        example = tuple(8 if dim is None else dim for dim in dims)
        raise ArgumentError(
            f"argument {name} has a dynamic shape, {shown}, and the module names no symbols for it",
            fix=f"give its shape: arg_shapes={{{name!r}: {example}}}",
        )
    missing = [symbol for symbol in symbols_in(filter(None, dims)) if symbol not in symbols]
    if missing:
        raise ArgumentError(
            f"argument {name} has the shape ({', '.join(map(str, dims))}), and {missing[0]} has no "
            "value",
            fix=f"give it: symbols={{{missing[0]!r}: 8}}",
        )
    return tuple(size_of(dim, symbols) for dim in dims if dim is not None)
