"""Rewrite: a collective of which every device keeps only its own slice makes just that slice.

before: `%2 = all_reduce %1 {data}; %3 = local_slice %2 {data} dim=0`   (no other use of `%2`)
after:  `%3 = reduce_scatter %1 {data} dim=0`

It halves the bytes, and the whole sum never exists. What lies between the sum and the slices, as
long as it goes element by element or only moves elements, is done on slices:

before: `%2 = all_reduce %0 {data, model}; %3 = convert %2; %4 = multiply %3, %1`
        `%5 = transpose %4; %6 = local_slice %5 {data} dim=1`
after:  `%2 = reduce_scatter %0 {data} dim=0; %3 = all_reduce %2 {model}; %4 = convert %3`
        `%5 = local_slice %1 {data} dim=0; %6 = multiply %4, %5; %7 = transpose %6`

Of what is gathered, a slice over the same atoms along the same dim is what the device had (or
another device, where the order is another: a permute), and along another dim an all-to-all:

before: `%2 = all_gather %1 {data} dim=0; %3 = local_slice %2 {data} dim=1`
after:  `%3 = all_to_all %1 {data} concat=0 split=1`

A slice over other atoms is taken before anything is sent:

before: `%2 = all_gather %1 {data} dim=0; %3 = local_slice %2 {model} dim=1`
after:  `%2 = local_slice %1 {model} dim=1; %3 = all_gather %2 {data} dim=0`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

from spmd.ir.control_flow import users_of
from spmd.ir.dialect.builder import LOCAL_SLICE, Builder
from spmd.ir.program import Op, Program, Region, Value
from spmd.ir.rewrite import Now, edit_ops
from spmd.lowering.partition import HELD
from spmd.lowering.rewrites.moves import again, is_elementwise, is_move, operand_dim
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes


class _Kept(NamedTuple):
    """The slice of a value that its uses need: a device's piece of `dim` over `axes`."""

    axes: Axes
    dim: int


def slice_collectives(program: Program, mesh: Mesh) -> Program:
    """Makes, of a collective's result, only the slice that each device keeps for all its uses."""
    # `_cuts` goes backwards from slices: which values are only read in slices, and along which dim.
    # `_sliced_values` goes forwards from collectives: where a slice saves an exchange. Both have to
    # hold. For the second example above:
    #
    #   cuts     %5: {data} dim 1   %4, %3, %2: {data} dim 0     (dim 1 behind the transpose)
    #   sliced   %2, an all_reduce; then %3, %4, %5, which are made of it
    #
    # Afterwards every sliced value is its own piece, %6 has nothing left to cut, and %1, which is
    # whole, is cut on its way into the multiplication.
    cuts = _cuts(program, mesh)
    permutes = not any(HELD in op.kind.attrs for op in program.walk())
    sliced = _sliced_values(program, cuts, permutes)
    # Operands by their old numbers: afterwards a slice and what it was taken of may be one value.
    operands_of = {op.results: op.operands for op in program.walk() if op.results}

    def edit(b: Builder, op: Op, _: Now) -> Sequence[Value] | None:
        if not op.results:
            return None
        whole = operands_of[op.results]
        if op.name == LOCAL_SLICE and whole[0] in sliced:
            axes, dim = op.kind.attrs["axes"], op.kind.attrs["dim"]
            return (cut(b, op.operands[0], whole[0], axes, dim),)
        if op.results[0] not in sliced:
            return None
        axes, dim = cuts[op.results[0]]
        if op.collective == "all_reduce" and whole[0] not in sliced:
            return (_scattered(b, op, axes, dim, mesh),)
        if op.collective == "all_gather" and not _passes(op, cuts[op.results[0]]):
            return (_ungathered(b, op, axes, dim, mesh),)
        operands = [
            x if inside is None else cut(b, x, was, axes, inside)
            for x, was, inside in zip(op.operands, whole, _operand_dims(op, dim), strict=True)
        ]
        type_ = op.kind.results[0].scaled(dim, 1, mesh.extent(axes))
        b.loc = op.loc
        return (again(b, op, operands, type_),)

    def cut(b: Builder, x: Value, whole: Value, axes: Axes, dim: int) -> Value:
        """Slices `whole` for this device, where `x` may be a coarser slice of it already."""
        have = cuts[whole].axes if whole in sliced else ()
        return _sliced(b, x, axes[len(have) :], dim, mesh)

    return edit_ops(program, edit)


