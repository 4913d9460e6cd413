"""The table from op names to local lowerings, and `LocalOp`, which a lowering takes.

An op's sharding rule says what its pieces look like; its local lowering, registered under the same
name, says how one device computes its piece of the result from pieces of the operands. Most ops
need none: their descriptions say that they are lowered to themselves at local shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spmd.errors import SpmdError, UnsupportedOpError
from spmd.ir.description import DESCRIPTIONS, rule_name
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.halo import Window
from spmd.ir.dialect.reducers import identity_element
from spmd.ir.dialect.registry import rule_of
from spmd.ir.dialect.rule import REDUCE, Rule
from spmd.ir.program import Op, Value
from spmd.ir.types import Attribute, TensorType, local_type
from spmd.lowering.local.dims import Split
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.planning.plan import Choice


@dataclass(frozen=True, eq=False)
class LocalOp:
    """An op to lower, with builder and mesh: global op, choice, local operands in its shardings."""

    b: Builder
    mesh: Mesh
    op: Op
    choice: Choice
    operands: tuple[Value, ...]

    @cached_property
    def rule(self) -> Rule:
        """The op's sharding rule."""
        return rule_of(self.op.kind, self.op.loc)

    @property
    def attrs(self) -> Mapping[str, Attribute]:
        """The global op's attributes."""
        return self.op.kind.attrs

    def result_types(self) -> tuple[TensorType, ...]:
        """Returns the types of the results on one device."""
        return tuple(
            local_type(type_, sharding, self.mesh)
            for type_, sharding in zip(self.op.kind.results, self.choice.results, strict=True)
        )

    def emit(
        self, operands: Sequence[Value] | None = None, **changed: Attribute
    ) -> tuple[Value, ...]:
        """Appends the op itself at local types, with other operands or attributes if given."""
        return self.b.op(
            self.op.name,
            self.operands if operands is None else operands,
            self.result_types(),
            {**self.attrs, **changed},
        )

    def dim(self, number: int, dim: int) -> Split:
        """Returns how a dim of operand `number` is split: its global size and its axes."""
        size, axes = self.op.kind.operands[number].shape[dim], self.choice.operands[number].dims
        return Split(dim, size, axes[dim], self.mesh)

    def reads(self, number: int) -> dict[int, tuple[Axes, Window]]:
        """Maps dims of an operand that tiles read in windows to (atoms of the tiles, window)."""
        return {
            read.dim: (axes, read.window)
            for read in self.rule.reads
            if read.operand == number
            and read.window is not None
            and (axes := self.choice.assignment[read.factor])
        }

    def masked(self, number: int, fill: Any = None, dims: Sequence[int] | None = None) -> Value:
        """Returns an operand with padding replaced by `fill` along `dims` (None: the reduced dims).

        `fill` is an element, or a function that returns a local value of the operand's type; None:
        the identity of the rule's reduction.
        """
        b, x = self.b, self.operands[number]
        type_ = b.types[x]
        for d in self.reduced_dims(number) if dims is None else dims:
            split = self.dim(number, d)
            if not split.is_even:
                position = b.iota(type_._replace(dtype="i32"), d)
                if fill is None:
                    fill = identity_element(self.rule.reduction, type_.dtype)
                exists = b.compare("LT", position, b.broadcast(split.own_count(b), type_.shape))
                x = b.select(exists, x, fill() if callable(fill) else b.splat(fill, type_))
        return x

    def reduced_dims(self, number: int) -> tuple[int, ...]:
        """Returns the dims of an operand that have a `reduce` factor."""
        kinds = [self.rule.factors[f].kind for dim in self.rule.operands[number] for f in dim[:1]]
        return tuple(d for d, kind in enumerate(kinds) if kind == REDUCE)


def or_identity(b: Builder, flag: Value, x: Value, reducer: str) -> Value:
    """Returns `x` if the scalar `flag` is set, else as many identity elements of `reducer`."""
    type_ = b.types[x]
    return b.select(flag, x, b.splat(identity_element(reducer, type_.dtype), type_))


LocalFunction = Callable[[LocalOp], tuple[Value, ...]]
_LOCAL: dict[str, LocalFunction] = {}


def local(name: str) -> Callable[[LocalFunction], LocalFunction]:
    """Returns a decorator that registers a local lowering of ops `name`; SpmdError for a second."""

    def register(function: LocalFunction) -> LocalFunction:
        if name in _LOCAL:
            raise SpmdError(f"op {name} already has a local lowering")
        _LOCAL[name] = function
        return function

    return register


def registered_ops() -> tuple[str, ...]:
    """Returns the sorted names of all ops with a local lowering, and of those that need none."""
    described = (n for n, a in DESCRIPTIONS.items() if a.is_same_locally or a.vanishes)
    return tuple(sorted({*_LOCAL, *described}))


def lower_op(local_op: LocalOp) -> tuple[Value, ...]:
    """Appends the local form of an op; returns its results. UnsupportedOpError if it has none."""
    name, about = rule_name(local_op.op.kind), local_op.op.kind.about
    if name in _LOCAL:
        return _LOCAL[name](local_op)
    if about.vanishes:
        return local_op.operands
    if about.is_same_locally:
        return local_op.emit()
    raise UnsupportedOpError(
        f"no local lowering for op {name}", op=name, source=local_op.op.loc.source
    )
