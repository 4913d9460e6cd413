"""Shift: replaces the `concatenate` of an associative scan's first element by a `select`.

Each level of `jax.lax.associative_scan` combines all elements but its first:

before: `%2 = slice %x[2::2]; %3 = slice %odd[:-1]; %4 = f %3, %2`
        `%5 = slice %x[0:1]; %6 = concatenate %5, %4`
after:  `%2 = slice %x[0::2]; %3 = pad %odd by one in front; %4 = f %3, %2`
        `%6 = select (the first), %2, %4`

Where the dim is split, this saves communication: before, the three slices and the concatenate need
halos, after, only the pad does. The select discards the element that `f` computes from the padding.
Where the dim is whole, nothing is saved, and GPUs take 1.1 to 1.5 times as long for the scan.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import Index
from spmd.ir.description import BROADCAST
from spmd.ir.dialect.builder import Builder, resized
from spmd.ir.dialect.reducers import NEUTRAL
from spmd.ir.program import Op, Program, Value
from spmd.ir.rewrite import Now, dedupe, edit_ops, remove_dead
from spmd.ir.types import TensorType
from spmd.mesh.sharding import Axes

SLICE, CONCATENATE, PAD = "stablehlo.slice", "stablehlo.concatenate", "stablehlo.pad"


def shift_heads(program: Program, proposals: Sequence[Sequence[Axes]]) -> Program:
    """Replaces concatenates of one element and a tail by selects, as the module describes.

    It does so only along dims that propagation proposes to split (`proposals[value][dim]` are the
    atoms proposed), and where nothing else reads the elementwise ops that compute the tail.
    """
    joins = []
    for op in program.walk():
        if op.name == CONCATENATE and len(op.operands) == 2:
            dim, (head, tail) = op.kind.attrs["dimension"], op.kind.operands
            if head.shape[dim] == 1 < tail.shape[dim] and proposals[op.results[0]][dim]:
                joins.append(op)
    if not joins:
        return program
    producers, users = Index(program).producers, Index(program).users
    found = {op.results[0]: shifts for op in joins if (shifts := _shifts(op, producers))}
    # What is read as it was, too, would be computed twice.
    moved = {value for shifts in found.values() for value in shifts.inside}
    for result, shifts in list(found.items()):
        readers = [op for value in shifts.inside for op, _ in users.get(value, ())]
        if any(op is None or not ({*op.results} & {*moved, *found}) for op in readers):
            del found[result]
    if not found:
        return program

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value]:
        return (_chosen(b, now, producers, found[op.results[0]], op),)

    return remove_dead(dedupe(edit_ops(program, edit, found)))


class _Shifts(NamedTuple):
    """Says how the tail in `concatenate(head, tail)` is computed from slices by elementwise ops."""

    dim: int  # along which head and tail are joined
    head: Value  # the slice that begins one step behind the concatenate's head
    inside: frozenset[Value]  # the elementwise ops' results, to be made one element longer


def _shifts(op: Op, producers: Mapping[Value, Op]) -> _Shifts | None:
    """Returns how `op`'s tail is made; None if not by elementwise ops on a slice past its head."""
    dim = op.kind.attrs["dimension"]
    first = producers.get(op.operands[0])
    if first is None or first.name != SLICE:
        return None
    inside: dict[Value, None] = {}
    leaves: dict[Value, None] = {}
    ask = [op.operands[1]]
    while ask:
        value = ask.pop()
        made = producers.get(value)
        if value in inside or value in leaves:
            continue
        if made is not None and made.kind.about.is_elementwise and len(made.results) == 1:
            inside[value] = None
            ask += [v for v, t in zip(made.operands, made.kind.operands, strict=True) if t.rank]
        else:
            leaves[value] = None
    heads = []  # slices of what comes, step by step, behind the element that the head is
    for leaf in leaves:
        made = producers.get(leaf)
        if made is not None and made.name == SLICE and made.operands == first.operands:
            starts, stride = made.kind.attrs["start_indices"], made.kind.attrs["strides"][dim]
            if resized(starts, dim, starts[dim] - stride) == first.kind.attrs["start_indices"]:
                heads.append(leaf)
    return _Shifts(dim, heads[0], frozenset(inside)) if inside and heads else None


def _chosen(
    b: Builder, now: Now, producers: Mapping[Value, Op], shifts: _Shifts, join: Op
) -> Value:
    """Appends the ops that replace the concatenate `join`; returns the select, their result."""
    dim = shifts.dim

    def longer(value: Value) -> Value:
        """Returns a value with one more element in front (0 if unknown): `[b]` -> `[a, b]`."""
        return b.once(("longer", value, dim), lambda: made(value))

    def made(value: Value) -> Value:
        op, type_ = producers.get(value), b.types[value]
        type_ = type_.with_dim(dim, type_.shape[dim] + 1)
        if op is not None and value in shifts.inside:
            operands = [longer(v) if b.types[v].rank else now(v) for v in op.operands]
            return b.op(op.name, operands, (type_,), op.kind.attrs)[0]
        attrs = {} if op is None else op.kind.attrs
        if op is not None and op.name == SLICE:
            starts, stride = attrs["start_indices"], attrs["strides"][dim]
            if starts[dim] >= stride:
                # It ends where the slice of every element from there would that is there already.
                begin = starts[dim] - stride
                limit = begin + (type_.shape[dim] - 1) * stride + 1
                attrs = {
                    **attrs,
                    "start_indices": resized(starts, dim, begin),
                    "limit_indices": resized(attrs["limit_indices"], dim, limit),
                }
                return b.op(SLICE, (now(op.operands[0]),), (type_,), attrs)[0]
        if op is not None and op.name == BROADCAST:
            sizes = zip(attrs["broadcast_dimensions"], op.kind.operands[0].shape, strict=True)
            if dict(sizes).get(dim, 1) == 1:  # its elements along the dim are alike
                return b.op(op.name, [now(v) for v in op.operands], (type_,), attrs)[0]
        none = (0,) * type_.rank
        padding = {
            "edge_padding_low": resized(none, dim, 1),
            "edge_padding_high": none,
            "interior_padding": none,
            NEUTRAL: True,
        }
        return b.op(PAD, (now(value), b.splat(0, type_.with_shape(()))), (type_,), padding)[0]

    type_ = join.kind.results[0]
    places = b.iota(TensorType(type_.shape, "i32"), dim)
    is_first = b.compare("LT", places, b.splat(1, b.types[places]))
    return b.select(is_first, longer(shifts.head), longer(join.operands[1]))
