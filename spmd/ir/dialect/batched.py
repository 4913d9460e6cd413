"""Batched forms: the op that does many equal ops at once, on stacked tensors, as `jax.vmap` does.

    transpose %0 {permutation = [1, 0]}  ->  transpose %0 {permutation = [0, 2, 1]}

For most ops only the types change, and attributes that number dims or have an entry for each dim:
theirs is `in_front`. Other ops have a function of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from spmd.ir.program import OpKind
from spmd.ir.types import Attribute, TensorType


class Batched(NamedTuple):
    """The op that does several ops of one kind at once, on tensors stacked along a new dim."""

    kind: OpKind  # of the op that does all at once
    dim: int = 0  # which dim of its results is new
    start: int | None = None  # place of one more operand, the index along the new dim


Form = Callable[[OpKind, int, Sequence[bool]], Batched | None]
"""Takes a kind of op, how many such ops there are, and for each operand whether it differs among
them; returns the op that does all at once, None if there is none."""


def shifted(dims: Any) -> Any:
    """Returns numbers of dims, each plus 1, as they are behind a new dim 0: (0, 2) -> (1, 3)."""
    return dims + 1 if isinstance(dims, int) else tuple(dim + 1 for dim in dims)


_ENTRIES: Mapping[str, Any] = {
    "start_indices": 0, "strides": 1, "edge_padding_low": 0, "edge_padding_high": 0,
    "interior_padding": 0, "window_dimensions": 1, "window_strides": 1, "base_dilations": 1,
    "window_dilations": 1, "padding": (0, 0),
}  # fmt: skip
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


def stacked(kind: OpKind, count: int, wide: Sequence[bool], **attrs: Attribute) -> Batched:
    """Returns the op with a new dim 0 in results and operands that are `wide`, and with `attrs`."""

    def more(type_: TensorType) -> TensorType:
        return type_.with_shape((count, *type_.shape))

    operands = (more(t) if is_wide else t for t, is_wide in zip(kind.operands, wide, strict=True))
    changed = {name: _changed(name, value, count) for name, value in kind.attrs.items()}
    results = tuple(map(more, kind.results))
    return Batched(OpKind(kind.name, tuple(operands), results, {**changed, **attrs}))


def in_front(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched:
    """Returns the op with a new dim 0 in all operands and results."""
    return stacked(kind, count, [True] * len(differs))


def but_scalars(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
    """Returns the op with a new dim 0 except in its last operands, scalars; None if they differ."""
    wide = [i < len(kind.results) for i in range(len(differs))]
    return None if any(differs[len(kind.results) :]) else stacked(kind, count, wide)


def at_a_place(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
    """Returns the dynamic slice or update with an index for new dim 0; None if indices differ."""
    arrays = len(kind.operands) - kind.operands[0].rank
    if arrays == len(differs) or any(differs[arrays:]):
        return None
    made = stacked(kind, count, [i < arrays for i in range(len(differs))]).kind
    operands = (*made.operands[: arrays + 1], *made.operands[arrays:])  # indices are of one type
    return Batched(OpKind(kind.name, operands, made.results, made.attrs), start=arrays)


def elementwise(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched:
    """Returns the op that does `count` elementwise ops; a scalar that all share stays a scalar."""
    shape = kind.results[0].shape
    wide = [d or t.shape == shape for t, d in zip(kind.operands, differs, strict=True)]
    types = (t.with_shape(shape) if w else t for t, w in zip(kind.operands, wide, strict=True))
    return stacked(OpKind(kind.name, tuple(types), kind.results, kind.attrs), count, wide)


def form_of(kind: OpKind, count: int, differs: Sequence[bool]) -> Batched | None:
    """Returns the op that does `count` ops of a kind at once, or None if there is none.

    `differs` says for each operand whether it differs among the ops, and so has the new dim.
    """
    found: Form | None = kind.about.batched
    return found(kind, count, differs) if found else None
