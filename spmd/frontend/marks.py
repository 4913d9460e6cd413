"""Turns shardings that a module states, and users' specs, into marks; checks that they fit."""

from collections.abc import Sequence

from spmd.frontend.importer.module import Imported
from spmd.ir.program import Value
from spmd.ir.types import ShardingAttr
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Mark
from spmd.mesh.spec import dims_of, spec_entries

Entries = tuple[tuple[str, ...] | None, ...]
"""A spec: `(("x", "y"), (), None)` splits dim 0 over axes x and y, dim 1 not; dim 2 is open."""


def collect_marks(
    imported: Imported,
    mesh: Mesh,
    arg_entries: Sequence[Entries | None],
    result_entries: Sequence[Entries | None],
    arg_reasons: Sequence[str | None],
) -> dict[Value, Mark]:
    """Returns value -> mark for the values that have one: from a mark op, a spec, or the module.

    An argument's or result's spec (`..._entries`, None: no spec) replaces the module's mark of it.
    `arg_reasons` say why an argument has its spec (None: the user gave it). A result's mark counts
    only where nothing else marks the value. SpecError: a mark does not fit the mesh or the shape.
    """
    program = imported.program
    marks: dict[Value, Mark] = {}
    for op in program.walk():
        if op.name != "spmd.mark":
            continue
        # Only the boundary has to divide: jax's arrays have equal pieces, inside there is padding.
        attr: ShardingAttr = op.kind.attrs["sharding"]
        what, source = "a marked value", op.loc.source
        shape = op.kind.results[0].shape
        dims = atoms_of_attr(attr, shape, mesh, what, source, even=False)
        marks[op.results[0]] = Mark(
            dims, attr.open, f"mark_sharding at {op.loc.trail or 'unknown'}"
        )
    for i, value in enumerate(program.body.args):
        what = f"argument {program.arg_names[i]}"
        shape, entries = program.types[value].shape, arg_entries[i]
        mark = _boundary_mark(mesh, what, shape, entries, imported.arg_marks[i])
        if mark is not None:
            stated = arg_reasons[i] if entries is not None else None
            marks[value] = mark._replace(reason=stated or what)
    for i, value in enumerate(program.body.results):
        mark = result_mark(imported, mesh, result_entries, i)
        if mark is not None:
            marks.setdefault(value, mark)
    return marks


def result_mark(
    imported: Imported, mesh: Mesh, entries: Sequence[Entries | None], index: int
) -> Mark | None:
    """Returns the mark of result `index`: by `entries[index]`, else by the module, else None."""
    program = imported.program
    what = f"result {program.result_names[index]}"
    shape = program.types[program.body.results[index]].shape
    return _boundary_mark(mesh, what, shape, entries[index], imported.result_marks[index])


def _boundary_mark(
    mesh: Mesh, what: str, shape: Sequence[int], entries: Entries | None, attr: ShardingAttr | None
) -> Mark | None:
    if entries is not None:
        return Mark(*dims_of(entries, shape, mesh, what=what), what)
    if attr is not None:
        return Mark(atoms_of_attr(attr, shape, mesh, what, None), attr.open, what)
    return None


def atoms_of_attr(
    attr: ShardingAttr,
    shape: Sequence[int],
    mesh: Mesh,
    what: str,
    source: str | None,
    even: bool = True,
) -> tuple[Axes, ...]:
    """Returns for each dim the atoms that split it, major to minor, by a sharding of the module.

    Errors call the value `what` and cite the line `source`. SpecError: an axis or part of one is
    not in the mesh, or (if `even`) the axes of a dim do not divide it.
    """
    entries = tuple(
        tuple(f"{name}:({pre}){size}" if size else name for name, pre, size in axes)
        for axes in attr.dims
    )
    if not any(size for axes in attr.dims for _, _, size in axes):
        spec_entries(entries, len(shape), mesh, what=what, source=source)
    return dims_of(entries, shape, mesh, what=what, source=source, even=even)[0]
