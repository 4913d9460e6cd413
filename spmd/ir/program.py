"""`Program`: frozen SSA over global value numbers, with structured control flow.

A value is an integer; `Program.types[value]` is its type. All regions share the numbers: a region
may read values defined outside and before it, and a table over values is a flat list.
"""

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
    rule_name,
)
from spmd.ir.types import Attribute, Dense, TensorType


@dataclass(frozen=True, eq=False)
class Callback:
    """A Python function that the program calls on the host; ops refer to it by its index."""

    function: Callable[..., Sequence[Any]]  # from arrays to a sequence of arrays
    label: str  # what the user wrote: `jax.debug.print`, `jax.pure_callback of lookup`
    is_debug: bool  # whether it only looks: `jax.debug.print` and `jax.debug.callback`
    has_effect: bool  # whether it does more than compute its results
    is_ordered: bool  # whether it is called in the order of the program among others that are
    inspects: bool = False  # it is no call: `jax.debug.inspect_array_sharding` looks at the plan


Value = int

_NOT_THEIRS = ("<", *COMPILER)


class Frame(NamedTuple):
    """One frame of the Python stack from which an op was traced."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


class Loc(NamedTuple):
    """Where an op is from: name scope, Python stack (innermost first), the compiler's note."""

    scope: str = ""
    frames: tuple[Frame, ...] = ()
    note: str = ""

    @property
    def source(self) -> str:
        """The first of `user_frames` as text, `model.py:252 (linear)`; empty if there is none."""
        return str(self.user_frames[0]) if self.frames else ""

    @property
    def trail(self) -> str:
        """`source`, and its caller if a function: `model.py:252 (linear) <- model.py:240 (mlp)`."""
        shown = self.user_frames[:2]
        return " <- ".join(str(f) for f in shown if f is shown[0] or f.function != "<module>")

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames outside installed packages and `spmd`, innermost first; all if none is."""
        own = [
            f
            for f in dict.fromkeys(self.frames)
            if "site-packages" not in f.file and not f.file.startswith(_NOT_THEIRS)
        ]
        return tuple(own) or self.frames


def numberless(name: str) -> str:
    """Returns a path with `*` for each part behind a `/` that is a number: `h/3/w` -> `h/*/w`."""
    return re.sub(r"(?<=/)\d+(?=/|$)", "*", name)


class OpKind:
    """Everything about an op but which values it reads and makes: name, types and attributes.

    Kinds are interned: equal ones are one object, and are compared by identity. Rules, costs and
    local lowerings depend on the kind alone and are cached by it, once for all equal layers.
    """

    __slots__ = ("__weakref__", "_cache", "about", "attrs", "name", "operands", "results")

    about: Description  # of such an op
    name: str
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    attrs: Mapping[str, Attribute]
    _cache: dict[str, Any]

    _interned: ClassVar[dict[Any, "OpKind"]] = {}

    def __new__(
        cls,
        name: str,
        operands: tuple[TensorType, ...],
        results: tuple[TensorType, ...],
        attrs: Mapping[str, Attribute],
    ) -> "OpKind":
        """Returns the one object with these fields, made when they first occur."""
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
        """Returns the op's `Description` for `about`; raises AttributeError for any other name."""
        if name != "about":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = DESCRIPTIONS.get(rule_name(self))
        if found is None:
            # Not remembered: `register_rule` may describe it later.
            return UNKNOWN_CALL if self.name == CUSTOM_CALL else UNKNOWN
        self.about = found
        return found

    @property
    def is_renaming(self) -> bool:
        """Whether it is a broadcast or transpose that only adds or moves dims of size 1."""
        if self.name == BROADCAST and self.operands[0].size == self.results[0].size:
            dims = list(self.attrs["broadcast_dimensions"])
            return dims == sorted(dims)
        if self.name != TRANSPOSE:
            return False
        shape = self.operands[0].shape
        moved = [dim for dim in self.attrs["permutation"] if shape[dim] != 1]
        return moved == sorted(moved)

    def __repr__(self) -> str:
        return f"OpKind({self.name}, {list(map(str, self.operands))})"

    def __lt__(self, other: "OpKind") -> bool:
        return self.name < other.name


class Op(NamedTuple):
    """One op; only control flow has `regions` (the scalar body of a reduce is an attribute)."""

    kind: OpKind
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    regions: "tuple[Region, ...]" = ()
    loc: Loc = Loc()

    @property
    def name(self) -> str:
        """The op's name with its dialect: `stablehlo.add`."""
        return self.kind.name

    @property
    def label(self) -> str:
        """The op's name for people: `dot_general`, a composite's name, `<callback> at <source>`."""
        if self.kind.name == COMPOSITE:
            return str(self.kind.attrs["name"])
        if "called" in self.kind.attrs:  # a callback
            return f"{self.kind.attrs['called']} at {self.loc.source}"
        return self.kind.name.removeprefix("stablehlo.").removeprefix("chlo.")

    @property
    def is_loop(self) -> bool:
        """Whether the op is a while loop; its regions are the condition and the body."""
        return self.kind.about.region == "loop"

    @property
    def is_mark(self) -> bool:
        """Whether the op is a mark, which returns its operand and says how to shard it."""
        return self.kind.about.is_mark

    @property
    def collective(self) -> str:
        """The kind of a collective, such as `all_gather`; empty for other ops."""
        return self.kind.about.collective


class Region(NamedTuple):
    """A block of ops in order, with its arguments and the values that it returns."""

    args: tuple[Value, ...]
    ops: tuple[Op, ...]
    results: tuple[Value, ...]


class Body(NamedTuple):
    """The scalar function of a reduce, sort, ...: a region with values of its own, from 0 on."""

    types: tuple[TensorType, ...]
    region: Region


class Program(NamedTuple):
    """A program at any stage: one function's arguments, ops and results, and all values' types."""

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
        """Yields every op in program order, those inside an op's regions before that op."""
        return walk_region(self.body)


def walk_region(region: Region) -> Iterator[Op]:
    """Yields every op of a region in order, those inside an op's regions before that op."""
    for op in region.ops:
        for inner in op.regions:
            yield from walk_region(inner)
        yield op


def has_effect(op: Op) -> bool:
    """Whether an op, or one inside it, must run even if nothing reads its results (a callback)."""
    inner = (inner for region in op.regions for inner in region.ops)
    return op.kind.about.has_effect or any(map(has_effect, inner))


def free_values(region: Region) -> tuple[Value, ...]:
    """Returns the values that a region reads and does not define, in order of first use."""
    read: list[Value] = []
    defined = set(region.args)
    for op in walk_region(region):
        for inner in op.regions:
            read += inner.results
            defined.update(inner.args)
        read += op.operands
        defined.update(op.results)
    read += region.results
    return tuple(v for v in dict.fromkeys(read) if v not in defined)


def reads(op: Op) -> tuple[Value, ...]:
    """Returns all values an op reads: its operands, then those its regions read from outside."""
    return (*op.operands, *(value for region in op.regions for value in free_values(region)))
