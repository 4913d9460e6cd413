"""The report as one self-contained HTML page: tables laid out, with pictures."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from spmd.explain.collectives import Collective, collective_rows, traffic
from spmd.explain.decisions import ConflictRow, LosingClaim, conflict_rows, mark_rows, marks_title
from spmd.explain.largest import largest_values
from spmd.explain.leaves import Group, Leaf, argument_leaves, group_leaves, result_leaves
from spmd.explain.memory import KINDS, Memory, MemoryCurve, memory_curve
from spmd.explain.overview import Overview, memory_rows, overview, quality_rows
from spmd.explain.page import charts, picture
from spmd.explain.page import parts as h
from spmd.explain.page.bars import Bars, Loop, bars_of
from spmd.explain.page.parts import Cell
from spmd.explain.prices import Prices
from spmd.explain.words import bytes_text, seconds_text, source_text, spec_text, type_text
from spmd.pipeline import Stages
from spmd.predict.memory import MemoryUse
from spmd.predict.timeline import COMPUTE

PICTURES = 8
"""How many arguments are drawn, and the mesh."""

TOP_VALUES = 15
"""Rows of the table of what is alive at the peak."""


def write_report(
    path: str | os.PathLike[str],
    stages: Stages,
    collectives: Sequence[Collective],
    memory: Memory | None,
    held: MemoryUse,
    prices: Prices | None = None,
) -> None:
    """Writes what `explain_program` says, with pictures, as one page without outside resources.

    Args:
      path: the file to write.
      stages: the pipeline's results.
      collectives: what one run of the program exchanges.
      memory: what XLA reports, or None where it has not compiled the program.
      held: what the program is predicted to hold, and when.
      prices: of what the plan decided against; left out if not given.
    """
    page = render(stages, collectives, memory, held, prices)
    Path(path).write_text(page, encoding="utf-8")


def render(
    stages: Stages,
    collectives: Sequence[Collective],
    memory: Memory | None,
    held: MemoryUse,
    prices: Prices | None = None,
) -> str:
    """The page's text; arguments as in `write_report`."""
    figures = overview(stages, collectives, memory)
    sections = [s for s in _sections(stages, collectives, figures, held, prices) if s.body]
    title = f"{stages.plan.program.name} on {figures.devices} devices"
    links = "".join(f'<a href="#{s.anchor}">{escape(s.title)}</a>' for s in sections)
    body = "".join(
        f'<section><h2 id="{s.anchor}">{escape(s.title)}<small>{escape(s.remark)}</small></h2>'
        f"{s.body}</section>"
        for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{_resource('report.css')}</style></head><body>"
        f"{picture.HATCH}<header><h1>{escape(title)}</h1>"
        f'<p class="lead">Mesh {escape(figures.mesh)} on {escape(figures.topology)}, '
        f"planned by the {escape(figures.solver)} solver.</p></header>"
        f"{_cards(collectives, figures)}<nav>{links}</nav><main>{body}</main>"
        f"<script>\n{_resource('report.js')}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    return files("spmd.explain").joinpath(name).read_text(encoding="utf-8")


class _Section(NamedTuple):
    """One part of the page; left out if it has no body."""

    anchor: str
    title: str
    remark: str
    body: str


def _sections(
    stages: Stages,
    collectives: Sequence[Collective],
    figures: Overview,
    held: MemoryUse,
    prices: Prices | None,
) -> list[_Section]:
    sent = bytes_text(figures.comm_bytes)
    arguments, results = argument_leaves(stages), result_leaves(stages)
    conflicts = conflict_rows(stages, prices)
    bars = bars_of(figures.timeline, stages.plan.mesh)
    lost = figures.timeline.seconds - bars.seconds
    curve = memory_curve(held, stages.optimized.program)
    return [
        _Section("plan", "The plan", "against the greedy one and the best there can be",
                 _quality(figures)),
        _Section("timeline", "Timeline", "predicted; compute and links at the same time where "
                 "neither waits for the other", _timeline(bars, lost, stages)),
        _Section("collectives", "Collectives", f"{len(collectives)} ops, {sent} sent by each "
                 "device in one run", _collectives(collectives)),
        _Section("bytes", "Bytes by kind", "sent by each device, executions, time",
                 _traffic(collectives)),
        _Section("marks", "Prices of marks", "what would have been cheaper, and which mark forbids "
                 "it", _marks(stages, prices)),
        _Section("conflicts", "Conflicts", f"{len(stages.propagated.conflicts)} disagreements of "
                 f"{len(conflicts)} kinds, and how the plan settled them", _conflicts(conflicts)),
        _Section("memory", "Memory over time", "of each device", _memory(figures, curve)),
        _Section("mesh", "Mesh and tiles", "who holds what", _pictures(stages)),
        _Section("arguments", "Arguments", _split_text(arguments), _leaves(arguments, stages)),
        _Section("results", "Results", _split_text(results), _leaves(results, stages)),
        _Section("largest", "Largest values", "made inside the program, bytes per device",
                 _largest(stages)),
        _Section("notes", "Notes", "", _notes(stages.plan.notes)),
        _Section("stages", "Stage times", "of this compiler, without XLA", _stage_times(stages)),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The plan and its run.


def _cards(collectives: Sequence[Collective], figures: Overview) -> str:
    memory = figures.memory
    known = memory is not None and memory.peak_bytes
    held = memory.peak_bytes if memory is not None and known else figures.argument_bytes
    whole = bytes_text(figures.whole_argument_bytes)
    compute = seconds_text(figures.compute_seconds)
    peak = "predicted" if memory is not None and memory.is_predicted else "at most"
    cards = [
        ("devices", str(figures.devices), figures.mesh),
        (
            "predicted time of one run",
            seconds_text(figures.seconds),
            f"bound by {figures.bound}; compute {compute}, collectives "
            f"{seconds_text(figures.comm_seconds)}",
        ),
        (
            "sent by each device",
            bytes_text(figures.comm_bytes),
            f"in one run, by {len(collectives)} collective ops",
        ),
        (
            "memory of each device",
            bytes_text(held),
            f"peak, {peak}; arguments {bytes_text(figures.argument_bytes)} of {whole}"
            if known
            else f"arguments, of {whole} unpartitioned",
        ),
    ]
    return '<div class="cards">' + "".join(
        f'<div class="card"><span class="label">{escape(label)}</span><b>{escape(value)}</b>'
        f"<span>{escape(remark)}</span></div>"
        for label, value, remark in cards
    ) + "</div>"  # fmt: skip


def _quality(figures: Overview) -> str:
    remarks = dict(quality_rows(figures))
    rows = [("this plan", figures.seconds, seconds_text(figures.seconds), "var(--accent)")]
    for name, seconds in (
        ("greedy plan", figures.greedy_seconds),
        ("lower bound", figures.lower_seconds),
    ):
        if name in remarks:
            rows.append((name, seconds, remarks[name], "var(--soft)"))
    return h.bars(rows)


def _timeline(timeline: Bars, lost: float, stages: Stages) -> str:
    if not timeline.seconds:
        return ""
    axes = [name for name, atoms in stages.plan.mesh.axis_atoms.items() if atoms]
    kinds = [COMPUTE, *dict.fromkeys(s.kind for s in timeline.flat() if s.kind != COMPUTE)]
    intro = (
        "<p>Compute, and the links of every mesh axis. A collective starts when its operands are "
        "there and its links are free; whoever reads its result waits for it. Iterations of a loop "
        "do not overlap.</p>"
    )
    if lost > timeline.seconds / 1000:
        intro += (
            f"<p>The prediction adds {seconds_text(lost)} to what is drawn: on this chip "
            "arithmetic and communication that run side by side slow each other.</p>"
        )
    return (
        f"{intro}{h.legend([(kind, f'var(--{kind})') for kind in kinds])}"
        f"{charts.timeline_svg(timeline, axes, 'timeline of one run')}"
        f"{''.join(_loop(loop, axes) for loop in timeline.loops)}{_where(timeline)}"
    )


def _loop(loop: Loop, axes: Sequence[str]) -> str:
    """One iteration of a loop, to unfold, with the loops inside it."""
    inner = "".join(_loop(inside, axes) for inside in loop.body.loops)
    each = seconds_text(loop.body.seconds)
    place = h.source(loop.label.partition(" at ")[2])
    return (
        f'<details class="iteration"><summary>one iteration of the {charts.trips_text(loop)} at '
        f"{place}: {each}</summary>"
        f"{charts.timeline_svg(loop.body, axes, 'timeline of one iteration')}{inner}</details>"
    )


def _where(timeline: Bars) -> str:
    """Time by source line, to unfold."""
    totals: dict[str, list[float]] = {}
    for s in timeline.flat():
        totals.setdefault(s.group, [0.0, 0.0])[s.kind != COMPUTE] += s.seconds
    busy = sum(map(sum, totals.values()))
    ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))
    rows = [
        (
            Cell(h.source(group), group, "w"),
            h.number(seconds_text(compute), compute),
            h.number(seconds_text(comm), comm),
            h.number(seconds_text(compute + comm), compute + comm),
            h.number(f"{100 * (compute + comm) / busy:.1f}%", compute + comm),
        )
        for group, (compute, comm) in ordered
    ]
    heads = ("source", "compute", "collectives", "together", "share")
    made = h.table(heads, rows, sort="together", search="a function or a file")
    return f"<details><summary>time by source line</summary>{made}</details>"