def _sliced(b: Builder, x: Value, axes: Axes, dim: int, mesh: Mesh) -> Value:
    if not axes:
        return x
    type_ = b.types[x].scaled(dim, 1, mesh.extent(axes))
    return b.once((LOCAL_SLICE, x, axes, dim), lambda: b.local_slice(x, type_, axes, dim))


def _operand_dims(op: Op, dim: int) -> list[int | None]:
    """Returns each operand's dim that is sliced with the result's `dim`; None for scalars."""
    found = dim if op.collective else operand_dim(op.kind, dim)
    if is_move(op.kind) or op.collective == "all_gather":
        return [found]
    shape = op.kind.results[0].shape
    return [found if type_.shape == shape else None for type_ in op.kind.operands]


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


def _cuts(program: Program, mesh: Mesh) -> dict[Value, _Kept]:
    """Maps each value that is read only in slices to the smallest slice that holds them all."""
    users = users_of(program)
    cuts: dict[Value, _Kept] = {}

    def wanted(use: Op, index: int) -> _Kept | None:
        if use.name == LOCAL_SLICE:
            return _Kept(use.kind.attrs["axes"], use.kind.attrs["dim"])
        found = cuts.get(use.results[0]) if len(use.results) == 1 else None
        if found is None or not _passes(use, found):
            return None
        inside = _operand_dims(use, found.dim)[index]
        if inside is None or use.kind.operands[index].shape[inside] % mesh.extent(found.axes):
            return None
        return _Kept(found.axes, inside)

    def visit(region: Region) -> None:
        here = {id(op) for op in region.ops}
        for op in reversed(region.ops):
            for inner in op.regions:
                visit(inner)
            if len(op.results) != 1 or op.regions:
                continue
            uses = users.get(op.results[0], [])
            if any(use is None or id(use) not in here for use, _ in uses):
                continue
            shared = _shared([wanted(use, i) for use, i in uses if use is not None])
            if shared is not None:
                cuts[op.results[0]] = shared

    visit(program.body)
    return cuts


def _passes(op: Op, cut: _Kept) -> bool:
    """Whether slicing an op's result is the same as doing the op on slices of its operands."""
    attrs = op.kind.attrs
    if op.collective in ("all_gather", "all_reduce"):
        apart = "groups" not in attrs and set(cut.axes).isdisjoint(attrs["axes"])
        return apart and cut.dim != attrs.get("all_gather_dim")
    return is_move(op.kind) or is_elementwise(op.kind)


def _shared(cuts: Sequence[_Kept | None]) -> _Kept | None:
    """Returns the smallest slice that holds all of `cuts`; None if there is none."""
    # A coarser piece holds its finer ones: slices over {a, b} and {a, c} share the slice over {a},
    # from which each takes the rest. Along different dims, or from {b} on, they share nothing.
    known = [cut for cut in cuts if cut is not None]
    if not known or len(known) < len(cuts) or len({cut.dim for cut in known}) > 1:
        return None
    levels = zip(*(cut.axes for cut in known), strict=False)
    axes = tuple(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))
    return _Kept(axes, known[0].dim) if axes else None


def _sliced_values(
    program: Program, cuts: Mapping[Value, _Kept], permutes: bool
) -> frozenset[Value]:
    """Returns the results of collectives that are sliced later, and the values in between."""
    found: set[Value] = set()
    for op in program.walk():
        cut = cuts.get(op.results[0]) if len(op.results) == 1 else None
        if cut is None or "groups" in op.kind.attrs:
            continue
        passes, is_source = _passes(op, cut), op.collective == "all_reduce"
        if op.collective == "all_gather":  # the slice of its result takes no gather, or a smaller
            axes, dim = op.kind.attrs["axes"], op.kind.attrs["all_gather_dim"]
            is_permuted = permutes and set(axes) == set(cut.axes)
            is_part = cut.dim == dim and (axes[: len(cut.axes)] == cut.axes or is_permuted)
            is_source = passes or cut.axes[: len(axes)] == axes or is_part
        if is_source or (passes and not found.isdisjoint(op.operands)):
            found.add(op.results[0])
    return frozenset(found)


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
