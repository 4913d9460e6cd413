"""Rewrites: exchanges change places with the ops that only move elements, so that they send less.

A convert, a transpose or a reshape of a gathered value is the gathered value of a convert, a
transpose or a reshape. All that changes is the size of one dim, which `operand_dim` follows from
the result to the operand.

`narrow`: elements travel in the narrowest type that they have on their way. A convert gives the
same wherever an element lies, so no number changes; reductions are left alone, because the type of
their terms is the precision of the sum.

before: `%2 = all_gather %1 : f32; %3 = transpose %2; %4 = convert %3 : bf16` (no other use)
after:  `%2 = convert %1 : bf16; %3 = all_gather %2; %4 = transpose %3`

before: `%2 = convert %1 : f32; %3 = transpose %2; %4 = all_gather %3` (`%1` is bf16)
after:  `%2 = transpose %1; %3 = all_gather %2; %4 = convert %3 : f32`

`regather`: what is scattered or sliced only to be gathered again stays whole.

before: `%2 = reduce_scatter %1 {data} dim=0; %3 = all_gather %2 {data} dim=0`   (no other use)
after:  `%3 = all_reduce %1 {data}`

before: `%2 = local_slice %1 {data} dim=0; %3 = all_gather %2 {data} dim=0`
after:  `%3` is `%1`

A sum sends the same bytes as its two halves, with the latency of one collective. If the scattered
sum has another use it stays, and is gathered: the other use need not wait for the whole sum. Only
a value that is the same on all devices along the atoms is ever sliced over them. Sums over fast
and slow links are scattered and gathered on purpose, but only later (`two_level`).

`share_gathers`: several forms of one value, which converts, transposes and reshapes make of it, are
gathered once, if that sends no more bytes than gathering each form.

before: `%2 = all_gather %1 {data} dim=0; ...`
        `%5 = transpose %1; %6 = convert %5 : bf16; %7 = all_gather %6 {data} dim=1`
after:  `%2 = all_gather %1 {data} dim=0; ...; %5 = transpose %2; %6 = convert %5 : bf16`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.ir.control_flow import Index, producers_of, users_of
from spmd.ir.description import CONVERT, RESHAPE, TRANSPOSE
from spmd.ir.dialect.builder import LOCAL_SLICE, Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops, remove_dead
from spmd.ir.types import TensorType, dtype_bits

# ---------------------------------------------------------------------------------------------
# Ops that change places with collectives, for this file and others.


def is_move(kind: OpKind) -> bool:
    """Whether an op only moves the elements of its one operand, or converts their type."""
    return kind.name in (CONVERT, TRANSPOSE, RESHAPE)


def is_elementwise(kind: OpKind) -> bool:
    """Whether an op is elementwise and has one result."""
    return kind.about.is_elementwise and len(kind.results) == 1


def operand_dim(kind: OpKind, dim: int) -> int | None:
    """Returns the operands' dim that is cut or joined with the result's `dim`; None if none is."""
    if kind.name == TRANSPOSE:
        found: int = kind.attrs["permutation"][dim]
        return found
    if kind.name != RESHAPE:
        return dim if is_elementwise(kind) else None
    # The dim in front of which the same elements lie: joining pieces along either then gives the
    # same. From (2, 12) to (2, 3, 4) dim 1 goes to dim 1: of 24 elements, 2 groups lie in front of
    # both, and each group is split in order.
    other = kind.operands[0].shape
    before = math.prod(kind.results[0].shape[:dim])
    places = [d for d in range(len(other)) if math.prod(other[:d]) == before]
    if not before or not places:
        return None
    return next((d for d in places if other[d] > 1), places[-1])


def again(b: Builder, op: Op, operands: Sequence[Value], result: TensorType) -> Value:
    """Appends an op with the same name and attributes, but other operands and result type."""
    return b.op(op.name, operands, (result,), op.kind.attrs)[0]


def pieces_of(op: Op) -> int:
    """Returns how many devices' pieces a gather joins, or a reduce-scatter takes apart."""
    dim = op.kind.attrs[op.kind.about.along]
    sizes = op.kind.operands[0].shape[dim], op.kind.results[0].shape[dim]
    return max(sizes) // min(sizes)