def _collectives(collectives: Sequence[Collective]) -> str:
    heads = ("kind", "axes", "bytes", "times", "ops", "total", "time", "source and reason")
    ordered = sorted(collective_rows(collectives), key=lambda row: -row.seconds)
    rows = [
        (
            Cell(h.kind(row.kind), row.kind, "t"),
            h.text(", ".join(row.axes), "t"),
            h.number(bytes_text(row.bytes), row.bytes),
            h.number(str(row.count), row.count),
            h.number(str(row.ops), row.ops),
            h.number(bytes_text(row.total_bytes), row.total_bytes),
            h.number(seconds_text(row.seconds), row.seconds),
            Cell(
                f'{h.source(row.source)}<span class="reason">'
                f"{escape(source_text(row.reason))}</span>",
                row.source,
                "w",
            ),
        )
        for row in ordered
    ]
    made = h.table(heads, rows, sort="time", search="all_gather data mlp")
    return made or "<p>None: no device ever waits for another.</p>"


def _traffic(collectives: Sequence[Collective]) -> str:
    return h.bars(
        [
            (
                f"{h.kind(total.kind)} "
                f"<span class=soft>over {escape(', '.join(total.axes))}</span>",
                total.bytes,
                f"{bytes_text(total.bytes)}, {total.runs}x, {seconds_text(total.seconds)}",
                f"var(--{total.kind})",
            )
            for total in traffic(collectives)
        ]
    )


