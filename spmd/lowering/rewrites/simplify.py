"""Rewrites that save work: exchanges change places with the ops around them, and send less.

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

`slice_collectives`: of what is read in slices only that slice is made, and of a sum or a gathered
value no more ever exists. Ops in between, as long as they go element by element or only move
elements, are done on slices.

before: `%2 = all_reduce %0 {data, model}; %3 = convert %2; %4 = multiply %3, %1`
        `%5 = transpose %4; %6 = local_slice %5 {data} dim=1`
after:  `%2 = reduce_scatter %0 {data} dim=0; %3 = all_reduce %2 {model}; %4 = convert %3`
        `%5 = local_slice %1 {data} dim=0; %6 = multiply %4, %5; %7 = transpose %6`

before: `%2 = all_gather %1 {data} dim=0; %3 = local_slice %2 {data} dim=1`
after:  `%3 = all_to_all %1 {data} concat=0 split=1`

before: `%2 = all_gather %1 {data} dim=0; %3 = local_slice %2 {model} dim=1`
after:  `%2 = local_slice %1 {model} dim=1; %3 = all_gather %2 {data} dim=0`

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
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple, TypeVar

from spmd.ir.control_flow import Index, producers_of, users_of
from spmd.ir.description import CONVERT, RESHAPE, TRANSPOSE
from spmd.ir.dialect.builder import LOCAL_SLICE, Builder
from spmd.ir.program import Op, OpKind, Program, Region, Value, free_values
from spmd.ir.rewrite import Now, dedupe, edit_ops, remove_dead
from spmd.ir.types import TensorType, dtype_bits
from spmd.lowering.partition import HELD
from spmd.lowering.rewrites.ffts import join_ffts
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes
from spmd.mesh.topology import Topology


def simplify(program: Program, mesh: Mesh, topology: Topology) -> Program:
    """Runs the rewrites that save work: equal ops are done once, and gathers shared and sliced."""
    # `regather` undoes pairs of scatter and gather, which `two_level` makes on purpose, so it comes
    # before.
    # XLA for CPUs lays an FFT of several dims as its readers like it, which it then refuses to run.
    joined = program if topology.platform == "cpu" else join_ffts(program)
    deduped = dedupe(joined)
    program = share_gathers(regather(narrow(deduped)))
    program = program if program is deduped else dedupe(program)
    return remove_dead(slice_collectives(program, mesh))


# ---------------------------------------------------------------------------------------------
# Ops that change places with collectives, for this file and others.


def is_move(kind: OpKind) -> bool:
    """Whether an op only moves the elements of its one operand, or converts their type."""
    return kind.name in (CONVERT, TRANSPOSE, RESHAPE)


def operand_dim(kind: OpKind, dim: int) -> int | None:
    """Returns the operands' dim that is cut or joined with the result's `dim`; None if none is."""
    if kind.name == TRANSPOSE:
        found: int = kind.attrs["permutation"][dim]
        return found
    if kind.name != RESHAPE:
        return dim if kind.about.is_elementwise and len(kind.results) == 1 else None
    # The dim in front of which the same elements lie: joining pieces along either then gives the
    # same. From (2, 12) to (2, 3, 4) dim 1 goes to dim 1: of 24 elements, 2 groups lie in front of
    # both, and each group is split in order.
    other = kind.operands[0].shape
    before = math.prod(kind.results[0].shape[:dim])
    places = [d for d in range(len(other)) if math.prod(other[:d]) == before]
    if not before or not places:
        return None
    return next((d for d in places if other[d] > 1), places[-1])


def operand_dims(kind: OpKind, dim: int, parts: int) -> list[int | None] | None:
    """Returns the dim of each operand of which an op makes one of `parts` equal parts of a dim.

    None stands for a scalar, which is read whole; there are none at all if parts are not enough.
    """
    found = operand_dim(kind, dim)
    if found is None or any(type_.shape[found] % parts for type_ in kind.operands if type_.rank):
        return None
    return [found if type_.rank else None for type_ in kind.operands]


def again(b: Builder, op: Op, operands: Sequence[Value], result: TensorType) -> Value:
    """Appends an op with the same name and attributes, but other operands and result type."""
    return b.op(op.name, operands, (result,), op.kind.attrs)[0]


def pieces_of(op: Op) -> int:
    """Returns how many devices' pieces a gather joins, or a reduce-scatter takes apart."""
    dim = op.kind.attrs[op.kind.about.along]
    sizes = op.kind.operands[0].shape[dim], op.kind.results[0].shape[dim]
    return max(sizes) // min(sizes)


