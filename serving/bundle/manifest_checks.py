"""What must hold of a manifest, whether it was read or is about to be written."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from serving.bundle.function import BundleError, one_line
from serving.bundle.manifest import Entrypoint, Filled, Leaf, Manifest, Symbol
from serving.bundle.trees import check_template
from spmd.errors import FrontendError
from spmd.frontend.sizes import symbols_in

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""What may be a part of a path."""


def check_name(name: str, what: str) -> str:
    """A name that may be a part of a path; else a `BundleError`."""
    if not NAME.fullmatch(name):
        raise BundleError(
            f"{what} is called {name[:60]!r}; a name has letters, digits, `_`, `-` and `.` and "
            "begins with a letter, a digit or `_`"
        )
    return name


def check(manifest: Manifest, where: str) -> None:
    """Raise a `BundleError` where the members of a manifest contradict each other."""
    if manifest.primary not in manifest.functions:
        raise BundleError(f"{where}: there is no function {manifest.primary[:60]!r} (primary)")
    _check_symbols(manifest, where)
    known = {leaf.path: leaf for leaf in (*manifest.weights, *manifest.state)}
    if len(known) != len(manifest.weights) + len(manifest.state):
        raise BundleError(f"{where} lists a leaf twice")
    for function in manifest.functions.values():
        _check_function(function, manifest, known, where)
    for name in (
        *manifest.tokenizer,
        *(f for e in manifest.functions.values() for f in e.modules.values()),
    ):
        if name not in manifest.files:
            raise BundleError(f"{where}: {name[:100]!r} is not among the files")


def _check_symbols(manifest: Manifest, where: str) -> None:
    weights = [dim for leaf in manifest.weights for dim in leaf.shape]
    leaves: list[Leaf] = [*manifest.state]
    for entry in manifest.functions.values():
        leaves += [*(leaf for a in entry.arguments for leaf in a.leaves), *entry.outputs]
    try:
        used = set(symbols_in({dim for leaf in leaves for dim in leaf.shape}))
    except FrontendError as error:
        raise BundleError(f"{where}: {one_line(error)}") from error
    if any(isinstance(dim, str) for dim in weights):
        raise BundleError(f"{where}: weights have symbolic dims; only state and inputs may")
    if used != manifest.symbols.keys():
        differing = sorted(used ^ manifest.symbols.keys())[0]
        raise BundleError(f"{where}: the symbol {differing[:60]!r} is only in shapes, or in none")


def _check_function(
    function: Entrypoint, manifest: Manifest, known: Mapping[str, Leaf], where: str
) -> None:
    where = f"{where}: functions: {function.name}"
    if sum(argument.role == "state" for argument in function.arguments) > 1:
        raise BundleError(f"{where} has more than one argument that is the state")
    for leaf in (*function.leaves("weights"), *function.leaves("state")):
        other = known.get(leaf.path)
        if other is None or (other.shape, other.dtype) != (leaf.shape, leaf.dtype):
            raise BundleError(
                f"{where} takes {leaf.path[:100]} {leaf.dtype}{list(leaf.shape)}, and the bundle "
                + ("has no such leaf" if other is None else f"has {other.dtype}{list(other.shape)}")
            )
    paths = [leaf.path for a in function.arguments for leaf in a.leaves]
    if len(set(paths)) != len(paths):
        raise BundleError(f"{where} has two leaves of one path")
    check_template(function.tree, len(function.outputs), where)


def check_symbol(name: str, symbol: Symbol, where: str) -> None:
    """Raise a `BundleError` unless a symbol has a name, and a value."""
    if not name.isidentifier():
        raise BundleError(f"{where}: {name[:60]!r} is no name of a symbol")
    if symbol.multiple_of < 1 or symbol.at_least < 1:
        raise BundleError(f"{where}: {name} has no bounds of a size: {symbol}")


def check_fill(leaf: Filled) -> None:
    """Raise a `BundleError` unless an array of a leaf's dtype can hold its number."""
    dtype = np.dtype(leaf.dtype)
    if dtype.kind not in "biu":
        return
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not (limits[0] <= leaf.fill <= limits[1] and leaf.fill == int(leaf.fill)):
        raise BundleError(f"{leaf.path} is {leaf.dtype} and cannot be filled with {leaf.fill}")
