"""`manifest.json`: all that a bundle says of itself, as data that has been checked.

Nothing here is code, and nothing is run: names are looked up in tables, paths stay in the folder.
docs/bundle.md describes every member.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.placement import Entry
from serving.bundle.checked import Checked
from serving.bundle.function import ROLES, BundleError, Role, one_line
from serving.bundle.trees import Template, check_template
from spmd.errors import FrontendError
from spmd.frontend.sizes import sizes_of, symbols_in

FORMAT = "spmd-bundle"
SCHEMA = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights"
AUTO = "auto"
"""Member of a contract: the loader chooses specs where there are none."""
PLATFORMS = ("cpu", "cuda", "tpu")

STORED_AS: Mapping[str, str] = {
    "bool": "bool",
    "int8": "int8", "uint8": "uint8", "int16": "int16", "uint16": "uint16",
    "int32": "int32", "uint32": "uint32", "int64": "int64", "uint64": "uint64",
    "float8_e4m3fn": "uint8", "float8_e5m2": "uint8",
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "float64": "float64",
}  # fmt: skip
"""Every dtype that an array of a bundle may have -> the dtype that safetensors holds it in."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


Shape = tuple[Any, ...]
"""Sizes; of symbolic dims expressions of symbols (`n`, `2*n`), until `Manifest.sized`."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array: its path, which begins with its argument's name, its shape and its dtype."""

    path: str
    shape: Shape
    dtype: str


@dataclasses.dataclass(frozen=True)
class Filled(Leaf):
    """One array of the state, and the number that it begins with."""

    fill: float


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A size that is chosen when a bundle is loaded, and what it may be.

    Attributes:
      at_least, at_most: bounds, themselves included; None: there is no upper one.
      multiple_of: divides it.
    """

    at_least: int = 1
    at_most: int | None = None
    multiple_of: int = 1

    def __str__(self) -> str:
        below = "" if self.at_most is None else f" and at most {self.at_most}"
        return f"a multiple of {self.multiple_of}, at least {self.at_least}{below}"

    def allows(self, value: int) -> bool:
        """Whether it may be so much."""
        below = self.at_most is None or value <= self.at_most
        return below and value >= self.at_least and value % self.multiple_of == 0


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a function: its leaves in order."""

    name: str
    role: Role
    leaves: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Entrypoint:
    """One function of a bundle.

    Attributes:
      name, tags: as in `serving.bundle.function.Function`.
      modules: platform -> file with its portable artifact.
      arguments: in order.
      outputs: leaves of what it returns besides the state.
      tree: how the outputs are put together.
      custom_calls, composites: name -> how often; of all platforms together the most.
    """

    name: str
    tags: Mapping[str, int | str]
    modules: Mapping[str, str]
    arguments: tuple[Argument, ...]
    outputs: tuple[Leaf, ...]
    tree: Template
    custom_calls: Mapping[str, int]
    composites: Mapping[str, int]

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        """The leaves of all arguments that come with a call, in order."""
        return tuple(leaf for a in self.arguments if a.role == "input" for leaf in a.leaves)

    def leaves(self, role: Role) -> tuple[Leaf, ...]:
        """The leaves of the arguments of a role, in order."""
        return tuple(leaf for a in self.arguments if a.role == role for leaf in a.leaves)


@dataclasses.dataclass(frozen=True)
class Variant(Entrypoint):
    """A function at one of the several sizes that a bundle was loaded with; no file has such.

    Attributes:
      origin: the function as it was written.
      sizes: symbol -> value, of those that have several.
    """

    origin: Entrypoint
    sizes: Mapping[str, int]