_Part = TypeVar("_Part")


def _agreed(
    program: Program,
    asked: Callable[[Op, int, Mapping[Value, _Part]], _Part | None],
    shared: Callable[[Sequence[_Part]], _Part | None],
) -> dict[Value, _Part]:
    """Maps values to the part of them that serves all their uses, if less than the whole does.

    `asked` says which part of an operand, by its number, is enough for an op, given the parts of
    its results that are enough for theirs; `shared` which part holds several others.
    """
    users = users_of(program)
    found: dict[Value, _Part] = {}
    for op in reversed([*program.walk()]):
        parts: list[_Part] = []
        for use, i in users.get(op.results[0], ()) if len(op.results) == 1 else ():
            part = None if use is None or op.regions else asked(use, i, found)
            if part is None:
                break
            parts.append(part)
        else:
            if parts and (part := shared(parts)) is not None:
                found[op.results[0]] = part
    return found


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
    # Backwards from converts: the type that everything behind a value agrees on. Of
    #   %2 = all_gather %1; %3 = transpose %2; %4 = convert %3 : bf16; %5 = add %3, %3
    # %3 is also added in f32, so neither it nor %2 is in `wanted`. Then forwards from exchanges: a
    # transpose without an exchange in front of it stays as it is.
    def asked(use: Op, _: int, found: Mapping[Value, str]) -> str | None:
        if use.name == CONVERT:
            (have,), (made,) = use.kind.operands, use.kind.results
            return made.dtype if _is_narrower(made.dtype, have.dtype) else None
        return found.get(use.results[0]) if _passes_on(use) else None

    wanted = _agreed(program, asked, lambda types: types[0] if len(set(types)) == 1 else None)
    narrowed = set[Value]()
    for op in filter(_passes_on, program.walk()):
        is_behind = op.collective in _EXCHANGES or op.operands[0] in narrowed
        if is_behind and op.results[0] in wanted:
            narrowed.add(op.results[0])

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        if op.name == CONVERT and op.kind.results[0] == b.types[op.operands[0]]:
            return op.operands
        if not op.results or op.results[0] not in narrowed:
            return None
        (x,), dtype = op.operands, wanted[op.results[0]]
        return (_retyped(b, op, b.once(("narrowed", x, dtype), lambda: b.convert(x, dtype))),)

    return edit_ops(program, edit) if narrowed else program


# ---------------------------------------------------------------------------------------------
# Collectives of which slices are read.


class _Kept(NamedTuple):
    """The slice of a value that its uses need: a device's piece of `dim` over `axes`."""

    axes: Axes
    dim: int


