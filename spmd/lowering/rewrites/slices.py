"""Rewrite: where each device reads only a slice of a collective's result, it makes only that slice.

Ops between the two are done on slices, if they are elementwise, transposes or reshapes.

before: `%2 = all_reduce %0 {data, model}; %3 = convert %2; %4 = multiply %3, %1`
        `%5 = transpose %4; %6 = local_slice %5 {data} dim=1`
after:  `%2 = reduce_scatter %0 {data} dim=0; %3 = all_reduce %2 {model}; %4 = convert %3`
        `%5 = local_slice %1 {data} dim=0; %6 = multiply %4, %5; %7 = transpose %6`

before: `%2 = all_gather %1 {data} dim=0; %3 = local_slice %2 {data} dim=1`
after:  `%3 = all_to_all %1 {data} concat=0 split=1`

before: `%2 = all_gather %1 {data} dim=0; %3 = local_slice %2 {model} dim=1`
after:  `%2 = local_slice %1 {model} dim=1; %3 = all_gather %2 {data} dim=0`

That sends less, but other collectives: reductions over the same axes that were alike may then be
too different to be combined. So `spmd.compiler.Trial` takes it where it is predicted to be faster.
"""

import math
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

from spmd.ir.control_flow import Index
from spmd.ir.description import RESHAPE, TRANSPOSE
from spmd.ir.dialect.builder import LOCAL_SLICE, Builder
from spmd.ir.program import Op, OpKind, Program, Value, free_values
from spmd.ir.rewrite import Now, edit_ops, remove_dead
from spmd.lowering.partition import HELD
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes


def operand_dim(kind: OpKind, dim: int, parts: int) -> int | None:
    """Returns the operands' dim to cut in `parts`: a part of each makes one of the result's `dim`.

    None if parts do not suffice. Scalars among the operands are read whole.
    """
    places = [dim] if kind.about.is_elementwise and len(kind.results) == 1 else []
    if kind.name == TRANSPOSE:
        places = [kind.attrs["permutation"][dim]]
    elif kind.name == RESHAPE:
        # The dim in front of which the same elements lie: joining pieces along either then gives
        # the same. From (2, 12) to (2, 3, 4) dim 1 goes to dim 1: of 24 elements, 2 groups lie in
        # front of both, and each group is split in order.
        other, before = kind.operands[0].shape, math.prod(kind.results[0].shape[:dim])
        places = [d for d in range(len(other)) if math.prod(other[:d]) == before > 0]
        places = [d for d in places if other[d] > 1] or places[-1:]
    divides = all(t.shape[d] % parts == 0 for d in places[:1] for t in kind.operands if t.rank)
    return places[0] if places and divides else None


class _Kept(NamedTuple):
    """The only slice of a value that its uses read: a device's own piece of `dim` over `axes`."""

    axes: Axes
    dim: int


def slice_collectives(program: Program, mesh: Mesh) -> Program:
    """Rewrites collectives of whose result each device reads one slice to make just that slice."""
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

    users, cuts = Index(program).users, dict[Value, _Kept]()

    def asked(use: Op | None, operand: int) -> _Kept | None:
        # A branch may need what it captures, which leaves that whole, as a result is.
        if use is None or use.operands[operand] in captured:
            return None
        if use.name == LOCAL_SLICE:
            return _Kept(use.kind.attrs["axes"], use.kind.attrs["dim"])
        cut = cuts.get(use.results[0]) if len(use.results) == 1 else None
        parts = _operand_cuts(use, cut, mesh) if cut is not None else None
        return parts[operand] if parts is not None else None

    for op in reversed([*program.walk()]):
        wanted: list[_Kept] = []
        for use, i in users.get(op.results[0], ()) if len(op.results) == 1 else ():
            cut = None if op.regions else asked(use, i)
            if cut is None:
                break
            wanted.append(cut)
        else:
            if wanted and (cut := _shared(wanted)) is not None:
                cuts[op.results[0]] = cut
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
        return b.op(op.name, operands, (type_,), op.kind.attrs)

    def piece(b: Builder, x: Value, whole: Value, axes: Axes, dim: int) -> Value:
        """Returns the slice over `axes` of old value `whole`, of which `x` is all or a part."""
        have = cuts[whole].axes if whole in sliced else ()
        return _sliced(b, x, axes[len(have) :], dim, mesh)

    edited = edit_ops(program, edit)
    return program if edited is program else remove_dead(edited)


def _operand_cuts(op: Op, cut: _Kept, mesh: Mesh) -> list[_Kept | None] | None:
    """Returns for each operand the slice from which an op makes the slice `cut` of its result.

    An entry None is an operand that is read whole. The list is None if slices do not suffice.
    """
    attrs = op.kind.attrs
    if op.collective:
        passes = op.collective in ("all_gather", "all_reduce") and "groups" not in attrs
        passes = passes and set(cut.axes).isdisjoint(attrs["axes"])
        return [cut] if passes and cut.dim != attrs.get("all_gather_dim") else None
    dim = operand_dim(op.kind, cut.dim, mesh.extent(cut.axes))
    if dim is None:
        return None
    return [cut._replace(dim=dim) if type_.rank else None for type_ in op.kind.operands]


def _shared(cuts: Sequence[_Kept]) -> _Kept | None:
    """Returns the smallest slice that contains all of `cuts`; None if there is none."""
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
    """Appends ops that make just this device's slice of an all-gather's result; returns that."""
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