# ---------------------------------------------------------------------------------------------
# What was decided against.


def _marks(stages: Stages, prices: Prices | None) -> str:
    if prices is None or not prices.marks.groups:
        return ""
    rows = [
        (
            Cell(h.source(row.name), row.name, "w"),
            h.code(row.sharding),
            h.number(str(row.values), row.values),
            h.number(seconds_text(-row.seconds), -row.seconds),
            Cell(escape(row.text), row.text, "w"),
        )
        for row in mark_rows(stages, prices)
    ]
    heads = ("mark", "sharding", "values", "costs", "without it")
    found = h.table(heads, rows, sort="costs")
    none = "<p>None of them costs 1% of the collectives' time or more.</p>"
    return f"<p>{escape(marks_title(prices).capitalize())}.</p>{found or none}"


def _conflicts(conflicts: Sequence[ConflictRow]) -> str:
    rows = [
        (
            Cell(f"{escape(row.op)}<br>{h.source(row.source)}", f"{row.op} {row.source}", "w"),
            h.number(str(row.ops), row.ops),
            Cell("<br>".join(map(_claim, row.claims)), str(row.claims), "w"),
            Cell(f"<b>{escape(row.taken)}</b>", row.taken, "t"),
            Cell(_losers(row.losers), _least(row.losers), "w"),
        )
        for row in conflicts
    ]
    heads = ("op", "n", "who wants what", "the plan took", "what else would cost")
    return h.table(heads, rows, search="an op, an argument, an axis")


def _claim(claim: tuple[str, str, int, str]) -> str:
    name, type_, dim, axes = claim
    return (
        f"<b>{escape(axes)}</b> on dim {dim} of <code>{h.breakable(name)}</code> "
        f'<code class="soft">{escape(type_)}</code>'
    )


def _losers(losers: Sequence[LosingClaim] | None) -> str:
    if losers is None:
        return '<span class="soft">not asked</span>'
    return "<br>".join(f"<b>{escape(x.axes)}</b>: {escape(x.text)}" for x in losers)


def _least(losers: Sequence[LosingClaim] | None) -> float:
    return min((x.seconds for x in losers or () if x.seconds is not None), default=math.inf)


# ---------------------------------------------------------------------------------------------
# Memory.


def _memory(figures: Overview, curve: MemoryCurve) -> str:
    chart = charts.memory_svg(curve, figures.hbm_bytes)
    legend = h.legend(list(zip(KINDS, charts.MEMORY_COLOURS, strict=True)))
    rows = [
        (
            h.number(bytes_text(row.bytes), row.bytes),
            h.number(str(row.values), row.values),
            h.text(row.kind, "t"),
            Cell(f"<code>{h.breakable(row.label)}</code>", row.label, "w"),
            h.code(row.type),
            Cell(h.source(row.source), row.source, "w"),
        )
        for row in curve.at_peak[:TOP_VALUES]
    ]
    heads = ("bytes", "n", "alive as", "made by", "local type", "source")
    peak = h.table(heads, rows, sort="bytes")
    totals = h.table(("what", "bytes"), [(h.text(w), h.text(s)) for w, s in memory_rows(figures)])
    return (
        "<p>Predicted from the local program: only values that XLA stores count. Arguments and "
        "results are held throughout; results that donated arguments make room for are part of the "
        f"arguments.</p>{legend}{chart}<h3>The largest at the peak</h3>{peak}"
        f"<h3>Totals</h3>{totals}"
    )


