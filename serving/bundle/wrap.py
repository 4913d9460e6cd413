"""A StableHLO module that another framework wrote, as a bundle.

    python -m spmd.serving.bundle.wrap model.mlir --out model-bundle --weights model.safetensors

Arguments of the module that have a tensor's name are weights, all others are inputs.
"""

import fnmatch
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from spmd.api import static_module
from spmd.cli.flags import Parser, Switch
from spmd.cli.specs import symbol_values
from spmd.errors import SpmdError
from spmd.frontend.artifact import calls_of, module_artifact
from spmd.frontend.importer.module import boundary_names, parse_module, signature
from spmd.frontend.refine import exported_dims, is_dynamic, stated_dims
from spmd.frontend.sizes import size_of, symbols_in
from spmd.ir.types import TensorType, numpy_dtype
from spmd.serving.bundle.describe import check_manifest, leaves_of, plain_specs
from spmd.serving.bundle.folder import new_folder
from spmd.serving.bundle.function import BundleError, one_line
from spmd.serving.bundle.manifest import (
    AUTO,
    PLATFORMS,
    STORED_AS,
    WEIGHTS,
    ArgumentEntry,
    Entrypoint,
    LeafEntry,
    Manifest,
    Symbol,
)
from spmd.serving.bundle.tensors import lazy_tensors, write_weights
from spmd.serving.bundle.write import finish, producer

FIRST, STEP, LAST = 16, 16, 64
"""Sizes that are tried: multiples of what kernels and constraints like to have."""


class Read(NamedTuple):
    """A module that was read."""

    module: Any  # as it is to be written
    static: Any  # the same, or what it is at some sizes
    # the types of its arguments and results; their sizes may be expressions of symbols
    signature: tuple[Sequence[TensorType], Sequence[TensorType]]
    symbols: tuple[str, ...] = ()  # those that have no size yet


def read_module(source: Any, symbols: Mapping[str, int] | None) -> Read:
    """A module at sizes that are given; without any, its symbols stay.

    Args:
      source: as `wrap_stablehlo` takes it.
      symbols: name -> value.

    Raises:
      BundleError: dims of results that are no linear expressions of the symbols.
      SpmdError: a module that cannot be read, or whose dynamic dims have no names.
    """
    exported = source if hasattr(source, "mlir_module_serialized") else None
    module = parse_module(source if exported is None else exported.mlir_module_serialized)
    if symbols or not is_dynamic(module):
        static = static_module(module if exported is None else source, symbols)
        return Read(static, static, signature(static))
    dims: Any = stated_dims(module) if exported is None else exported_dims(exported)
    stated = [dim for argument in dims for dim in argument if dim is not None]
    names = symbols_in(stated)
    base = dict.fromkeys(names, FIRST)
    given = module if exported is None else source
    static = static_module(given, base)  # which raises where a dim has no name
    types, first = signature(static)
    moved = [_results(given, {**base, name: FIRST + STEP}) for name in names]
    last = dict.fromkeys(names, LAST)
    checked = _results(given, last)
    results = []
    for i, type_ in enumerate(first):
        shape = (
            _fitted([m[i][d] for m in moved], size, names, checked[i][d], last)
            for d, size in enumerate(type_.shape)
        )
        results.append(type_._replace(shape=tuple(shape)))
    args = [
        type_._replace(shape=tuple(dim if dim is not None else 0 for dim in argument))
        for type_, argument in zip(types, dims, strict=True)
    ]
    return Read(module, static, (args, results), names)


