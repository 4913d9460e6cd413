"""Rewrites: gathers change places with the moves in front of them, where that saves an exchange.

What is taken apart only to be put together again stays whole (`regather`):

before: `%2 = reduce_scatter %1 {data} dim=0; %3 = all_gather %2 {data} dim=0`   (no other use)
after:  `%3 = all_reduce %1 {data}`

The bytes are the same, the latency is that of one collective. Where the scattered sum has another
use it stays, and is gathered: that sends no more than a sum that is sliced, and the other use need
not wait for all of it. Sums over links of both kinds are scattered and gathered on purpose: that
comes later (`two_level`).

before: `%2 = local_slice %1 {data} dim=0; %3 = all_gather %2 {data} dim=0`
after:  `%3` is `%1`

(Only what is the same on all devices along the atoms is ever sliced over them.)

What is gathered in several forms is gathered once (`share_gathers`):

before: `%2 = all_gather %1 {data} dim=0; ...`
        `%5 = transpose %1; %6 = convert %5 : bf16; %7 = all_gather %6 {data} dim=1`
after:  `%2 = all_gather %1 {data} dim=0; ...; %5 = transpose %2; %6 = convert %5 : bf16`

Forms are what converts, transposes and reshapes make of one value. They are followed back to the
last value that all of them have in common; that is gathered where it has no more bytes than the
forms together, and the forms are made of the result. Forms of one narrower type share a gather in
that type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import Index, producers_of
from spmd.ir.description import CONVERT
from spmd.ir.dialect.builder import LOCAL_SLICE, Builder
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops, remove_dead
from spmd.ir.types import TensorType
from spmd.lowering.rewrites.moves import again, is_move, operand_dim, pieces_of


class _Chain(NamedTuple):
    """The moves that lead to a gather's operand, followed back, and the gathered dim in each."""

    gather: Op
    values: list[Value]  # its operand, the value that this is a move of, and so on back
    dims: list[int]  # for each of `values`, the dim along which it would be gathered instead
    moves: list[Op]  # the ops between them, the last one first

    @staticmethod
    def of(gather: Op, made: Mapping[Value, Op]) -> _Chain:
        """The chain as far back as one dim stands for the gathered one."""
        value, dim = gather.operands[0], gather.kind.attrs["all_gather_dim"]
        chain = _Chain(gather, [value], [dim], [])
        while (op := made.get(value)) is not None and is_move(op.kind):
            before = operand_dim(op.kind, dim)
            if before is None:
                break
            value, dim = op.operands[0], before
            chain.values.append(value)
            chain.dims.append(dim)
            chain.moves.append(op)
        return chain

    def converts(self, source: Value) -> int:
        """How many converts are between a value and the gather."""
        return sum(op.name == CONVERT for op in self.moves[: self.values.index(source)])

    def repeated(self, b: Builder, source: Value, x: Value) -> Value:
        """The moves from `source` on, on a gathered `x`; they convert to what they did."""
        moves = list(zip(self.moves, self.dims, strict=False))[: self.values.index(source)]
        for op, dim in reversed(moves):
            b.loc = op.loc
            if op.name == CONVERT:
                x = b.convert(x, op.kind.results[0].dtype)
            else:
                shape = op.kind.results[0].scaled(dim, pieces_of(self.gather)).shape
                x = again(b, op, (x,), TensorType(shape, b.types[x].dtype))
        return x


def _is_gather(op: Op) -> bool:
    return op.collective == "all_gather" and len(op.results) == 1


def regather(program: Program) -> Program:
    """Undoes gathers of what was whole before, or could have been."""
    index = Index(program)
    undone: dict[Value, tuple[_Chain, Op]] = {}
    for op in filter(_is_gather, program.walk()):
        chain = _Chain.of(op, index.producers)
        apart = index.producers.get(chain.values[-1])
        if apart is not None and _undoes(chain, apart, index):
            undone[op.results[0]] = chain, apart
    if not undone:
        return program

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        if not op.results or op.results[0] not in undone:
            return None
        chain, apart = undone[op.results[0]]
        x = now(apart.operands[0])
        if apart.collective:
            note = f"{apart.loc.note} (and gathered: {op.loc.note})" if op.loc.note else None
            b.loc = apart.loc._replace(note=note or apart.loc.note)
            attrs = apart.kind.attrs
            x = b.collective("all_reduce", x, b.types[x], attrs["axes"], body=attrs["body"])
        return (chain.repeated(b, chain.values[-1], x),)

    return remove_dead(edit_ops(program, edit))