def slice_collectives(program: Program, mesh: Mesh) -> Program:
    """Makes, of a collective's result, only the slice that each device keeps for all its uses."""
    # `cuts` comes of going backwards from slices: which values are only read in slices, and along
    # which dim. `sliced` of going forwards from collectives: where a slice saves an exchange, and
    # what is made of it. Both have to hold. For the first example above:
    #
    #   cuts     %5: {data} dim 1   %4, %3, %2: {data} dim 0     (dim 1 behind the transpose)
    #   sliced   %2, an all_reduce; then %3, %4, %5, which are made of it
    #
    # Afterwards every sliced value is its own piece, %6 has nothing left to cut, and %1, which is
    # whole, is cut on its way into the multiplication.
    captured = {v for op in program.walk() for region in op.regions for v in free_values(region)}

    def asked(use: Op, operand: int, found: Mapping[Value, _Kept]) -> _Kept | None:
        if use.operands[operand] in captured:  # a branch may need it, which leaves it whole
            return None
        if use.name == LOCAL_SLICE:
            return _Kept(use.kind.attrs["axes"], use.kind.attrs["dim"])
        cut = found.get(use.results[0]) if len(use.results) == 1 else None
        parts = _operand_cuts(use, cut, mesh) if cut is not None else None
        return parts[operand] if parts is not None else None

    cuts = _agreed(program, asked, _shared)
    permutes = not any(HELD in op.kind.attrs for op in program.walk())
    sliced = set[Value]()
    for op in program.walk():
        cut = cuts.get(op.results[0]) if len(op.results) == 1 else None
        if cut is None or "groups" in op.kind.attrs:
            continue
        passes = _operand_cuts(op, cut, mesh) is not None
        is_source = op.collective == "all_reduce"
        if op.collective == "all_gather":  # the slice of its result takes no gather, or a smaller
            axes, dim = op.kind.attrs["axes"], op.kind.attrs["all_gather_dim"]
            is_permuted = permutes and set(axes) == set(cut.axes)
            is_part = cut.dim == dim and (axes[: len(cut.axes)] == cut.axes or is_permuted)
            is_source = passes or cut.axes[: len(axes)] == axes or is_part
        if is_source or (passes and not sliced.isdisjoint(op.operands)):
            sliced.add(op.results[0])
    # Operands by their old numbers: afterwards a slice and what it was taken of may be one value.
    operands_of = {op.results: op.operands for op in program.walk() if op.results}

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        if not op.results:
            return None
        whole = operands_of[op.results]
        if op.name == LOCAL_SLICE and whole[0] in sliced:
            axes, dim = op.kind.attrs["axes"], op.kind.attrs["dim"]
            return (piece(b, op.operands[0], whole[0], axes, dim),)
        if op.results[0] not in sliced:
            return None
        axes, dim = cuts[op.results[0]]
        if op.collective == "all_reduce" and whole[0] not in sliced:
            return (_scattered(b, op, axes, dim, mesh),)
        parts = _operand_cuts(op, cuts[op.results[0]], mesh)
        if parts is None:  # it is an all-gather along this dim, or over these axes
            return (_ungathered(b, op, axes, dim, mesh),)
        operands = [
            x if part is None else piece(b, x, was, *part)
            for x, was, part in zip(op.operands, whole, parts, strict=True)
        ]
        type_ = op.kind.results[0].scaled(dim, 1, mesh.extent(axes))
        return (again(b, op, operands, type_),)

    def piece(b: Builder, x: Value, whole: Value, axes: Axes, dim: int) -> Value:
        """Slices `whole` for this device, where `x` may be a coarser slice of it already."""
        have = cuts[whole].axes if whole in sliced else ()
        return _sliced(b, x, axes[len(have) :], dim, mesh)

    return edit_ops(program, edit)


def _operand_cuts(op: Op, cut: _Kept, mesh: Mesh) -> list[_Kept | None] | None:
    """Returns of which slices of its operands an op makes this slice of its result.

    None stands for an operand that is read whole; there are none at all if slices are not enough.
    """
    attrs = op.kind.attrs
    if op.collective:
        passes = op.collective in ("all_gather", "all_reduce") and "groups" not in attrs
        passes = passes and set(cut.axes).isdisjoint(attrs["axes"])
        return [cut] if passes and cut.dim != attrs.get("all_gather_dim") else None
    dims = operand_dims(op.kind, cut.dim, mesh.extent(cut.axes))
    if dims is None:
        return None
    return [None if dim is None else cut._replace(dim=dim) for dim in dims]