def _results(given: Any, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    return [tuple(type_.shape) for type_ in signature(static_module(given, sizes))[1]]


def _fitted(
    moved: Sequence[int], size: int, names: Sequence[str], checked: int, last: Mapping[str, int]
) -> Any:
    """The size of a dim: from that at `FIRST`, and those with each symbol larger by `STEP`."""
    slopes = {n: (m - size) // STEP for n, m in zip(names, moved, strict=True) if m != size}
    rest = size - sum(slope * FIRST for slope in slopes.values())
    terms = [name if slope == 1 else f"{slope}*{name}" for name, slope in slopes.items()]
    text = " + ".join([*terms, *([str(rest)] if rest else [])]) if slopes else size
    if size_of(text, last) != checked:
        raise BundleError(
            "a dim of a result is no multiple of a symbol and a number added: give the symbols "
            "sizes"
        )
    return text


Parts = tuple[str, ...]


def parts_of(name: str) -> Parts:
    """`model.layers.0/w` -> `("model", "layers", "0", "w")`."""
    return tuple(part for part in name.replace(".", "/").split("/") if part)


def matched(tensors: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    """The argument that each tensor is for: of its name, but for a prefix that all of them have.

    Args:
      tensors: names in the file.
      arguments: of the module.

    Returns:
      Tensor -> argument; empty if no prefixes make all tensors arguments.

    Raises:
      BundleError: several prefixes do.

    Example:
      >>> matched(["model.w", "model.b"], ["params/w", "params/b", "x"])
      {'model.w': 'params/w', 'model.b': 'params/b'}
    """
    if set(tensors) <= set(arguments):
        return {name: name for name in tensors}
    known = {parts_of(name): name for name in arguments}
    wanted = {name: parts_of(name) for name in tensors}
    columns = zip(*(parts[:-1] for parts in wanted.values()), strict=False)
    shared = [*itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    for cut in range(len(shared) + 1):
        tails = {name: parts[cut:] for name, parts in wanted.items()}
        first = next(iter(tails.values()))
        fronts = [a[: len(a) - len(first)] for a in known if first and a[-len(first) :] == first]
        fitting = [q for q in fronts if all(q + tail in known for tail in tails.values())]
        if len(fitting) > 1:
            names = " and ".join("/".join(front) or "none" for front in fitting[:3])
            raise BundleError(
                f"arguments of several prefixes are called like the weights ({names}): give the "
                "weights the names of the arguments"
            )
        if fitting:
            return {name: known[fitting[0] + tail] for name, tail in tails.items()}
    return {}


def own_specs(
    specs: Mapping[str, Any], tensors: Mapping[str, str], paths: Iterable[str]
) -> dict[str, Any]:
    """Specs by the model's own names, as specs by paths of the bundle.

    Args:
      specs: pattern -> spec. A pattern may be of paths (`weights/params/w`), of the file's names
        (`model.layers.*.w`), of the arguments' (`params/layers/*/w`), or of what these share
        (`layers.*.w`); `.` and `/` are alike in it.
      tensors: tensor -> argument.
      paths: of all leaves.

    Returns:
      Path or pattern of paths -> spec. Patterns that match nothing stay as they are.
    """
    known = list(paths)
    found: dict[str, Any] = {}
    for pattern, spec in specs.items():
        if any(path == pattern or fnmatch.fnmatchcase(path, pattern) for path in known):
            found.setdefault(pattern, spec)
            continue
        glob = "/".join(parts_of(pattern))
        fitting = [
            f"{WEIGHTS}/{argument}"
            for tensor, argument in tensors.items()
            if any(fnmatch.fnmatchcase(name, glob) for name in _spellings(tensor, argument))
        ]
        for path in fitting or [pattern]:
            found.setdefault(path, spec)
    return found


def _spellings(tensor: str, argument: str) -> list[str]:
    one, other = parts_of(tensor), parts_of(argument)
    shared = 0
    while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
        shared += 1
    return ["/".join(parts) for parts in (one, other, one[len(one) - shared :])]


FILE = "functions/main.mlirbc"


def wrap_stablehlo(
    folder: str | Path,
    module: Any,
    *,
    weights: Mapping[str, Any] | str | Path | None = None,
    arg_names: Sequence[str] | None = None,
    result_names: Sequence[str] | None = None,
    specs: Mapping[str, Any] | None = None,
    contract: Mapping[str, Any] | None = None,
    name: str = "bundle",
    console: Console | None = None,
    symbols: Mapping[str, int] | None = None,
    auto: bool = False,
) -> None:
    """Write a bundle with one function, `main`, from a StableHLO module.

    Args:
      folder: new or empty.
      module: a module in memory, its text or bytecode, or the path of a file with either.
      weights: name of an argument -> array, or a file of safetensors; they need not be in memory
        together. What is not among them is an input. All names may have a prefix that those of
        arguments lack, or the other way round; `.` and `/` are alike.
      arg_names: of the module's arguments; as the module has them (`arg0`, ... where it has none)
        if left out.
      result_names: the same of its results.
      specs: as for `write_bundle`; weights are called `weights/<name>`, or as the model calls them.
      contract: what callers have to know, for JSON.
      name: what the bundle is called.
      symbols: sizes of the module's symbolic dims, as for `spmd.compile_stablehlo`; if left out,
        whoever loads the bundle says them.
      auto: whether the compiler chooses specs where there are none, for the mesh that the bundle is
        loaded on, as for `load_bundle`.

    Raises:
      BundleError: a module that cannot be read, names or weights that do not fit it, or a folder
        that cannot be written.

    Example:
      >>> wrap_stablehlo("model-bundle", "model.mlir", weights="model.safetensors")
    """
    try:
        read = read_module(module, symbols)
        (args, results), names = read.signature, boundary_names(read.static)
        data, calls = module_artifact(read.module), calls_of(read.static)
    except SpmdError as error:
        raise BundleError(f"the module cannot be wrapped: {one_line(error)}") from error
    arg_names = _named("argument", args, names[0], arg_names)
    result_names = _named("result", results, names[1], result_names)
    arrays = lazy_tensors(weights) if isinstance(weights, str | Path) else dict(weights or {})
    tensors = matched(list(arrays), arg_names) if arrays else {}
    unused = sorted(arrays.keys() - tensors.keys())
    if unused:
        raise BundleError(
            f"no argument of the module is called {unused[0]!r}; they are "
            f"{', '.join(arg_names[:8])}{', ...' if len(arg_names) > 8 else ''}"
        )
    held = {argument: arrays[tensor] for tensor, argument in tensors.items()}
    arguments = tuple(
        ArgumentEntry(n, "weights", (_leaf(f"{WEIGHTS}/{n}", type_),))
        if n in held
        else ArgumentEntry(n, "input", (_leaf(n, type_),))
        for n, type_ in zip(arg_names, args, strict=True)
    )
    entry = Entrypoint(
        name="main",
        tags={},
        modules=dict.fromkeys(PLATFORMS, FILE),
        arguments=arguments,
        outputs=tuple(_leaf(n, t) for n, t in zip(result_names, results, strict=True)),
        tree=list(range(len(results))),
        custom_calls=calls.custom_calls,
        composites=calls.composites,
    )
    paths = [leaf.path for leaf in entry.leaves()]
    paths += [f"outputs/{leaf.path}" for leaf in entry.outputs]
    manifest = Manifest(
        name=name,
        producer=producer(),
        primary="main",
        functions={"main": entry},
        weights=entry.leaves("weights"),
        state=(),
        specs=plain_specs(own_specs(specs or {}, tensors, paths)),
        contract={**({AUTO: True} if auto else {}), **(contract or {})},
        symbols=dict.fromkeys(read.symbols, Symbol()),
    )
    ordered = [held[leaf.path.removeprefix(f"{WEIGHTS}/")] for leaf in manifest.weights]
    for leaf, array in zip(manifest.weights, ordered, strict=True):
        (given,) = leaves_of(array, leaf.path)
        if given != leaf:
            raise BundleError(
                f"{leaf.path} is {given.dtype}{list(given.shape)}, and the module takes "
                f"{leaf.dtype}{list(leaf.shape)}"
            )
    check_manifest(manifest)
    with new_folder(folder) as unfinished:
        (unfinished / "functions").mkdir()
        (unfinished / FILE).write_bytes(data)
        if manifest.weights:
            write_weights(unfinished / WEIGHTS, manifest.weights, ordered, console=console)
        finish(unfinished, manifest, console)


def _named(
    what: str, types: Sequence[Any], found: Sequence[str], given: Sequence[str] | None
) -> Sequence[str]:
    if given is None:
        return found
    if len(given) != len(types) or len(set(given)) != len(given):
        raise BundleError(
            f"the module has {len(types)} {what}s; give each a name of its own, not {list(given)}"
        )
    return given


def _leaf(path: str, type_: TensorType) -> LeafEntry:
    dtype = numpy_dtype(type_.dtype).name if type_.dtype != "token" else "token"
    if dtype not in STORED_AS:
        raise BundleError(f"{path} is {dtype}, not one of {', '.join(STORED_AS)}")
    return LeafEntry(path, type_.shape, dtype)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    parser = Parser("python -m spmd.serving.bundle.wrap", "Make a bundle of a StableHLO module.")
    parser.add_argument("module", help="text, bytecode or portable artifact")
    parser.add_argument("--out", required=True, help="the folder to make")
    parser.add_argument("--weights", help="a file of safetensors: names are those of arguments")
    parser.add_argument("--arg_names", help="names of the module's arguments, by commas")
    parser.add_argument("--result_names", help="names of its results, by commas")
    parser.add_argument(
        "--symbols",
        type=symbol_values,
        help="sizes of symbolic dims, as in n=128 (default: whoever loads the bundle says them)",
    )
    parser.add_argument(
        "--specs",
        help="how arrays are split: JSON, or a file of it: a pattern of names -> an axis or null "
        'for each dim, as in {"layers.*.w": [null, "model"]}',
    )
    parser.add_argument(
        "--auto",
        action=Switch,
        default=False,
        help="the compiler chooses specs where there are none, when the bundle is loaded",
    )
    parser.add_argument("--name", default="bundle", help="what the bundle is called")
    given = parser.parse_args(arguments)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    try:
        wrap_stablehlo(
            given.out,
            Path(given.module),
            weights=given.weights,
            arg_names=given.arg_names.split(",") if given.arg_names else None,
            result_names=given.result_names.split(",") if given.result_names else None,
            name=given.name,
            console=console,
            symbols=given.symbols,
            specs=_read_specs(given.specs),
            auto=given.auto,
        )
    except (BundleError, OSError) as error:
        sys.exit(f"error: {error}")
    console.print(f"wrote {given.out}")
    if not given.specs and not given.auto:
        console.print(
            "note: it has no specs: on several devices the compiler may split nothing; --specs "
            "says how arrays are split, --auto lets the compiler choose"
        )


def _read_specs(text: str | None) -> dict[str, Any]:
    """Specs as a flag has them: lists of axes, null, and "..."."""
    if text is None:
        return {}
    is_file = not text.lstrip().startswith("{")
    where = text if is_file else "--specs"
    try:
        specs = json.loads(Path(text).read_text(encoding="utf-8") if is_file else text)
    except ValueError as error:
        raise BundleError(f"{where} is no JSON: {error}") from error
    if not isinstance(specs, dict) or not all(isinstance(s, list) for s in specs.values()):
        raise BundleError(f'{where} has to be like {{"layers.*.w": [null, "model"]}}')
    return specs


if __name__ == "__main__":
    main()