def _retyped(b: Builder, op: Op, x: Value) -> Value:
    return again(b, op, (x,), TensorType(op.kind.results[0].shape, b.types[x].dtype))


# ---------------------------------------------------------------------------------------------
# Exchanges of narrower types.

_EXCHANGES = ("all_gather", "all_to_all", "collective_permute")  # they hand elements on as they are


def narrow(program: Program) -> Program:
    """Moves converts to the other side of exchanges: elements travel in the narrower type."""
    return _narrowed_first(_widened_last(program))


def _is_narrower(dtype: str, other: str) -> bool:
    """Whether `dtype` has fewer bytes an element than `other`; types below a byte don't count."""
    return 8 <= dtype_bits(dtype) < dtype_bits(other)


def _reshapes(op: Op) -> bool:
    return op.kind.adds_dims or op.name in (TRANSPOSE, RESHAPE)


def _passes_on(op: Op) -> bool:
    """Whether an op only exchanges, transposes or reshapes its operand's elements."""
    return len(op.results) == 1 and (op.collective in _EXCHANGES or _reshapes(op))


def _widened_last(program: Program) -> Program:
    made = producers_of(program)

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        made.update((result, op) for result in op.results)
        if op.collective not in _EXCHANGES or len(op.results) != 1:
            return None
        moves = [op]
        while (source := made.get(moves[-1].operands[0])) is not None and _reshapes(source):
            moves.append(source)
        if source is None or source.name != CONVERT:
            return None
        if not _is_narrower(source.kind.operands[0].dtype, source.kind.results[0].dtype):
            return None
        (x,) = source.operands
        for move in reversed(moves):
            x = _retyped(b, move, x)
        wide = b.convert(x, op.kind.results[0].dtype)
        made[wide] = b.last  # for the next exchange of it
        return (wide,)

    return edit_ops(program, edit)


def _narrowed_first(program: Program) -> Program:
    wanted = _wanted_types(program)
    if not wanted:
        return program
    made = producers_of(program)

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        made.update((result, op) for result in op.results)
        if op.name == CONVERT and op.kind.results[0] == b.types[op.operands[0]]:
            return op.operands
        if not op.results or op.results[0] not in wanted:
            return None
        (x,), dtype = op.operands, wanted[op.results[0]]
        source = made.get(x)
        if source is not None and source.name == CONVERT and source.kind.operands[0].dtype == dtype:
            return (_retyped(b, op, source.operands[0]),)
        narrowed = b.once(("narrowed", x, dtype), lambda: b.convert(x, dtype))
        return (_retyped(b, op, narrowed),)

    return edit_ops(program, edit)


def _wanted_types(program: Program) -> dict[Value, str]:
    """Maps each exchanged value to the one narrower type that all its uses convert it to."""
    # Backwards from converts: `found` has the type that everything behind a value agrees on. Of
    #   %2 = all_gather %1; %3 = transpose %2; %4 = convert %3 : bf16; %5 = add %3, %3
    # %3 is also added in f32, so neither it nor %2 is in `found`. Then forwards from exchanges: a
    # transpose without an exchange in front of it stays as it is.
    if not any(op.collective in _EXCHANGES for op in program.walk()):
        return {}
    users = users_of(program)
    found: dict[Value, str] = {}

    def wanted(use: Op | None, have: str) -> str | None:
        if use is None:
            return None
        if use.name == CONVERT:
            dtype = use.kind.results[0].dtype
            return dtype if _is_narrower(dtype, have) else None
        return found.get(use.results[0]) if _passes_on(use) else None

    ops = [op for op in program.walk() if _passes_on(op)]
    for op in reversed(ops):
        uses = users.get(op.results[0], [])
        types = {wanted(use, op.kind.results[0].dtype) for use, _ in uses}
        if len(types) == 1 and (dtype := types.pop()) is not None:
            found[op.results[0]] = dtype
    moved: dict[Value, str] = {}
    for op in ops:
        behind = op.collective in _EXCHANGES or op.operands[0] in moved
        if behind and op.results[0] in found:
            moved[op.results[0]] = found[op.results[0]]
    return moved


# ---------------------------------------------------------------------------------------------
# Gathers, and the moves in front of them.