def _shared(cuts: Sequence[_Kept]) -> _Kept | None:
    """Returns the smallest slice that holds all of `cuts`; None if there is none."""
    # A coarser piece holds its finer ones: slices over {a, b} and {a, c} share the slice over {a},
    # from which each takes the rest. Along different dims, or from {b} on, they share nothing.
    if len({cut.dim for cut in cuts}) > 1:
        return None
    levels = zip(*(cut.axes for cut in cuts), strict=False)
    axes = tuple(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    return _Kept(axes, cuts[0].dim) if axes else None


def _sliced(b: Builder, x: Value, axes: Axes, dim: int, mesh: Mesh) -> Value:
    if not axes:
        return x
    type_ = b.types[x].scaled(dim, 1, mesh.extent(axes))
    return b.once((LOCAL_SLICE, x, axes, dim), lambda: b.local_slice(x, type_, axes, dim))


def _scattered(b: Builder, op: Op, axes: Axes, dim: int, mesh: Mesh) -> Value:
    # Atoms of the slice that are summed over become a reduce-scatter, others a slice, in order of
    # their nesting. A sum over {a, c} of which the slice over {a, b} is kept:
    #   reduce_scatter {a}; local_slice {b}; all_reduce {c}
    (x,) = op.operands
    attrs = op.kind.attrs
    b.loc = op.loc._replace(note=f"{op.loc.note} (each device keeps a slice of it)".strip())
    for is_summed, run in groupby(axes, key=lambda a: a in attrs["axes"]):
        atoms = tuple(run)
        if is_summed:
            type_ = b.types[x].scaled(dim, 1, mesh.extent(atoms))
            how = {"scatter_dimension": dim, "body": attrs["body"]}
            x = b.collective("reduce_scatter", x, type_, atoms, **how)
        else:
            x = _sliced(b, x, atoms, dim, mesh)
    left = tuple(a for a in attrs["axes"] if a not in axes)
    return b.collective("all_reduce", x, b.types[x], left, body=attrs["body"]) if left else x


def _ungathered(b: Builder, op: Op, axes: Axes, dim: int, mesh: Mesh) -> Value:
    """Returns this device's slice of an all-gather's result, along the gathered dim or another."""
    # slice starts with all of `have`: it is what this device had, or an all-to-all to another dim
    # slice is the major part of it:   only the minor atoms are gathered
    # the same atoms in another order: a permute brings the piece of another device
    (x,) = op.operands
    attrs = op.kind.attrs
    have, joined = attrs["axes"], attrs["all_gather_dim"]
    b.loc = op.loc._replace(note=f"{op.loc.note} (each device keeps a slice of it)".strip())
    if axes[: len(have)] == have:
        if dim != joined:
            parts = mesh.extent(have)
            type_ = b.types[x].scaled(joined, parts).scaled(dim, 1, parts)
            how = {"concat_dimension": joined, "split_dimension": dim}
            x = b.collective("all_to_all", x, type_, have, **how)
        return _sliced(b, x, axes[len(have) :], dim, mesh)
    if have[: len(axes)] == axes:
        rest = have[len(axes) :]
        type_ = b.types[x].scaled(dim, mesh.extent(rest))
        return b.collective("all_gather", x, type_, rest, all_gather_dim=dim)
    wanted = mesh.coordinates(axes).tolist()
    pairs = sorted((group[wanted[p]], p) for group in mesh.groups(have) for p in group)
    return b.collective("collective_permute", x, b.types[x], have, pairs=tuple(pairs))


# ---------------------------------------------------------------------------------------------
# Gathers, and the moves in front of them.


_Place = tuple[Value, int]  # a value, and the dim along which it is gathered, or could be


class _Chain(NamedTuple):
    """A gather, and the moves that make its operand."""

    gather: Op
    places: list[_Place]  # its operand, what this is a move of, and so on back
    moves: list[Op]  # the ops between them, the last one first

    @staticmethod
    def of(gather: Op, made: Mapping[Value, Op]) -> _Chain:
        """Follows moves back from a gather, as long as one dim corresponds to the gathered one."""
        place = gather.operands[0], gather.kind.attrs["all_gather_dim"]
        chain = _Chain(gather, [place], [])
        while (op := made.get(place[0])) is not None and is_move(op.kind):
            dim = operand_dim(op.kind, place[1])
            if dim is None:
                break
            place = op.operands[0], dim
            chain.places.append(place)
            chain.moves.append(op)
        return chain

    def converts(self, source: _Place) -> int:
        return sum(op.name == CONVERT for op in self.moves[: self.places.index(source)])

    def repeated(self, b: Builder, source: _Place, x: Value) -> Value:
        """Repeats on `x`, which is `source` gathered, the moves from `source` to the gather."""
        moves = list(zip(self.moves, self.places, strict=False))[: self.places.index(source)]
        for op, (_, dim) in reversed(moves):
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
        source, dim = chain.places[-1]
        apart = index.producers.get(source)
        scatters = apart is not None and apart.collective == "reduce_scatter"
        if apart is None or not (scatters or apart.name == LOCAL_SLICE):
            continue
        attrs, others = apart.kind.attrs, op.kind.attrs
        same = attrs["axes"] == others["axes"] and attrs[apart.kind.about.along] == dim
        if not same or "groups" in attrs or "groups" in others or chain.converts((source, dim)):
            continue
        if not scatters or all(len(index.users[v]) == 1 for v, _ in chain.places):
            undone[op.results[0]] = chain, apart

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value]:
        chain, apart = undone[op.results[0]]
        x = now(apart.operands[0])
        if apart.collective:
            note = f"{apart.loc.note} (and gathered: {op.loc.note})" if op.loc.note else None
            b.loc = apart.loc._replace(note=note or apart.loc.note)
            attrs = apart.kind.attrs
            x = b.collective("all_reduce", x, b.types[x], attrs["axes"], body=attrs["body"])
        return (chain.repeated(b, chain.places[-1], x),)

    return remove_dead(edit_ops(program, edit, undone)) if undone else program