Sizes = int | tuple[int, ...]
"""The size that a symbol stands for, or several: functions that have it are made for each."""


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself; see docs/bundle.md.

    Attributes:
      name: what the bundle is called.
      producer: what made it: name -> version.
      primary: the function whose plan decides what `specs` leave open.
      functions: name -> function.
      weights, state: their leaves; paths begin with `weights/` and `state/`.
      specs: pattern of paths -> what splits each dim unless the mesh says otherwise.
      contract: what callers have to know: sampling, tokens that end a text, ...
      goldens: inputs and what they give, to be tried at start.
      quantization: how the weights were made smaller, or None.
      tokenizer: files of the tokenizer.
      files: every file but the manifest.
      symbols: name -> symbol; in shapes of the state, of inputs and of outputs.
    """

    name: str
    producer: Mapping[str, str]
    primary: str
    functions: Mapping[str, Entrypoint]
    weights: tuple[Leaf, ...]
    state: tuple[Filled, ...]
    specs: Mapping[str, tuple[Entry, ...]]
    contract: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    goldens: tuple[Mapping[str, Any], ...] = ()
    quantization: Mapping[str, Any] | None = None
    tokenizer: tuple[str, ...] = ()
    files: Mapping[str, StoredFile] = dataclasses.field(default_factory=dict)
    symbols: Mapping[str, Symbol] = dataclasses.field(default_factory=dict)

    def sized(self, values: Mapping[str, Sizes]) -> Manifest:
        """The same with numbers in all shapes.

        Args:
          values: of all symbols. A function that has one with several values becomes as many, with
            names like `step[b=8]`; where that is the primary function, the largest takes its place.

        Raises:
          BundleError: a dim that has no size for them.
        """
        if not self.symbols:
            return self
        one = {name: value for name, value in values.items() if isinstance(value, int)}
        several = {name: value for name, value in values.items() if not isinstance(value, int)}
        families = {name: _family(e, one, several) for name, e in self.functions.items()}
        functions = {entry.name: entry for family in families.values() for entry in family}
        primary = families[self.primary][-1].name if self.primary in families else self.primary
        state = _sized(self.state, one)
        return dataclasses.replace(self, functions=functions, primary=primary, state=state)

    def variants(self, name: str) -> list[Entrypoint]:
        """What `sized` made of a function: itself, or one for each size, the largest last."""
        if name in self.functions:
            return [self.functions[name]]
        entries = self.functions.values()
        return [e for e in entries if isinstance(e, Variant) and e.origin.name == name]


def _family(
    entry: Entrypoint, one: Mapping[str, int], several: Mapping[str, tuple[int, ...]]
) -> list[Entrypoint]:
    """A function at its size, or at each of its sizes."""
    own = [name for name in several if name in symbols_of(entry)]
    if not own:
        return [_at(entry, one)]
    family: list[Entrypoint] = []
    for numbers in itertools.product(*(sorted(several[name]) for name in own)):
        sizes = dict(zip(own, numbers, strict=True))
        told = ",".join(f"{name}={number}" for name, number in sizes.items())
        sized = _at(entry, {**one, **sizes})
        fields = {f.name: getattr(sized, f.name) for f in dataclasses.fields(Entrypoint)}
        fields["name"] = f"{entry.name}[{told}]"
        family.append(Variant(**fields, origin=entry, sizes=sizes))
    return family


def symbols_of(entry: Entrypoint) -> tuple[str, ...]:
    """The symbols in the shapes of a function."""
    leaves = [*(leaf for a in entry.arguments for leaf in a.leaves), *entry.outputs]
    return symbols_in({dim for leaf in leaves for dim in leaf.shape})


def _at(entry: Entrypoint, values: Mapping[str, int]) -> Entrypoint:
    arguments = tuple(
        dataclasses.replace(a, leaves=_sized(a.leaves, values)) for a in entry.arguments
    )
    outputs = _sized(entry.outputs, values)
    return dataclasses.replace(entry, arguments=arguments, outputs=outputs)


def _sized(leaves: tuple[Any, ...], values: Mapping[str, int]) -> Any:
    try:
        return tuple(
            dataclasses.replace(leaf, shape=sizes_of(leaf.shape, values)) for leaf in leaves
        )
    except FrontendError as error:
        raise BundleError(one_line(error)) from error


def check_name(name: str, what: str) -> str:
    """A name that may be a part of a path; else a `BundleError`."""
    if not _NAME.fullmatch(name):
        raise BundleError(
            f"{what} is called {name[:60]!r}; a name has letters, digits, `_`, `-` and `.` and "
            "begins with a letter, a digit or `_`"
        )
    return name


# Writing


def to_json(manifest: Manifest) -> dict[str, Any]:
    """What the file holds."""
    content = dataclasses.asdict(
        dataclasses.replace(manifest, state=tuple(map(_with_plain_fill, manifest.state)))
    )
    if not manifest.symbols:  # programs that know of none read such bundles, too
        del content["symbols"]
    return {"format": FORMAT, "schema": SCHEMA, **content}


def _with_plain_fill(leaf: Filled) -> Filled:
    finite = math.isfinite(leaf.fill)
    return leaf if finite else dataclasses.replace(leaf, fill=str(leaf.fill))  # type: ignore[arg-type]


# Reading


def from_json(content: Checked) -> Manifest:
    """The manifest that a file holds.

    Raises:
      BundleError: another format or schema, a member that is missing, unknown or of another type,
        or members that contradict each other.
    """
    if content["format"].plain() != FORMAT:
        raise BundleError(f"{content.where} is no manifest of a bundle: its format is not {FORMAT}")
    schema = content["schema"].plain()
    if schema != SCHEMA:
        raise BundleError(
            f"{content.where} has schema {schema!r:.40} and this program knows {SCHEMA}; load it "
            "with the version that wrote it, or export it again"
        )
    content.only("format", "schema", *(f.name for f in dataclasses.fields(Manifest)))
    quantization = content["quantization"]
    manifest = Manifest(
        name=content["name"].text(),
        producer={k: v.text() for k, v in content["producer"].items()},
        primary=content["primary"].text(),
        functions={k: _entrypoint(k, v) for k, v in content["functions"].items()},
        weights=tuple(map(_leaf, content["weights"])),
        state=tuple(map(_filled, content["state"])),
        specs={k: tuple(map(_entry, v)) for k, v in content["specs"].items()},
        contract={k: v.plain() for k, v in content["contract"].items()},
        goldens=tuple({k: v.plain() for k, v in g.items()} for g in content["goldens"]),
        quantization=None
        if quantization.value is None
        else {k: v.plain() for k, v in quantization.items()},
        tokenizer=tuple(v.text() for v in content["tokenizer"]),
        files={_path(k, content.where): _stored_file(v) for k, v in content["files"].items()},
        symbols={k: _symbol(k, v) for k, v in content["symbols"].items()}
        if "symbols" in content
        else {},
    )
    check(manifest, content.where)
    return manifest


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


def _entrypoint(name: str, content: Checked) -> Entrypoint:
    content.only(*(f.name for f in dataclasses.fields(Entrypoint)))
    if content["name"].text() != name:
        raise BundleError(f"{content.where} calls itself {content['name'].text()[:60]!r}")
    modules = {}
    for platform, file in content["modules"].items():
        Checked(platform, f"{content.where}: modules").one_of(*PLATFORMS)
        modules[platform] = _path(file.text(), file.where)
    return Entrypoint(
        name=check_name(name, content.where),
        tags={k: _tag(v) for k, v in content["tags"].items()},
        modules=modules,
        arguments=tuple(map(_argument, content["arguments"])),
        outputs=tuple(map(_leaf, content["outputs"])),
        tree=content["tree"].plain(),
        custom_calls={k: v.count() for k, v in content["custom_calls"].items()},
        composites={k: v.count() for k, v in content["composites"].items()},
    )


def _tag(content: Checked) -> int | str:
    return content.text() if isinstance(content.value, str) else content.count()


def _argument(content: Checked) -> Argument:
    content.only("name", "role", "leaves")
    role: Any = content["role"].one_of(*ROLES)
    return Argument(content["name"].text(), role, tuple(map(_leaf, content["leaves"])))


def _leaf(content: Checked) -> Leaf:
    content.only("path", "shape", "dtype")
    return Leaf(*_array(content))


def _filled(content: Checked) -> Filled:
    content.only("path", "shape", "dtype", "fill")
    leaf = Filled(*_array(content), content["fill"].number())
    check_fill(leaf)
    return leaf


def check_fill(leaf: Filled) -> None:
    """Raise a `BundleError` unless an array of a leaf's dtype can hold its number."""
    dtype = np.dtype(leaf.dtype)
    if dtype.kind not in "biu":
        return
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not (limits[0] <= leaf.fill <= limits[1] and leaf.fill == int(leaf.fill)):
        raise BundleError(f"{leaf.path} is {leaf.dtype} and cannot be filled with {leaf.fill}")


