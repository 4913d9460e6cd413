"""`Program`: frozen SSA over global value numbers, with structured control flow.

A value is an integer; `Program.types[value]` is its type. Numbers run through all regions, so that
a region may read any value defined outside and before it, and tables over values are flat lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from spmd.installed import COMPILER
from spmd.ir.description import (
    BROADCAST,
    COMPOSITE,
    CUSTOM_CALL,
    DESCRIPTIONS,
    TRANSPOSE,
    UNKNOWN,
    UNKNOWN_CALL,
    Description,
    key_of,
)
from spmd.ir.types import Attribute, Dense, TensorType


@dataclass(frozen=True, eq=False)
class Callback:
    """A Python function that the program calls on the host; ops name it by its number."""

    function: Callable[..., Sequence[Any]]  # from arrays to a sequence of arrays
    label: str  # what the user wrote: `jax.debug.print`, `jax.pure_callback of lookup`
    is_debug: bool  # whether it only looks: `jax.debug.print` and `jax.debug.callback`
    has_effect: bool  # whether it does more than compute its results
    is_ordered: bool  # whether it is called in the order of the program among others that are


Value = int


_NOT_THEIRS = ("<", *COMPILER)


class Frame(NamedTuple):
    """One frame of the user's stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


class Loc(NamedTuple):
    """An op's name scope, the user's stack (innermost first), and why the compiler added the op."""

    scope: str = ""
    frames: tuple[Frame, ...] = ()
    note: str = ""

    @property
    def source(self) -> str:
        """The innermost frame that is the user's own code, not an installed library's or ours."""
        return str(self.user_frames[0]) if self.frames else ""

    @property
    def trail(self) -> str:
        """`source` and who called it: `model.py:252 (linear) <- model.py:240 (mlp)`."""
        shown = self.user_frames[:2]
        return " <- ".join(str(f) for f in shown if f is shown[0] or f.function != "<module>")

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames of the user's own code, innermost first; all frames if there are none."""
        own = [
            f
            for f in dict.fromkeys(self.frames)
            if "site-packages" not in f.file and not f.file.startswith(_NOT_THEIRS)
        ]
        return tuple(own) or self.frames


def numberless(name: str) -> str:
    """A path with `*` for its numbers, the same for all layers: `layers/3/w` -> `layers/*/w`."""
    return re.sub(r"(?<=/)\d+(?=/|$)", "*", name)


class OpKind:
    """Everything about an op but the values that it reads and makes.

    Kinds are interned: equal ones are one object, and are compared by identity. Rules, costs and
    local lowerings depend on the kind alone and are cached by it. That is what makes repeated
    layers cheap.
    """

    __slots__ = ("__weakref__", "_cache", "about", "attrs", "name", "operands", "results")

    about: Description  # of such an op
    name: str
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    attrs: Mapping[str, Attribute]
    _cache: dict[str, Any]

    _interned: ClassVar[dict[Any, OpKind]] = {}

    def __new__(
        cls,
        name: str,
        operands: tuple[TensorType, ...],
        results: tuple[TensorType, ...],
        attrs: Mapping[str, Attribute],
    ) -> OpKind:
        """Returns the one object that has these fields."""
        # Python has 1 == True == 1.0, with equal hashes: without the types in the key, the kind of
        # an op with `is_stable = 1` would be handed out for one with `is_stable = True`.
        items = tuple(sorted(attrs.items()))
        flavours = [type(v[0]) if type(v) is tuple and v else type(v) for _, v in items]
        key = (name, operands, results, items, tuple(flavours))
        kind = cls._interned.get(key)
        if kind is None:
            kind = cls._interned[key] = super().__new__(cls)
            kind.name, kind.operands, kind.results = name, operands, results
            kind.attrs, kind._cache = dict(items), {}
        return kind

    def __getattr__(self, name: str) -> Description:
        """Looks `about` up in the descriptions when it is first read; later it is a plain field."""
        if name != "about":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        key = key_of(self.name, self.attrs)
        found = DESCRIPTIONS.get(key)
        if found is None:
            # Not remembered: `register_rule` may describe it later.
            return UNKNOWN_CALL if self.name == CUSTOM_CALL else UNKNOWN
        self.about = found
        return found

    @property
    def adds_dims(self) -> bool:
        """Whether it is a broadcast that only adds dims of size 1: no element is repeated."""
        return self.name == BROADCAST and self.operands[0].size == self.results[0].size

    @property
    def is_renaming(self) -> bool:
        """Whether it only adds or moves dims of size 1: the result is the operand's memory."""
        if self.name == BROADCAST and self.adds_dims:
            dims = list(self.attrs["broadcast_dimensions"])
            return dims == sorted(dims)
        if self.name != TRANSPOSE:
            return False
        shape = self.operands[0].shape
        moved = [dim for dim in self.attrs["permutation"] if shape[dim] != 1]
        return moved == sorted(moved)

    def __repr__(self) -> str:
        return f"OpKind({self.name}, {list(map(str, self.operands))})"

    def __lt__(self, other: OpKind) -> bool:
        return self.name < other.name


