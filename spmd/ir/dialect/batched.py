"""Batched forms: the op that does many equal ops at once, on stacked tensors, as `jax.vmap` does.

    transpose %0 {permutation = [1, 0]}  ->  transpose %0 {permutation = [0, 2, 1]}

Most ops differ in nothing but their types and in attributes that number dims or have an entry for
each. An op's description names these attributes (`in_front`); where that is not all, it has a
function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from spmd.ir.description import DESCRIPTIONS, UNKNOWN
from spmd.ir.dialect.registry import rule_name
from spmd.ir.program import OpKind
from spmd.ir.types import Attribute, TensorType


class Batched(NamedTuple):
    """The op that does several ops of one kind at once, on tensors stacked along a new dim."""

    kind: OpKind  # the op that does all at once
    dim: int = 0  # which dim of its results is new
    start: int | None = None  # the operand that says where a place is along the new dim


Form = Callable[[OpKind, int, Sequence[bool]], "Batched | None"]
"""From an op's kind, how many there are, and which operands differ among them: the op that does all
at once, None if there is none."""


def shifted(dims: Any, _: int = 0) -> Any:
    """Adds 1 to each number of a dim, as there is a new dim 0: (0, 2) -> (1, 3)."""
    return dims + 1 if isinstance(dims, int) else tuple(dim + 1 for dim in dims)


def behind_first(dims: Sequence[int], _: int) -> tuple[int, ...]:
    """Adds a new dim 0 that is mapped to itself to a map of all dims: (1, 0) -> (0, 2, 1)."""
    return (0, *shifted(dims))


def first(entry: Any) -> Callable[[Any, int], Any]:
    """Makes a function that puts an entry for the new dim in front of a list with one for each."""
    return lambda entries, _: entries and (entry, *entries)


def all_of_it(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Puts `count` in front of the sizes of a slice, which takes all of the new dim 0."""
    return (count, *sizes)


def second_half(kind: OpKind) -> int:
    """Returns how many operands of a reduction are initial values: the second half of all."""
    return len(kind.operands) // 2


def in_front(apart: Callable[[OpKind], int] = lambda _: 0, **changed: Any) -> Form:
    """Makes the form of ops whose batched op differs only in types and `changed` attributes.

    `changed` maps the name of an attribute to a function from its value and the count of ops to the
    new value, as in `in_front(dimension=shifted)`. `apart` counts the scalars at the end of the
    operands, which get no new dim: ops that differ in one of them have no batched form.
    """

    def form(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
        wide = len(kind.operands) - apart(kind)
        if any(differs[wide:]):
            return None
        operands = (*(_more(t, count) for t in kind.operands[:wide]), *kind.operands[wide:])
        attrs = {k: changed[k](v, count) if k in changed else v for k, v in kind.attrs.items()}
        return Batched(_like(kind, operands, count, attrs))

    return form


def at_a_place(arrays: int, **changed: Any) -> Form:
    """Makes the form of dynamic slices and updates, with one more index: 0 along the new dim.

    The first `arrays` operands are tensors, the indices follow; `changed` is as for `in_front`.
    """
    beside = in_front(lambda kind: len(kind.operands) - arrays, **changed)

    def form(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
        found = beside(kind, count, differs)
        if found is None or len(kind.operands) == arrays:
            return found
        operands = list(found.kind.operands)
        operands.insert(arrays, operands[arrays])
        made = OpKind(kind.name, tuple(operands), found.kind.results, found.kind.attrs)
        return Batched(made, start=arrays)

    return form


def elementwise(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched:
    """Returns the form of an elementwise op; a scalar predicate that all share stays a scalar."""
    shape = kind.results[0].shape
    operands = tuple(
        _more(t.with_shape(shape), count) if differ or t.shape == shape else t
        for t, differ in zip(kind.operands, differs, strict=True)
    )
    return Batched(_like(kind, operands, count, kind.attrs))


def form_of(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
    """Returns the form of `count` ops that differ in the operands that `differs` marks, or None."""
    found: Form | None = DESCRIPTIONS.get(rule_name(kind), UNKNOWN).batched
    return found(kind, count, differs) if found else None


def _more(type_: TensorType, count: int) -> TensorType:
    return type_.with_shape((count, *type_.shape))


def _like(
    kind: OpKind, operands: Sequence[TensorType], count: int, attrs: Mapping[str, Attribute]
) -> OpKind:
    results = tuple(_more(t, count) for t in kind.results)
    return OpKind(kind.name, tuple(operands), results, attrs)