def _array(content: Checked) -> tuple[str, Shape, str]:
    shape = tuple(
        size.text() if isinstance(size.value, str) else size.count() for size in content["shape"]
    )
    return content["path"].text(), shape, content["dtype"].one_of(*STORED_AS)


def _symbol(name: str, content: Checked) -> Symbol:
    content.only(*(f.name for f in dataclasses.fields(Symbol)))
    most = content["at_most"]
    symbol = Symbol(
        content["at_least"].count(),
        None if most.value is None else most.count(),
        content["multiple_of"].count(),
    )
    check_symbol(name, symbol, content.where)
    return symbol


def check_symbol(name: str, symbol: Symbol, where: str) -> None:
    """Raise a `BundleError` unless a symbol has a name, and a value."""
    if not name.isidentifier():
        raise BundleError(f"{where}: {name[:60]!r} is no name of a symbol")
    if symbol.multiple_of < 1 or symbol.at_least < 1:
        raise BundleError(f"{where}: {name} has no bounds of a size: {symbol}")


def _entry(content: Checked) -> Entry:
    if content.value is None:
        return None
    if isinstance(content.value, list):
        return tuple(name.text() for name in content)
    return content.text()


def _stored_file(content: Checked) -> StoredFile:
    content.only("size", "sha256")
    digest = content["sha256"].text()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise BundleError(f"{content.where}: sha256 is no SHA-256")
    return StoredFile(content["size"].count(), digest)


def _path(path: str, where: str) -> str:
    """A path below the folder: names joined by `/`, none of which leads elsewhere."""
    parts = path.split("/")
    if len(parts) > 8 or any(not _NAME.fullmatch(part) for part in parts):
        raise BundleError(f"{where} names the file {path[:100]!r}, which is no path in the folder")
    return path