class _Chain(NamedTuple):
    """A gather, the moves that make its operand, and the dim to gather before each of them."""

    gather: Op
    values: list[Value]  # its operand, the value that this is a move of, and so on back
    dims: list[int]  # for each of `values`, the dim along which it would be gathered instead
    moves: list[Op]  # the ops between them, the last one first

    @staticmethod
    def of(gather: Op, made: Mapping[Value, Op]) -> _Chain:
        """Follows moves back from a gather, as long as one dim corresponds to the gathered one."""
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
        return sum(op.name == CONVERT for op in self.moves[: self.values.index(source)])

    def repeated(self, b: Builder, source: Value, x: Value) -> Value:
        """Repeats on `x`, which is `source` gathered, the moves from `source` to the gather."""
        moves = list(zip(self.moves, self.dims, strict=False))[: self.values.index(source)]
        for op, dim in reversed(moves):
            b.loc = op.loc
            if op.name == CONVERT:
                x = b.convert(x, op.kind.results[0].dtype)
            else:
                whole = op.kind.results[0].scaled(dim, pieces_of(self.gather))
                x = again(b, op, (x,), whole._replace(dtype=b.types[x].dtype))
        return x


def _is_gather(op: Op) -> bool:
    return op.collective == "all_gather" and len(op.results) == 1


def regather(program: Program) -> Program:
    """Replaces gathers of what was scattered or sliced over the same axes by the whole value."""
    index = Index(program)
    undone: dict[Value, tuple[_Chain, Op]] = {}
    for op in filter(_is_gather, program.walk()):
        # %2 = reduce_scatter %1 dim=0; %3 = transpose %2; %4 = all_gather %3 dim=1: the gathered
        # dim is dim 0 in front of the transpose, as the scattered one is.
        chain = _Chain.of(op, index.producers)
        apart = index.producers.get(chain.values[-1])
        scatters = apart is not None and apart.collective == "reduce_scatter"
        if apart is None or not (scatters or apart.name == LOCAL_SLICE):
            continue
        attrs, others = apart.kind.attrs, op.kind.attrs
        same = attrs["axes"] == others["axes"] and attrs[apart.kind.about.along] == chain.dims[-1]
        if not same or "groups" in attrs or "groups" in others or chain.converts(chain.values[-1]):
            continue
        if not scatters or all(len(index.users[v]) == 1 for v in chain.values):
            undone[op.results[0]] = chain, apart

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value]:
        chain, apart = undone[op.results[0]]
        x = now(apart.operands[0])
        if apart.collective:
            note = f"{apart.loc.note} (and gathered: {op.loc.note})" if op.loc.note else None
            b.loc = apart.loc._replace(note=note or apart.loc.note)
            attrs = apart.kind.attrs
            x = b.collective("all_reduce", x, b.types[x], attrs["axes"], body=attrs["body"])
        return (chain.repeated(b, chain.values[-1], x),)

    return remove_dead(edit_ops(program, edit, undone)) if undone else program


class _Source(NamedTuple):
    """A value to gather in place of several forms of it, along `dim` and converted to `dtype`."""

    value: Value
    dim: int
    dtype: str
    forms: int


def share_gathers(program: Program) -> Program:
    """Gathers a value once where a block gathers several forms of it."""
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

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value]:
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

    return edit_ops(program, edit, sources)


def _common(forms: Sequence[_Chain], types: Sequence[TensorType]) -> _Source | None:
    """Returns the value to gather for all forms; None where gathering each sends fewer bytes."""
    # Of `%5 = transpose %1; %6 = convert %5`, gathers of %6 and of %5 share %5, gathers of %6 and
    # of %1 share %1: the first value of one chain that is in all others, by value and dim. Forms of
    # one narrower type share a gather in that type.
    others = [set(zip(form.values, form.dims, strict=True)) for form in forms[1:]]
    first = zip(forms[0].values, forms[0].dims, strict=True)
    value, dim = next(place for place in first if all(place in other for other in others))
    type_, wanted = types[value], {types[form.values[0]].dtype for form in forms}
    if len(wanted) == 1 and all(form.converts(value) == 1 for form in forms):
        narrower = TensorType(type_.shape, next(iter(wanted)))
        type_ = min(type_, narrower, key=lambda t: t.bytes)
    fits = type_.bytes <= sum(types[form.values[0]].bytes for form in forms)
    return _Source(value, dim, type_.dtype, len(forms)) if fits else None