class _Source(NamedTuple):
    """What to gather in place of several forms of it, converted to `dtype`."""

    place: _Place
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
                root = form.places[-1], attrs["axes"], attrs.get("groups")
                groups.setdefault(root, []).append(form)
        for forms in groups.values():
            source = _common(forms, program.types) if len(forms) > 1 else None
            if source is not None:
                sources.update((form.gather.results[0], (form, source)) for form in forms)

    visit(program.body)

    def edit(b: Builder, op: Op, now: Now) -> Sequence[Value]:
        form, source = sources[op.results[0]]
        value, dim = source.place
        attrs = {**op.kind.attrs, "all_gather_dim": dim}

        def gathered() -> Value:
            note = f"{op.loc.note} (one gather for {source.forms} forms of it)".strip()
            b.loc = op.loc._replace(note=note)
            x = b.convert(now(value), source.dtype)
            return b.op(op.name, (x,), (b.types[x].scaled(dim, pieces_of(op)),), attrs)[0]

        x = b.once(("gathered", source, attrs["axes"], attrs.get("groups")), gathered)
        b.loc = op.loc
        return (form.repeated(b, source.place, x),)

    return edit_ops(program, edit, sources)


def _common(forms: Sequence[_Chain], types: Sequence[TensorType]) -> _Source | None:
    """Returns the value to gather for all forms; None where gathering each sends fewer bytes."""
    # Of `%5 = transpose %1; %6 = convert %5`, gathers of %6 and of %5 share %5, gathers of %6 and
    # of %1 share %1: the first value of one chain that is in all others, by value and dim. Forms of
    # one narrower type share a gather in that type.
    place = next(p for p in forms[0].places if all(p in form.places for form in forms))
    gathered = [form.gather.kind.operands[0] for form in forms]
    type_, wanted = types[place[0]], {form.dtype for form in gathered}
    if len(wanted) == 1 and all(form.converts(place) == 1 for form in forms):
        narrower = TensorType(type_.shape, next(iter(wanted)))
        type_ = min(type_, narrower, key=lambda t: t.bytes)
    fits = type_.bytes <= sum(form.bytes for form in gathered)
    return _Source(place, type_.dtype, len(forms)) if fits else None