def _undoes(chain: _Chain, apart: Op, index: Index) -> bool:
    """Whether a gather puts together just what `apart`, in front of its moves, took apart."""
    # %2 = reduce_scatter %1 dim=0; %3 = transpose %2; %4 = all_gather %3 dim=1: the gathered dim is
    # dim 0 in front of the transpose, as the scattered one is.
    scatters = apart.collective == "reduce_scatter"
    if not scatters and apart.name != LOCAL_SLICE:
        return False
    attrs, others = apart.kind.attrs, chain.gather.kind.attrs
    same = attrs["axes"] == others["axes"] and attrs[apart.kind.about.along] == chain.dims[-1]
    if not same or "groups" in attrs or "groups" in others or chain.converts(chain.values[-1]):
        return False
    return not scatters or all(len(index.users[v]) == 1 for v in chain.values)


class _Source(NamedTuple):
    """The value that is gathered in place of several forms, its dim and its dtype there."""

    value: Value
    dim: int
    dtype: str
    forms: int


def share_gathers(program: Program) -> Program:
    """Gathers values of which a block gathers several forms once."""
    made = producers_of(program)
    sources: dict[Value, tuple[_Chain, _Source]] = {}

    def visit(region: Region) -> None:
        groups: dict[object, list[_Chain]] = {}
        for op in region.ops:
            for inner in op.regions:
                visit(inner)
            if _is_gather(op):
                form, attrs = _Chain.of(op, made), op.kind.attrs
                root = form.values[-1], form.dims[-1], attrs["axes"], attrs.get("groups")
                groups.setdefault(root, []).append(form)
        for forms in groups.values():
            source = _common(forms, program.types) if len(forms) > 1 else None
            if source is not None:
                sources.update((form.gather.results[0], (form, source)) for form in forms)

    visit(program.body)
    if not sources:
        return program

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value] | None:
        if not op.results or op.results[0] not in sources:
            return None
        form, source = sources[op.results[0]]
        attrs = {**op.kind.attrs, "all_gather_dim": source.dim}

        def gathered() -> Value:
            note = f"{op.loc.note} (one gather for {source.forms} forms of it)".strip()
            b.loc = op.loc._replace(note=note)
            x = b.convert(now(source.value), source.dtype)
            return b.op(op.name, (x,), (b.types[x].scaled(source.dim, pieces_of(op)),), attrs)[0]

        x = b.once(("gathered", source, attrs["axes"], attrs.get("groups")), gathered)
        b.loc = op.loc
        return (form.repeated(b, source.value, x),)

    return edit_ops(program, edit)


def _common(forms: Sequence[_Chain], types: Sequence[TensorType]) -> _Source | None:
    """The value to gather for all forms; None where each is better off alone."""
    # Of `%5 = transpose %1; %6 = convert %5`, gathers of %6 and of %5 share %5, gathers of %6 and
    # of %1 share %1: the first value of one chain that is in all others, by value and dim.
    others = [set(zip(form.values, form.dims, strict=True)) for form in forms[1:]]
    first = zip(forms[0].values, forms[0].dims, strict=True)
    value, dim = next(place for place in first if all(place in other for other in others))
    type_, wanted = types[value], {types[form.values[0]].dtype for form in forms}
    if len(wanted) == 1 and all(form.converts(value) == 1 for form in forms):
        narrower = TensorType(type_.shape, next(iter(wanted)))
        type_ = min(type_, narrower, key=lambda t: t.bytes)
    fits = type_.bytes <= sum(types[form.values[0]].bytes for form in forms)
    return _Source(value, dim, type_.dtype, len(forms)) if fits else None
