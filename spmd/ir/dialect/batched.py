"""Batched forms: the op that does many equal ops at once, on stacked tensors, as `jax.vmap` does.

    transpose %0 {permutation = [1, 0]}  ->  transpose %0 {permutation = [0, 2, 1]}

For most ops only the types change, and attributes that number dims or have an entry for each dim:
`in_front` makes their function. Other ops have a function of their own.
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

    kind: OpKind  # of the op that does all at once
    dim: int = 0  # which dim of its results is new
    start: int | None = None  # place of one more operand, the index along the new dim

    def with_attrs(self, attrs: Mapping[str, Attribute]) -> Batched:
        """Returns the same batched op with these attributes in place of its own."""
        kind = self.kind
        return self._replace(kind=OpKind(kind.name, kind.operands, kind.results, attrs))


Form = Callable[[OpKind, int, Sequence[bool]], "Batched | None"]
"""Takes a kind of op, how many such ops there are, and for each operand whether it differs among
them; returns the op that does all at once, None if there is none."""


def shifted(dims: Any) -> Any:
    """Returns numbers of dims, each plus 1, as they are behind a new dim 0: (0, 2) -> (1, 3)."""
    return dims + 1 if isinstance(dims, int) else tuple(dim + 1 for dim in dims)


_ENTRIES: Mapping[str, Any] = {
    "start_indices": 0,
    "strides": 1,
    "edge_padding_low": 0,
    "edge_padding_high": 0,
    "interior_padding": 0,
    "window_dimensions": 1,
    "window_strides": 1,
    "base_dilations": 1,
    "window_dilations": 1,
    "padding": (0, 0),
}
"""Maps an attribute with an entry for each dim to the entry that leaves a dim as it is."""


def _changed(name: str, value: Any, count: int) -> Any:
    """Returns an attribute's value for the op that does `count` ops at once, along a new dim 0."""
    if name in ("dimension", "dimensions"):
        return shifted(value)
    if name in ("broadcast_dimensions", "permutation"):  # the new dim is mapped to itself
        return (0, *shifted(value))
    if name in ("limit_indices", "slice_sizes"):  # all of the new dim is taken
        return (count, *value)
    return (_ENTRIES[name], *value) if value and name in _ENTRIES else value


def second_half(kind: OpKind) -> int:
    """Returns how many operands of a reduction are initial values: the second half of them."""
    return len(kind.operands) // 2


def in_front(apart: Callable[[OpKind], int] = lambda _: 0) -> Form:
    """Returns the `Form` of ops whose batched op has a new dim 0 in all tensors, else is the same.

    `apart` returns how many operands at the end stay scalars, with no new dim: if one of these
    differs among the ops there is no batched op.
    """

    def form(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
        wide = len(kind.operands) - apart(kind)
        if any(differs[wide:]):
            return None
        operands = (*(_more(t, count) for t in kind.operands[:wide]), *kind.operands[wide:])
        attrs = {name: _changed(name, value, count) for name, value in kind.attrs.items()}
        return Batched(_like(kind, operands, count, attrs))

    return form


def at_a_place(arrays: int) -> Form:
    """Returns the `Form` of dynamic slices and updates: one more index, 0, is for the new dim.

    The first `arrays` operands are tensors, those behind them the indices.
    """

    def form(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
        found = in_front(lambda kind: len(kind.operands) - arrays)(kind, count, differs)
        if found is None or len(kind.operands) == arrays:
            return found
        operands = list(found.kind.operands)
        operands.insert(arrays, operands[arrays])
        made = OpKind(kind.name, tuple(operands), found.kind.results, found.kind.attrs)
        return Batched(made, start=arrays)

    return form


def elementwise(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched:
    """Returns the op that does `count` elementwise ops; a scalar that all share stays a scalar."""
    shape = kind.results[0].shape
    operands = tuple(
        _more(t.with_shape(shape), count) if differ or t.shape == shape else t
        for t, differ in zip(kind.operands, differs, strict=True)
    )
    return Batched(_like(kind, operands, count, kind.attrs))


def form_of(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
    """Returns the op that does `count` ops of a kind at once, or None if there is none.

    `differs` says for each operand whether it differs among the ops, and so has the new dim.
    """
    found: Form | None = DESCRIPTIONS.get(rule_name(kind), UNKNOWN).batched
    return found(kind, count, differs) if found else None


def _more(type_: TensorType, count: int) -> TensorType:
    return type_.with_shape((count, *type_.shape))


def _like(
    kind: OpKind, operands: Sequence[TensorType], count: int, attrs: Mapping[str, Attribute]
) -> OpKind:
    return OpKind(kind.name, tuple(operands), tuple(_more(t, count) for t in kind.results), attrs)
