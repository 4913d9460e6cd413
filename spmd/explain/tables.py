"""The tables that the text and the page both show."""

from __future__ import annotations

from collections.abc import Sequence

from spmd.explain.collectives import Total
from spmd.explain.document import Cell, Table, code, count, number, source
from spmd.explain.largest import largest_values
from spmd.explain.leaves import Group, Leaf, group_leaves
from spmd.explain.words import bytes_text, seconds_text, spec_text, type_text
from spmd.mesh.mesh import Mesh
from spmd.pipeline import Stages


def split_text(leaves: Sequence[Leaf]) -> str:
    """How many there are, and how many of them are split."""
    split = sum(any(leaf.sharding.dims) for leaf in leaves)
    return f"{len(leaves)}, {split} of them split"


def leaf_table(leaves: Sequence[Leaf], mesh: Mesh) -> Table:
    """Arguments or results, those that are alike in one row."""
    heads = ("name", "n", "type", "sharding", "local", "per device", "origin")
    rows = [_leaf_row(group, mesh) for group in group_leaves(leaves)]
    return Table(heads, rows, search="a name or a sharding" if len(rows) > 6 else "")


def _leaf_row(group: Group, mesh: Mesh) -> tuple[Cell, ...]:
    leaf, several = group.leaves[0], len(group.leaves) > 1
    parts = tuple((leaf.name, leaf.origin) for leaf in group.leaves) if several else ()
    return (
        Cell(group.pattern, "name", style="w", parts=parts),
        count(len(group.leaves)),
        code(type_text(leaf.type)),
        code(spec_text(leaf.sharding, mesh)),
        code(type_text(leaf.local)),
        number(bytes_text(group.bytes), group.bytes),
        Cell(group.origin, "path", style="w"),
    )


def largest_table(stages: Stages, n: int) -> Table:
    """The `n` largest values that are made inside the program."""
    heads = ("per device", "n", "type", "sharding", "local", "op", "source")
    rows = [
        (
            number(bytes_text(row.local.bytes), row.local.bytes),
            count(row.values),
            code(type_text(row.type)),
            code(spec_text(row.sharding, stages.plan.mesh), "w"),
            code(type_text(row.local)),
            Cell(f"copy for {row.op}" if row.copy else row.op, style="w"),
            source(row.source),
        )
        for row in largest_values(stages, n)
    ]
    return Table(heads, rows, sort="per device")


def collective_table(rows: Sequence[Total]) -> Table:
    """Collectives, equal ones together, each with its reason below it."""
    heads = ("kind", "axes", "bytes", "times", "ops", "total", "ms", "time", "source")
    cells = [
        (
            Cell(row.like.kind, "kind", style="t"),
            Cell(", ".join(row.like.axes), style="t"),
            number(bytes_text(row.like.bytes), row.like.bytes),
            count(row.like.count),
            count(row.ops),
            number(bytes_text(row.bytes), row.bytes),
            number(f"{row.seconds * 1e3:.4f}", row.seconds),
            number(seconds_text(row.seconds), row.seconds),
            source(row.like.source, row.like.reason),
        )
        for row in rows
    ]
    return Table(heads, cells, sort="time", search="all_gather data mlp")


def traffic_table(totals: Sequence[Total]) -> Table:
    """Totals of the collectives of one kind over the same axes."""
    heads = ("kind", "axes", "ops", "runs", "bytes", "time")
    rows = [
        (
            Cell(total.like.kind, "kind"),
            Cell(", ".join(total.like.axes)),
            count(total.ops),
            count(total.runs),
            number(bytes_text(total.bytes), total.bytes),
            number(seconds_text(total.seconds), total.seconds),
        )
        for total in totals
    ]
    return Table(heads, rows)
