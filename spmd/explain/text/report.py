"""The report about a program as text, whole and in short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spmd.explain.collectives import Collective, collective_rows, traffic
from spmd.explain.costs import costs
from spmd.explain.decisions import conflict_rows, mark_rows, marks_title
from spmd.explain.largest import largest_values
from spmd.explain.leaves import Group, Leaf, argument_leaves, group_leaves, result_leaves
from spmd.explain.memory import Memory
from spmd.explain.overview import Overview, memory_rows, overview, quality_rows
from spmd.explain.prices import Prices
from spmd.explain.text.costs import cost_lines
from spmd.explain.text.layout import Lines, counted, section, table
from spmd.explain.words import bytes_text, seconds_text, source_text, spec_text, type_text
from spmd.pipeline import Stages


def explain_program(
    stages: Stages,
    collectives: Sequence[Collective],
    memory: Memory | None,
    prices: Prices | None = None,
    name: str = "",
) -> str:
    """What costs most, what is sharded how, why, and what it costs.

    Args:
      stages: the pipeline's results.
      collectives: what one run of the program exchanges.
      memory: what XLA reports, or None where it has not compiled the program.
      prices: of what the plan decided against; left out if not given.
      name: what the program is called.
    """
    figures = overview(stages, collectives, memory)
    found = costs(figures.timeline, stages.plan.mesh, stages.plan.topology)
    sections = (
        cost_lines(found, figures.seconds),
        _header(stages, figures, name),
        _boundary("arguments", argument_leaves(stages), stages),
        _boundary("results", result_leaves(stages), stages),
        _largest(stages),
        _collectives(collectives),
        _totals(collectives),
        _marks(stages, prices),
        _conflicts(stages, prices),
        section("notes", counted(stages.plan.notes)),
        section("memory per device", table(memory_rows(figures))),
    )
    return "\n".join(line for lines in sections for line in lines).rstrip() + "\n"


def summarize(stages: Stages, collectives: Sequence[Collective], memory: Memory | None) -> str:
    """The short form, for a terminal; arguments as in `explain_program`."""
    figures = overview(stages, collectives, memory)
    arguments = argument_leaves(stages)
    split = [leaf for leaf in arguments if any(leaf.sharding.dims)]
    inferred = sum(leaf.origin != "marked" for leaf in split)
    lines = [
        f"spmd: {figures.devices} devices ({figures.mesh}) on {figures.topology}",
        f"  arguments    {len(arguments)}, {len(split)} of them split ({inferred} inferred); "
        + memory_rows(figures)[0][1],
    ]
    lines += [f"    {line}" for line in _top_shardings(stages)]
    lines.append(
        f"  collectives  {len(collectives)}, {bytes_text(figures.comm_bytes)} sent by each "
        "device in one run"
    )
    lines += [f"    {line}" for line in _traffic(collectives, n=8)]
    if memory is not None and memory.peak_bytes:
        rows = dict(memory_rows(figures))
        what = "predicted" if memory.is_predicted else "at most"
        lines.append(
            f"  memory       {what} {rows[f'peak, {what}']}, {rows['temporary']} of it temporary"
        )
    lines.append(f"  time         {_time(figures)}")
    return "\n".join(lines) + "\n"


def _header(stages: Stages, figures: Overview, name: str) -> Lines:
    times = ", ".join(
        f"{stage} {seconds_text(seconds)}" for stage, seconds in stages.seconds.items()
    )
    rows = [
        ("mesh", f"{figures.mesh} ({figures.devices} devices)"),
        ("topology", figures.topology),
        ("solver", figures.solver),
        ("predicted", _time(figures)),
        *quality_rows(figures),
        ("stages", times),
    ]
    title = f"program {name or stages.plan.program.name}"
    yield from section(title, table([r for r in rows if r[1]]))


def _time(figures: Overview) -> str:
    return (
        f"{seconds_text(figures.seconds)} a run, bound by {figures.bound} "
        f"(compute {seconds_text(figures.compute_seconds)}, "
        f"collectives {seconds_text(figures.comm_seconds)})"
    )


def _boundary(what: str, leaves: Sequence[Leaf], stages: Stages) -> Lines:
    split = sum(any(leaf.sharding.dims) for leaf in leaves)
    rows: list[tuple[str, ...]] = [
        ("name", "n", "type", "sharding", "local", "per device", "origin")
    ]
    rows += [_group_row(group, stages) for group in group_leaves(leaves)]
    title = f"{what}: {len(leaves)}, {split} of them split"
    yield from section(title, table(rows, right=(1, 5)) if leaves else ["none"])


def _group_row(group: Group, stages: Stages) -> tuple[str, ...]:
    leaf = group.leaves[0]
    return (
        group.pattern,
        str(len(group.leaves)),
        type_text(leaf.type),
        spec_text(leaf.sharding, stages.plan.mesh),
        type_text(leaf.local),
        bytes_text(group.bytes),
        group.origin,
    )


def _largest(stages: Stages) -> Lines:
    rows = [("per device", "n", "type", "sharding", "op", "source")]
    rows += [
        (
            bytes_text(row.local.bytes),
            str(row.values),
            type_text(row.type),
            spec_text(row.sharding, stages.plan.mesh),
            f"copy for {row.op}" if row.copy else row.op,
            source_text(row.source),
        )
        for row in largest_values(stages)
    ]
    yield from section("largest values inside", table(rows, right=(0, 1)) if rows[1:] else [])


def _collectives(collectives: Sequence[Collective]) -> Lines:
    rows = collective_rows(collectives)
    cells = [("kind", "axes", "bytes", "times", "ops", "total", "ms", "source")]
    cells += [
        (
            row.kind,
            ", ".join(row.axes),
            bytes_text(row.bytes),
            str(row.count),
            str(row.ops),
            bytes_text(row.total_bytes),
            f"{row.seconds * 1e3:.4f}",
            source_text(row.source),
        )
        for row in rows
    ]
    lines = table(cells, right=(2, 3, 4, 5, 6))
    reasons = [""] + [f"    {source_text(row.reason)}" for row in rows]
    total = bytes_text(sum(row.total_bytes for row in rows))
    title = f"collectives: {len(collectives)}, {total} sent by each device in one run"
    spread = [x for pair in zip(lines, reasons, strict=True) for x in pair if x.strip()]
    yield from section(title, spread if rows else ["none"])


def _totals(collectives: Sequence[Collective]) -> Lines:
    yield from section("totals by kind", _traffic(collectives, by_axes=False))
    yield from section("totals by kind and axes", _traffic(collectives))


def _traffic(
    collectives: Sequence[Collective], by_axes: bool = True, n: int | None = None
) -> list[str]:
    rows: list[tuple[str, ...]] = [("kind", "axes", "ops", "runs", "bytes", "time")]
    rows += [
        (
            total.kind,
            ", ".join(total.axes),
            str(total.ops),
            str(total.runs),
            bytes_text(total.bytes),
            seconds_text(total.seconds),
        )
        for total in traffic(collectives, by_axes)[:n]
    ]
    if not by_axes:
        rows = [(row[0], *row[2:]) for row in rows]
    width = len(rows[0])
    return table(rows, right=range(width - 4, width)) if rows[1:] else []


def _marks(stages: Stages, prices: Prices | None) -> Lines:
    """What would have been cheaper, and which mark forbids it."""
    if prices is None or not prices.marks.groups:
        return
    lines = [f"{marks_title(prices)}:"]
    for row in mark_rows(stages, prices):
        more = f" and {row.values - 1} more" if row.values > 1 else ""
        lines.append(f"without {source_text(row.name)} {row.sharding}{more}:")
        lines.append(f"  {row.text}")
    if len(lines) == 1:
        lines.append("none of them costs 1% of the collectives' time or more")
    yield from section("marks that forbid something cheaper", lines)


def _conflicts(stages: Stages, prices: Prices | None) -> Lines:
    lines: list[str] = []
    rows = conflict_rows(stages, prices)
    for row in rows:
        more = f" ({row.ops} alike)" if row.ops > 1 else ""
        lines.append(f"{row.op} at {source_text(row.source)}{more}: took {row.taken}")
        lines += [
            f"  {name} {type_} dim {dim} wants {axes}" for name, type_, dim, axes in row.claims
        ]
        lines += [f"  {loser.axes} instead: {loser.text}" for loser in row.losers or ()]
    asked = sum(row.losers is not None for row in rows)
    title = f"conflicts: {len(stages.propagated.conflicts)}"
    if asked:
        title += f", of {len(rows)} kinds; what the claims that lost would cost"
        title += "" if asked == len(rows) else f" (the first {asked})"
    yield from section(title, lines)


def _top_shardings(stages: Stages, n: int = 6) -> list[str]:
    count: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for leaf in argument_leaves(stages):
        spec = spec_text(leaf.sharding, stages.plan.mesh)
        count[spec] += 1
        held[spec] += leaf.local.bytes
    rows = [
        (spec, f"{count[spec]} arguments", f"{bytes_text(size)} per device")
        for spec, size in held.most_common(n)
    ]
    return table(rows)
