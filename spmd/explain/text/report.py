"""The report about a program as text: whole, in short, and in one line."""

from __future__ import annotations

from collections.abc import Iterable

from spmd.explain.costs import (
    code_lines,
    collective_rows,
    collective_table,
    largest,
    traffic,
    traffic_table,
)
from spmd.explain.document import Lines, aligned, counted, section
from spmd.explain.facts import Facts, memory_rows, proof_text, quality_rows
from spmd.explain.leaves import largest_table, leaf_table, split_text
from spmd.explain.marks import Relief, costly_text
from spmd.explain.memory import recomputed
from spmd.explain.prices import conflict_rows, loser_text, marks_title
from spmd.explain.steps import PipelineRow, RingRow, pipeline_rows, ring_rows
from spmd.explain.words import (
    bytes_text,
    idle_text,
    plural,
    seconds_text,
    share_text,
    source_text,
    spec_text,
)


def explain_program(facts: Facts) -> str:
    """What costs most, what is sharded how, why, and what it costs."""
    plan, found = facts.plan, facts.collectives
    collectives = collective_table(collective_rows(found)).without("time")
    ends = [("arguments", facts.arguments), ("results", facts.results)]
    ends += [("constants", facts.constants)] if facts.constants else []
    again, made_again = recomputed(plan, facts.timeline)
    sections = (
        _costs(facts),
        section(f"program {facts.title}", _header(facts)),
        facts.measured.lines() if facts.measured is not None else (),
        *(
            section(
                f"{what}: {split_text(given)}", leaf_table(given, plan.mesh).lines() or ["none"]
            )
            for what, given in ends
        ),
        section("largest values inside", largest_table(plan, 12).without("local").lines()),
        section(f"collectives: {len(found)}, {facts.sent_text}", collectives.lines() or ["none"]),
        section(
            "totals by kind", traffic_table(traffic(found, by_axes=False)).without("axes").lines()
        ),
        section("totals by kind and axes", traffic_table(traffic(found)).lines()),
        _marks(facts),
        _conflicts(facts),
        _titled("rings", ring_rows(facts.stages, facts.prices)),
        section(again, made_again.lines()),
        _titled("pipelines", pipeline_rows(facts.stages)),
        section("forms", [form.text for form in plan.forms]),
        section("notes", counted(plan.notes)),
        section("memory per device", aligned(memory_rows(facts))),
    )
    return "\n".join(line for lines in sections for line in lines).rstrip() + "\n"


def summarize(facts: Facts, costly: Relief | None = None) -> str:
    """The short form, for a terminal; `costly` is the mark that costs most, if it costs much."""
    plan, rows, constants = facts.plan, dict(memory_rows(facts)), facts.constants
    split = [leaf for leaf in facts.arguments if any(leaf.sharding.dims)]
    inferred = sum(leaf.origin != "marked" for leaf in split)
    lines = [
        f"spmd: {plan.mesh.size} devices ({plan.mesh}) on {plan.topology}",
        f"  arguments    {split_text(facts.arguments)} ({inferred} inferred); {rows['arguments']}",
        *(f"    {line}" for line in _top_shardings(facts)),
    ]
    if constants:
        lines.append(f"  constants    {split_text(constants)}; {rows['constants']}")
    lines += [
        f"  collectives  {len(facts.collectives)}, {facts.sent_text}",
        *(f"    {line}" for line in traffic_table(traffic(facts.collectives)[:8]).lines()),
    ]
    if facts.use is not None:
        more = f"; {facts.compiled_text}" if facts.compiled_text else ""
        lines.append(
            f"  memory       {rows['peak, predicted']} predicted, {rows['temporary']} of it "
            f"temporary: {rows['on the device']}{more}"
        )
    lines.append(f"  time         {_time(facts)}")
    if facts.stages.is_read:
        lines.append("  plan         as an earlier start made it")
    if facts.measured is not None:
        lines.append(f"  measured     {facts.measured.title}")
    if plan.recomputed:
        again = recomputed(plan, facts.timeline)[0]
        lines.append(f"  {again.replace(' rather than held:', '  ')}")
    for row in pipeline_rows(facts.stages):
        lines.append(f"  pipeline     {row.title}: {row.parts[0][1]}")
    lines += [f"  form         {form.text}" for form in plan.forms if not form.refusal]
    if plan.choices and plan.idle_axes:
        lines.append(f"  note         {idle_text(plan.idle_axes)}")
    if costly is not None:
        lines.append(f"  note         {costly_text(costly, plan.mesh)}")
    return "\n".join(lines) + "\n"


