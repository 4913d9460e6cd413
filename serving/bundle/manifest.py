"""All that a bundle says of itself, as values; and the same at chosen sizes.

`manifest_json.py` reads and writes them, and says what must hold.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from spmd.errors import FrontendError
from spmd.frontend.sizes import sizes_of, symbols_in
from spmd.models.placement import Entry
from spmd.serving.bundle.function import BundleError, Role, one_line
from spmd.serving.bundle.trees import Template

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
"""Every dtype that an array of a bundle may have -> that in which safetensors holds its bits."""

Shape = tuple[Annotated[Any, int | str], ...]
"""Sizes; of symbolic dims expressions of symbols (`n`, `2*n`), until `Manifest.sized`."""


@dataclasses.dataclass(frozen=True)
class LeafEntry:
    """One array: its path, which begins with its argument's name, its shape and its dtype."""

    path: str
    shape: Shape
    dtype: Annotated[str, Literal[*STORED_AS]]


@dataclasses.dataclass(frozen=True)
class Filled(LeafEntry):
    """One array of the state, and the number that it begins with."""

    fill: float


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A size that is chosen when a bundle is loaded, and what it may be."""

    # at_least, at_most: bounds, themselves included; None: there is no upper one
    at_least: int = 1
    at_most: int | None = None
    multiple_of: int = 1  # divides it

    def __str__(self) -> str:
        below = "" if self.at_most is None else f" and at most {self.at_most}"
        return f"a multiple of {self.multiple_of}, at least {self.at_least}{below}"

    def allows(self, value: int) -> bool:
        """Whether it may be so much."""
        below = self.at_most is None or value <= self.at_most
        return below and value >= self.at_least and value % self.multiple_of == 0


@dataclasses.dataclass(frozen=True)
class ArgumentEntry:
    """One argument of a function: its leaves in order."""

    name: str
    role: Role
    leaves: tuple[LeafEntry, ...]


@dataclasses.dataclass(frozen=True)
class Entrypoint:
    """One function of a bundle."""

    # name, tags: as in `spmd.serving.bundle.function.Function`
    name: str
    tags: Mapping[str, int | str]
    # platform -> file with its portable artifact
    modules: Mapping[Annotated[str, Literal[*PLATFORMS]], str]
    arguments: tuple[ArgumentEntry, ...]  # in order
    outputs: tuple[LeafEntry, ...]  # leaves of what it returns besides the state
    tree: Template  # how the outputs are put together
    # custom_calls, composites: name -> how often; of all platforms together the most
    custom_calls: Mapping[str, int]
    composites: Mapping[str, int]

    @property
    def inputs(self) -> tuple[LeafEntry, ...]:
        """The leaves of all arguments that come with a call, in order."""
        return self.leaves("input")

    @property
    def owned(self) -> tuple[LeafEntry, ...]:
        """The leaves of arguments that the bundle owns, in order."""
        return self.leaves("weights", "state", "read")

    def leaves(self, *roles: Role) -> tuple[LeafEntry, ...]:
        """The leaves of the arguments of these roles, or of all, in order."""
        chosen = [a for a in self.arguments if not roles or a.role in roles]
        return tuple(leaf for a in chosen for leaf in a.leaves)


@dataclasses.dataclass(frozen=True)
class Variant(Entrypoint):
    """A function at one of the several sizes that a bundle was loaded with; no file has such."""

    origin: Entrypoint  # the function as it was written
    sizes: Mapping[str, int]  # symbol -> value, of those that have several


Sizes = int | tuple[int, ...]
"""The size that a symbol stands for, or several: functions that have it are made for each."""


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a bundle says of itself; see docs/bundle.md."""

    name: str  # what the bundle is called
    producer: Mapping[str, str]  # what made it: name -> version
    primary: str  # the function whose plan decides what `specs` leave open
    functions: Mapping[str, Entrypoint]  # name -> function
    # weights, state: their leaves; paths begin with `weights/` and `state/`
    weights: tuple[LeafEntry, ...]
    state: tuple[Filled, ...]
    # pattern of paths -> what splits each dim unless the mesh says otherwise
    specs: Mapping[str, tuple[Entry, ...]]
    # what callers have to know: sampling, tokens that end a text, ...
    contract: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    goldens: tuple[Mapping[str, Any], ...] = ()  # inputs and what they give, to be tried at start
    quantization: Mapping[str, Any] | None = None  # how the weights were made smaller, or None
    tokenizer: tuple[str, ...] = ()  # files of the tokenizer
    # every file but the manifest
    files: Mapping[str, StoredFile] = dataclasses.field(default_factory=dict)
    # name -> symbol; in shapes of the state, of inputs and of outputs
    symbols: Mapping[str, Symbol] = dataclasses.field(default_factory=dict)

    def sized(self, values: Mapping[str, Sizes]) -> "Manifest":
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
    return symbols_in({dim for leaf in (*entry.leaves(), *entry.outputs) for dim in leaf.shape})


def _at(entry: Entrypoint, values: Mapping[str, int]) -> Entrypoint:
    arguments = tuple(
        dataclasses.replace(a, leaves=_sized(a.leaves, values)) for a in entry.arguments
    )
    return dataclasses.replace(entry, arguments=arguments, outputs=_sized(entry.outputs, values))


def _sized(leaves: tuple[Any, ...], values: Mapping[str, int]) -> Any:
    try:
        return tuple(
            dataclasses.replace(leaf, shape=sizes_of(leaf.shape, values)) for leaf in leaves
        )
    except FrontendError as error:
        raise BundleError(one_line(error)) from error
