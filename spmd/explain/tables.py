"""The tables that the text and the page both show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spmd.compiler import Stages
from spmd.explain.collectives import Total
from spmd.explain.document import Cell, Table, code, count, number, source
from spmd.explain.leaves import Group, Leaf, group_leaves
from spmd.explain.recomputed import RecomputedRow
from spmd.explain.words import bytes_text, seconds_text, spec_text, type_text
from spmd.ir.program import Value
from spmd.ir.types import TensorType, local_type
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding


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


def values_inside(stages: Stages) -> Counter[tuple[str, TensorType, Sharding, str]]:
    """The values that are made inside the program: (op, type, sharding, source), how many.

    They are the results of ops, and copies: values that an op needs in another sharding.
    """
    plan = stages.plan
    found: Counter[tuple[str, TensorType, Sharding, str]] = Counter()
    copies: set[tuple[Value, Sharding]] = set()
    for op in plan.program.walk():
        for value in op.results:
            if (state := plan.states[value]) is not None:
                found[op.label, plan.program.types[value], state, op.loc.trail] += 1
        choice = plan.choices.get(op.results[0]) if op.results else None
        for value, wanted in zip(op.operands, choice.operands if choice else (), strict=False):
            is_copy = plan.states[value] not in (None, wanted)
            if is_copy and (value, wanted) not in copies:
                copies.add((value, wanted))
                found[f"copy for {op.label}", plan.program.types[value], wanted, op.loc.trail] += 1
    return found


def largest_table(stages: Stages, n: int) -> Table:
    """The `n` largest values that are made inside the program, those that are alike in one row."""
    found, mesh = values_inside(stages), stages.plan.mesh
    rows = [_value_row(*look, values, mesh) for look, values in found.items()]
    rows.sort(key=lambda row: -float(row[0].key or 0))
    heads = ("per device", "n", "type", "sharding", "local", "op", "source")
    return Table(heads, rows[:n], sort="per device")


def _value_row(
    what: str, type_: TensorType, sharding: Sharding, trail: str, values: int, mesh: Mesh
) -> tuple[Cell, ...]:
    local = local_type(type_, sharding, mesh)
    return (
        number(bytes_text(local.bytes), local.bytes),
        count(values),
        code(type_text(type_)),
        code(spec_text(sharding, mesh), "w"),
        code(type_text(local)),
        Cell(what, style="w"),
        source(trail),
    )


def recomputed_table(rows: Sequence[RecomputedRow]) -> Table:
    """Values that are made again rather than held, those of one source line in one row."""
    cells = [
        (
            number(bytes_text(row.bytes), row.bytes),
            count(row.values),
            Cell(row.name, style="w"),
            source(row.source),
        )
        for row in rows
    ]
    return Table(("per device", "n", "op", "source"), cells, sort="per device")


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