def brief(what: str, facts: Facts) -> str:
    """A program's mesh and figures in one line, as `repr` says it; `what` is the class.

    `<spmd.Compiled train_step on data=4, model=2 (8 cpu): 14 collectives, 3.2 MiB sent per device,
    41 MiB memory per device, predicted 1.9 ms>`.
    """
    mesh, chip, use = facts.plan.mesh, facts.plan.topology.chip.name, facts.use
    figures = (
        plural(len(facts.collectives), "collective"),
        f"{bytes_text(facts.sent_bytes)} sent per device",
        f"{bytes_text(use.peak if use else 0)} memory per device",
        f"predicted {seconds_text(facts.timeline.seconds)}",
    )
    return f"<spmd.{what} {facts.name} on {mesh} ({mesh.size} {chip}): {', '.join(figures)}>"


def _costs(facts: Facts) -> Lines:
    whole = facts.timeline.seconds
    title, most = largest(facts.costs, whole)
    rows = [
        (share_text(cost.seconds, whole), seconds_text(cost.seconds), cost.title, cost.remark)
        for cost in most
    ]
    lines: list[str] = []
    for head, cost in zip(aligned(rows, right=(0, 1)), most, strict=True):
        why = [source_text(cost.reason)] if cost.reason else []
        why += aligned([(source_text(place), text) for place, text in code_lines(cost)])
        lines += [head, *(f"    {line}" for line in why)]
    return section(title, lines)


def _header(facts: Facts) -> list[str]:
    plan, seconds = facts.plan, facts.stages.seconds
    times = ", ".join(f"{stage} {seconds_text(taken)}" for stage, taken in seconds.items())
    rows = [
        ("mesh", f"{plan.mesh} ({plan.mesh.size} devices)"),
        ("topology", str(plan.topology)),
        ("solver", proof_text(plan) + ("; in an earlier start" if facts.stages.is_read else "")),
        ("predicted", _time(facts)),
        ("measured", facts.measured.title if facts.measured else ""),
        *((what, text) for what, _, text in quality_rows(facts)),
        ("stages", times),
    ]
    return aligned([row for row in rows if row[1]])


def _time(facts: Facts) -> str:
    compute, comm = facts.timeline.compute_seconds, facts.timeline.comm_seconds
    return (
        f"{seconds_text(facts.timeline.seconds)} a run, bound by "
        f"{'communication' if comm > compute else 'compute'} "
        f"(compute {seconds_text(compute)}, collectives {seconds_text(comm)})"
    )


def _titled(title: str, rows: Iterable[PipelineRow | RingRow]) -> Lines:
    """Rows that have a title and parts of their own."""
    lines: list[str] = []
    for row in rows:
        lines.append(f"{row.title}, at {source_text(row.source)}")
        lines += [f"  {line}" for line in aligned(row.parts)]
    return section(title, lines)


def _marks(facts: Facts) -> Lines:
    if facts.prices is None or not facts.prices.marks.groups:
        return iter(())
    lines = [f"{marks_title(facts.prices.marks)}:"]
    for relief in facts.prices.marks.reliefs:
        lines.append(f"without {relief.marks.text(facts.plan.mesh)}:")
        lines.append(f"  {relief.price.text}")
    if len(lines) == 1:
        lines.append("none of them costs 1% of the collectives' time or more")
    return section("marks that forbid something cheaper", lines)


def _conflicts(facts: Facts) -> Lines:
    lines: list[str] = []
    rows = conflict_rows(facts.stages, facts.prices)
    for row in rows:
        more = f" ({row.ops} alike)" if row.ops > 1 else ""
        lines.append(f"{row.op} at {source_text(row.source)}{more}: took {row.taken}")
        lines += [
            f"  {name} {type_} dim {dim} wants {axes}" for name, type_, dim, axes in row.claims
        ]
        lines += [f"  {axes} instead: {loser_text(price)}" for axes, price in row.losers or ()]
    asked = sum(row.losers is not None for row in rows)
    title = f"conflicts: {len(facts.stages.propagated.conflicts)}"
    if asked:
        title += f", of {len(rows)} kinds; what the claims that lost would cost"
        title += "" if asked == len(rows) else f" (the first {asked})"
    return section(title, lines)


def _top_shardings(facts: Facts, n: int = 6) -> list[str]:
    """The shardings of which each device holds the most, with how many arguments have them."""
    bytes_of: dict[str, list[int]] = {}
    for leaf in facts.arguments:
        spec = spec_text(leaf.sharding, facts.plan.mesh)
        bytes_of.setdefault(spec, []).append(leaf.local.bytes)
    most = sorted(bytes_of.items(), key=lambda item: -sum(item[1]))[:n]
    return aligned(
        [
            (spec, f"{len(held)} arguments", f"{bytes_text(sum(held))} per device")
            for spec, held in most
        ]
    )