def _largest(stages: Stages) -> str:
    heads = ("per device", "n", "type", "sharding", "local", "op", "source")
    rows = [
        (
            h.number(bytes_text(row.local.bytes), row.local.bytes),
            h.number(str(row.values), row.values),
            h.code(type_text(row.type)),
            h.code(spec_text(row.sharding, stages.plan.mesh), "w"),
            h.code(type_text(row.local)),
            h.text(f"copy for {row.op}" if row.copy else row.op, "w"),
            Cell(h.source(row.source), row.source, "w"),
        )
        for row in largest_values(stages, 20)
    ]
    return h.table(heads, rows, sort="per device")


# ---------------------------------------------------------------------------------------------
# The boundary.


def _pictures(stages: Stages) -> str:
    mesh = stages.plan.mesh
    shown = ""
    if mesh.size > picture.MAX_DEVICES:
        shown = f", the first {picture.MAX_DEVICES} of {mesh.size}"
    figures = [_figure(picture.mesh_picture(mesh), "the mesh", f"{mesh}{shown}", "device ids")]
    for group in _drawn(stages):
        leaf = group.leaves[0]
        caption = (
            f"{type_text(leaf.type)} {spec_text(leaf.sharding, mesh)}",
            f"{type_text(leaf.local)} on each device",
        )
        drawn = picture.tile_picture(leaf.type, leaf.sharding, mesh)
        figures.append(_figure(drawn, group.pattern, *caption))
    return (
        "<p>Every device has its colour. A tile shows the devices that hold it; hatched ones are "
        "held by several. Of a tensor with more than two dims two are drawn, split ones first.</p>"
        f'<div class="tiles">{"".join(figures)}</div>'
    )


def _figure(svg: str, title: str, *captions: str) -> str:
    lines = "".join(f"<span><code>{escape(line)}</code></span>" for line in captions)
    return f"<figure>{svg}<figcaption><b>{h.breakable(title)}</b>{lines}</figcaption></figure>"


def _drawn(stages: Stages) -> list[Group]:
    """The largest leaf of every sharding first, then the next largest ones."""
    groups = [g for g in group_leaves(argument_leaves(stages)) if g.leaves[0].type.rank]
    groups.sort(key=lambda group: -group.leaves[0].type.bytes)
    seen: set[object] = set()
    first: list[Group] = []
    second: list[Group] = []
    for group in groups:
        key = group.leaves[0].sharding
        (second if key in seen else first).append(group)
        seen.add(key)
    return (first + second)[: PICTURES - 1]


def _split_text(leaves: Sequence[Leaf]) -> str:
    split = sum(any(leaf.sharding.dims) for leaf in leaves)
    return f"{len(leaves)}, {split} of them split"


def _leaves(leaves: Sequence[Leaf], stages: Stages) -> str:
    heads = ("name", "n", "type", "sharding", "local", "per device", "origin")
    rows = []
    for group in group_leaves(leaves):
        leaf = group.leaves[0]
        rows.append(
            (
                Cell(_group_name(group), group.pattern, "w"),
                h.number(str(len(group.leaves)), len(group.leaves)),
                h.code(type_text(leaf.type)),
                h.code(spec_text(leaf.sharding, stages.plan.mesh)),
                h.code(type_text(leaf.local)),
                h.number(bytes_text(group.bytes), group.bytes),
                Cell(h.breakable(group.origin), group.origin, "w"),
            )
        )
    return h.table(heads, rows, search="a name or a sharding" if len(rows) > 6 else "")


def _group_name(group: Group) -> str:
    name = f"<code>{h.breakable(group.pattern)}</code>"
    if len(group.leaves) == 1:
        return name
    items = "".join(
        f"<li><code>{h.breakable(leaf.name)}</code> {h.breakable(leaf.origin)}</li>"
        for leaf in group.leaves
    )
    return f"<details><summary>{name}</summary><ul>{items}</ul></details>"


# ---------------------------------------------------------------------------------------------
# The rest.


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(source_text(note))}</li>" for note in dict.fromkeys(notes))
    return f"<ul>{items}</ul>" if items else ""


def _stage_times(stages: Stages) -> str:
    return h.bars(
        [
            (escape(stage), seconds, seconds_text(seconds), "var(--accent)")
            for stage, seconds in stages.seconds.items()
        ]
    )
