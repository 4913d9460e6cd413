"""StableHLO modules, which any framework may have written, compiled like functions."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmd.api.arguments import Specs, leaf_entries, one_for_each
from spmd.api.compiled import Compiled, Lowered
from spmd.api.tracing import axis_types_of, topology_of
from spmd.compiler import Request, compile_module
from spmd.errors import ArgumentError
from spmd.frontend import refine
from spmd.frontend.importer.module import argument_names, boundary_names, parse_module, signature
from spmd.frontend.sizes import size_of, symbols_in
from spmd.ir.types import numpy_dtype
from spmd.mesh.spec import as_mesh, platform_of
from spmd.options import Options
from spmd.progress import progress

Shape = Sequence[int]
Shapes = Sequence[Shape | None] | Mapping[str, Shape] | None
"""A shape for each argument in order, None if the module says it; or a mapping, name -> shape."""


def compile_stablehlo(
    module_or_path: Any,
    mesh: Any,
    arg_specs: Specs = None,
    result_specs: Specs = None,
    options: Options | None = None,
    updates: Sequence[tuple[int, int]] = (),
    symbols: Mapping[str, int] | None = None,
    arg_shapes: Shapes = None,
) -> Compiled:
    """Compiles a StableHLO module that any framework wrote; arguments as for `lower_stablehlo`.

    Returns:
      A program to call with one array for each argument; it returns a tuple of arrays.

    Raises:
      FrontendError: a module that cannot be read; and the other errors of `lower_stablehlo`.
    """
    lowered = lower_stablehlo(
        module_or_path, mesh, arg_specs, result_specs, options, updates, symbols, arg_shapes
    )
    return lowered.compile()


def lower_stablehlo(
    module_or_path: Any,
    mesh: Any,
    arg_specs: Specs = None,
    result_specs: Specs = None,
    options: Options | None = None,
    updates: Sequence[tuple[int, int]] = (),
    symbols: Mapping[str, int] | None = None,
    arg_shapes: Shapes = None,
) -> Lowered:
    """Plans and partitions a StableHLO module: no device is needed, XLA is not called.

    Args:
      module_or_path: a module in memory, its text or bytecode, or the path of a file with either;
        or a `jax.export.Exported`.
      mesh: the mesh; `Mesh(None, (4, 2), ("data", "model"))` has no devices.
      arg_specs: for each argument of the module's function a spec, or None (open); or a mapping
        from names to specs. Names are the paths that the module has, else `arg0`, `arg1`, ...
      result_specs: the same for its results.
      options: compile options.
      updates: pairs (result number, argument number): the argument is donated, and the result gets
        its sharding and its memory.
      symbols: the size of each symbolic dim, by symbol, for a module that `jax.export` wrote so.
      arg_shapes: for dynamic dims without symbols: for each argument its shape, or None if the
        module says it; or a mapping from names to shapes.

    Raises:
      FrontendError: a module that cannot be read, or cannot have these shapes.
      ArgumentError: an update of another shape or dtype than its argument, a dim without a size,
        or sizes that a module with static shapes has no use for.
      SpecError: a spec for no argument or result, or one that does not fit.

    Example:
      >>> lower_stablehlo("model.mlirbc", mesh, symbols={"batch": 32})
    """
    options = options or Options()
    module = static_module(module_or_path, symbols, arg_shapes, platform_of(as_mesh(mesh)))
    request = module_request(module, mesh, arg_specs, result_specs, options, updates)
    with progress("module", options.shows_progress):
        return Lowered(request, compile_module(request, options), options)


def module_request(
    module: Any,
    mesh: Any,
    arg_specs: Specs,
    result_specs: Specs,
    options: Options,
    updates: Sequence[tuple[int, int]] = (),
) -> Request:
    """Returns the compiler's input for a static module; arguments as for `lower_stablehlo`.

    It is as if a function of as many arrays had been traced, which returns a tuple.
    """
    own = as_mesh(mesh)
    taken, given = signature(module)
    replaced, replacing = [a for _, a in updates], [r for r, _ in updates]
    for result, argument in updates:
        known = 0 <= result < len(given) and 0 <= argument < len(taken)
        is_once = replaced.count(argument) == replacing.count(result) == 1
        if not known or not is_once or given[result] != taken[argument]:
            raise ArgumentError(
                f"result {result} cannot take the place of argument {argument}",
                actual=f"{given[result]} for {taken[argument]}" if known else "there is none",
                required="a result and an argument of one shape and dtype, each in one update",
                fix="correct `updates`",
            )
    names = boundary_names(module)
    args, results = (
        tuple(jax.ShapeDtypeStruct(type_.shape, numpy_dtype(type_.dtype)) for type_ in types)
        for types in (taken, given)
    )

    def entries(specs: Specs, structs: Sequence[Any], names: Sequence[str], what: str) -> Any:
        each = one_for_each(specs, names, f"{what}_specs", what)
        parts = zip(each, structs, names, strict=True)
        return tuple(leaf_entries(spec, s, f"{what} {name}", own) for spec, s, name in parts)

    return Request(
        module,
        own,
        options.topology or topology_of(own),
        *names,
        entries(arg_specs, args, names[0], "argument"),
        entries(result_specs, results, names[1], "result"),
        links=tuple(updates),
        donated=tuple(sorted(argument for _, argument in updates)),
        platform=platform_of(own),
        args=(args, {}),
        out=results,
        axis_types=axis_types_of(own, [mesh]),
    )


def static_module(
    source: Any, symbols: Mapping[str, int] | None, shapes: Shapes = None, platform: str = ""
) -> Any:
    """Returns a module in memory with static shapes, its symbols replaced by their sizes.

    `source` is as for `lower_stablehlo`; of one exported for several platforms `platform` is taken.
    FrontendError: it cannot be read, or cannot have these shapes. ArgumentError: a dim whose size
    is not known, sizes for what is not there, or `source` is for several other platforms.
    """
    exported = source if hasattr(source, "mlir_module_serialized") else None
    module = parse_module(source if exported is None else exported.mlir_module_serialized)
    symbols, platforms = dict(symbols or {}), getattr(exported, "platforms", ())
    if platform and len(platforms) > 1:
        if platform not in platforms:
            raise ArgumentError(
                f"the function was exported for {', '.join(platforms)}",
                required=platform,
                fix=f"export it for that: jax.export.export(fn, platforms=[{platform!r}])",
            )
        symbols[refine.PLATFORM] = platforms.index(platform)
    if not refine.is_dynamic(module):
        if symbols or shapes:
            raise ArgumentError(
                "the module's shapes are static",
                actual=f"symbols={symbols or None}, arg_shapes={shapes}",
                fix="leave out `symbols` and `arg_shapes`",
            )
        return module
    dims = refine.stated_dims(module) if exported is None else refine.exported_dims(exported)
    names = argument_names(module, start=len(refine.symbols_of(module)))
    given = one_for_each(shapes, names, "arg_shapes", "argument")
    stated = [dim for argument in dims for dim in argument if dim is not None]
    known = {*symbols_in(stated), *refine.symbols_of(module)}
    if unknown := sorted(symbols.keys() - known):
        raise ArgumentError(
            f"the module has no symbol {unknown[0]!r}",
            actual=f"symbols: {', '.join(sorted(known)) or 'none that it names'}",
            fix="correct `symbols`" if known else "give shapes instead: arg_shapes=[(8, 4), ...]",
        )
    sizes = [
        tuple(shape) if shape is not None else _sizes(name, argument, symbols)
        for name, argument, shape in zip(names, dims, given, strict=True)
    ]
    return refine.refine(module, sizes, symbols)


def _sizes(name: str, dims: refine.ArgumentDims, symbols: Mapping[str, int]) -> tuple[int, ...]:
    unknown = (
        ["?"] if None in dims else [x for x in symbols_in(filter(None, dims)) if x not in symbols]
    )
    if unknown:
        shown = ", ".join("?" if dim is None else str(dim) for dim in dims)
        example = tuple(8 if dim is None else dim for dim in dims)
        raise ArgumentError(
            f"argument {name} has the shape ({shown}), and {unknown[0]} has no value",
            fix=f"give its shape: arg_shapes={{{name!r}: {example}}}"
            if None in dims
            else f"give it: symbols={{{unknown[0]!r}: 8}}",
        )
    return tuple(size_of(dim, symbols) for dim in dims if dim is not None)
