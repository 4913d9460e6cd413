"""`manifest.json`: how a manifest is written, and how it is read, every member checked.

Nothing here is code, and nothing is run: names are looked up in tables, paths stay in the folder.
docs/bundle.md describes every member.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd.errors import FrontendError
from spmd.frontend.sizes import symbols_in
from spmd.serving.bundle.checked import checked
from spmd.serving.bundle.function import BundleError, one_line
from spmd.serving.bundle.manifest import Entrypoint, Filled, LeafEntry, Manifest
from spmd.serving.bundle.trees import check_template

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
    leaves: list[LeafEntry] = [*manifest.state]
    for entry in manifest.functions.values():
        leaves += [*entry.leaves(), *entry.outputs]
    try:
        used = set(symbols_in({dim for leaf in leaves for dim in leaf.shape}))
    except FrontendError as error:
        raise BundleError(f"{where}: {one_line(error)}") from error
    if any(isinstance(dim, str) for leaf in manifest.weights for dim in leaf.shape):
        raise BundleError(f"{where}: weights have symbolic dims; only state and inputs may")
    if used != manifest.symbols.keys():
        differing = sorted(used ^ manifest.symbols.keys())[0]
        raise BundleError(f"{where}: the symbol {differing[:60]!r} is only in shapes, or in none")
    known = {leaf.path: leaf for leaf in (*manifest.weights, *manifest.state)}
    if len(known) != len(manifest.weights) + len(manifest.state):
        raise BundleError(f"{where} lists a leaf twice")
    for function in manifest.functions.values():
        _check_function(function, known, f"{where}: functions: {function.name}")
    for name in (
        *manifest.tokenizer,
        *(f for e in manifest.functions.values() for f in e.modules.values()),
    ):
        if name not in manifest.files:
            raise BundleError(f"{where}: {name[:100]!r} is not among the files")


def _check_function(function: Entrypoint, known: Mapping[str, LeafEntry], where: str) -> None:
    if sum(argument.role == "state" for argument in function.arguments) > 1:
        raise BundleError(f"{where} has more than one argument that is the state")
    for leaf in function.owned:
        other = known.get(leaf.path)
        if other is None or (other.shape, other.dtype) != (leaf.shape, leaf.dtype):
            raise BundleError(
                f"{where} takes {leaf.path[:100]} {leaf.dtype}{list(leaf.shape)}, and the bundle "
                + ("has no such leaf" if other is None else f"has {other.dtype}{list(other.shape)}")
            )
    paths = [leaf.path for leaf in function.leaves()]
    if len(set(paths)) != len(paths):
        raise BundleError(f"{where} has two leaves of one path")
    check_template(function.tree, len(function.outputs), where)


def check_fill(leaf: Filled) -> None:
    """Raise a `BundleError` unless an array of a leaf's dtype can hold its number."""
    dtype = np.dtype(leaf.dtype)
    if dtype.kind not in "biu":
        return
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not (limits[0] <= leaf.fill <= limits[1] and leaf.fill == int(leaf.fill)):
        raise BundleError(f"{leaf.path} is {leaf.dtype} and cannot be filled with {leaf.fill}")


FORMAT = "spmd-bundle"
SCHEMA = 1
_ABOUT = ("format", "schema")


def to_json(manifest: Manifest) -> dict[str, Any]:
    """What the file holds."""
    content = dataclasses.asdict(manifest)
    for leaf in content["state"]:
        leaf["fill"] = leaf["fill"] if math.isfinite(leaf["fill"]) else str(leaf["fill"])
    if not manifest.symbols:  # programs that know of none read such bundles, too
        del content["symbols"]
    return {"format": FORMAT, "schema": SCHEMA, **content}


def from_json(content: Any, where: str) -> Manifest:
    """The manifest that the JSON of a file holds, which is at `where`.

    Raises:
      BundleError: another format or schema, a member that is missing, unknown or of another type,
        or members that contradict each other.
    """
    members = checked(content, Mapping[str, Any], where)
    if members.get("format") != FORMAT:
        raise BundleError(f"{where} is no manifest of a bundle: its format is not {FORMAT}")
    schema = members.get("schema")
    if schema != SCHEMA:
        raise BundleError(
            f"{where} has schema {schema!r:.40} and this program knows {SCHEMA}; load it "
            "with the version that wrote it, or export it again"
        )
    # Programs that knew of no symbols wrote none.
    members = {"symbols": {}} | {k: v for k, v in members.items() if k not in _ABOUT}
    manifest: Manifest = checked(members, Manifest, where)
    for name, function in manifest.functions.items():
        check_name(name, f"{where}: functions: {name[:80]!r}")
        if function.name != name:
            raise BundleError(f"{where}: functions: {name} calls itself {function.name[:60]!r}")
    for leaf in manifest.state:
        check_fill(leaf)
    for name, symbol in manifest.symbols.items():
        if not name.isidentifier():
            raise BundleError(f"{where}: symbols: {name[:60]!r} is no name of a symbol")
        if symbol.multiple_of < 1 or symbol.at_least < 1:
            raise BundleError(f"{where}: symbols: {name} has no bounds of a size: {symbol}")
    modules = (file for f in manifest.functions.values() for file in f.modules.values())
    for path in (*modules, *manifest.files):
        parts = path.split("/")
        if len(parts) > 8 or any(not NAME.fullmatch(part) for part in parts):
            raise BundleError(
                f"{where} names the file {path[:100]!r}, which is no path in the folder"
            )
    for path, file in manifest.files.items():
        if not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
            raise BundleError(f"{where}: files: {path}: sha256 is no SHA-256")
    check(manifest, where)
    return manifest