class Op(NamedTuple):
    """One operation; `regions` only for control flow (scalar bodies are attributes)."""

    kind: OpKind
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    regions: tuple[Region, ...] = ()
    loc: Loc = Loc()

    @property
    def name(self) -> str:
        """The op's dialect-qualified name."""
        return self.kind.name

    @property
    def label(self) -> str:
        """The op's name for people: `dot_general`, or the name of a composite or a callback."""
        if self.kind.name == COMPOSITE:
            return str(self.kind.attrs["name"])
        if "called" in self.kind.attrs:  # a callback
            return f"{self.kind.attrs['called']} at {self.loc.source}"
        return self.kind.name.removeprefix("stablehlo.").removeprefix("chlo.")

    @property
    def is_loop(self) -> bool:
        """Whether it runs its regions (condition and body) again and again."""
        return self.kind.about.region == "loop"

    @property
    def is_mark(self) -> bool:
        """Whether it is a mark: its operand, with the sharding that the user wants."""
        return self.kind.about.is_mark

    @property
    def collective(self) -> str:
        """The kind of a collective, as `all_gather`; empty for other ops."""
        return self.kind.about.collective


class Region(NamedTuple):
    """A block: arguments, ops in order, and the values that its terminator returns."""

    args: tuple[Value, ...]
    ops: tuple[Op, ...]
    results: tuple[Value, ...]


class Body(NamedTuple):
    """The scalar function of a reduce, sort, ...; it has values of its own, numbered from 0."""

    types: tuple[TensorType, ...]
    region: Region


class Program(NamedTuple):
    """A function as every stage has it: arguments, ops and results, and the type of every value."""

    name: str  # the function's name
    types: tuple[TensorType, ...]  # type of every value
    body: Region  # its arguments, ops and results
    # arg_names, result_names: paths in the user's pytrees, for people
    arg_names: tuple[str, ...]
    result_names: tuple[str, ...]
    callbacks: tuple[Callback, ...] = ()  # the Python functions that its ops call, by number
    # elements of its last arguments, which the user does not pass
    constants: tuple[Dense, ...] = ()

    def walk(self) -> Iterator[Op]:
        """Every op, regions' ops before the op that holds them, in program order."""
        return walk_region(self.body)


def walk_region(region: Region) -> Iterator[Op]:
    """Every op of a region and of the regions inside it, inner ones first."""
    for op in region.ops:
        for inner in op.regions:
            yield from walk_region(inner)
        yield op


def has_effect(op: Op) -> bool:
    """Whether an op, or one inside it, does more than make its results."""
    inner = (inner for region in op.regions for inner in region.ops)
    return op.kind.about.has_effect or any(map(has_effect, inner))


def free_values(region: Region) -> tuple[Value, ...]:
    """Values that a region reads and does not define, in order of first use."""
    defined: set[Value] = set()
    free: dict[Value, None] = {}

    def visit(r: Region) -> None:
        defined.update(r.args)
        for op in r.ops:
            free.update((v, None) for v in op.operands if v not in defined)
            for inner in op.regions:
                visit(inner)
            defined.update(op.results)
        free.update((v, None) for v in r.results if v not in defined)

    visit(region)
    return tuple(v for v in free if v not in defined)


def reads(op: Op) -> tuple[Value, ...]:
    """All that an op reads: its operands, and what its regions read from around it."""
    return (*op.operands, *(value for region in op.regions for value in free_values(region)))
