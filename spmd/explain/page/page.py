"""The report as one self-contained HTML page: what costs most first, the rest to unfold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from spmd.explain import costs
from spmd.explain.facts import (
    Facts,
    largest_table,
    leaf_table,
    memory_rows,
    proof_text,
    quality_rows,
    split_text,
)
from spmd.explain.measured import part_table
from spmd.explain.memory import KINDS, memory_curve, recomputed
from spmd.explain.page import html as h
from spmd.explain.page import pictures
from spmd.explain.page.html import Html, joined, tag
from spmd.explain.prices import UNPRICED, ConflictRow, conflict_rows, marks_title
from spmd.explain.words import (
    Cell,
    Table,
    bytes_text,
    code,
    count,
    number,
    plural,
    seconds_text,
    share_text,
    source,
    source_text,
    spec_text,
)
from spmd.predict.timeline import COMPUTE, Timeline

TOP_VALUES = 15  # rows of the table of what is alive at the peak

BREAK = tag("br")


def render(facts: Facts) -> str:
    """Makes the page: what `explain_program` says, with pictures, without outside resources."""
    plan = facts.plan
    sections = [section for section in _sections(facts) if section.body]
    texts = dict.fromkeys([*(form.text for form in plan.forms), *plan.notes])
    notes = [tag("li", source_text(text)) for text in texts]
    devices = plural(plan.mesh.size, "device")
    title = f"{facts.title} on {devices}"
    lead = f"Mesh {plan.mesh} on {plan.topology}, planned by the solver, {proof_text(plan)}. "
    if plan.topology.platform == "cpu":
        lead += f"Times are predicted for {devices} of their own. CPU devices are threads that "
        lead += "share one machine, and take longer."
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", _resource("report.css"), _resource("first.css")),
    )
    body = tag(
        "body.spmd",
        pictures.HATCH,
        tag("header", tag("h1", title), tag("p.lead", lead)),
        tag("ul.notes", *notes) if notes else "",
        _cards(facts),
        _spent(facts),
        _most_costly(facts),
        tag("nav", *(tag("a", s.title, href=f"#{s.anchor}") for s in sections)),
        tag("main", *(section.folded() for section in sections)),
        tag("script", _resource("report.js")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def notebook_cell(facts: Facts) -> Html:
    """Returns the page's first screen as HTML that brings its own style, for a notebook."""
    on = f" on {facts.plan.mesh}, {facts.plan.topology}"
    return tag(
        "div.spmd spmd-cell",
        tag("style", _resource("first.css")),
        tag("p.title", tag("b", facts.title), on),
        _cards(facts),
        _spent(facts),
        _most_costly(facts),
    )


def _resource(name: str) -> Html:
    """Reads a file beside this one, which becomes a part of the page unchanged."""
    return Html(files("spmd.explain.page").joinpath(name).read_text(encoding="utf-8"))


class _Section(NamedTuple):
    """Holds one part of the page; left out if it has no body."""

    anchor: str
    title: str
    remark: str
    body: Html
    is_open: bool = False

    def folded(self) -> Html:
        head = tag("h2", self.title, tag("small", self.remark), id=self.anchor)
        part = tag("details.part", tag("summary", head), self.body, open=self.is_open)
        return tag("section", part)


def _sections(facts: Facts) -> list[_Section]:
    stages, mesh = facts.stages, facts.plan.mesh
    conflicts = conflict_rows(stages, facts.prices)
    again, made_again = recomputed(facts.plan, facts.timeline)
    times = [(stage, n, seconds_text(n), "var(--accent)") for stage, n in stages.seconds.items()]
    own = facts.timeline.seconds
    quality = [("this plan", own, seconds_text(own), "var(--accent)")]
    quality += [(*row, "var(--soft)") for row in quality_rows(facts)]
    return [
        _Section("timeline", "Timeline", "predicted; compute and links at the same time where "
                 "neither waits for the other", _timeline(facts), True),
        _Section("measured", "Measured", facts.measured.title if facts.measured else "",
                 _measured(facts), True),
        _Section("pipelines", "Pipelines", "which stage works on what in which step",
                 pictures.pipelines(facts), True),
        _Section("rings", "Rings", "operands that come piece by piece, and those that could",
                 pictures.rings(facts), True),
        _Section("plan", "The plan", "against the greedy one and the best there can be",
                 h.bars(quality), True),
        _Section("collectives", "Collectives", f"{plural(len(facts.collectives), 'op')}, "
                 f"{facts.sent_text}", _collectives(facts)),
        _Section("bytes", "Bytes by kind", "sent by each device, executions, time",
                 _traffic(facts)),
        _Section("marks", "Prices of marks", "what would have been cheaper, and which mark forbids "
                 "it", _marks(facts)),
        _Section("conflicts", "Conflicts", f"{len(stages.propagated.conflicts)} disagreements of "
                 f"{plural(len(conflicts), 'kind')}, and how the plan settled them",
                 _conflicts(conflicts)),
        _Section("memory", "Memory over time", "of each device",
                 _memory(facts), True),
        _Section("again", "Made again", again.partition(": ")[2], h.table(made_again)),
        _Section("mesh", "Mesh and tiles", "who holds what", pictures.tiles(facts)),
        _Section("arguments", "Arguments", split_text(facts.arguments),
                 h.table(leaf_table(facts.arguments, mesh))),
        _Section("results", "Results", split_text(facts.results),
                 h.table(leaf_table(facts.results, mesh))),
        _Section("constants", "Constants", split_text(facts.constants),
                 h.table(leaf_table(facts.constants, mesh))),
        _Section("largest", "Largest values", "made inside the program, bytes per device",
                 h.table(largest_table(facts.plan, 20))),
        _Section("stages", "Stage times", "of this compiler, without XLA", h.bars(times)),
    ]  # fmt: skip


def _cards(facts: Facts) -> Html:
    use, mesh, waits = facts.use, facts.plan.mesh, facts.timeline.exposed_seconds
    given = bytes_text(sum(leaf.local.bytes for leaf in facts.arguments))
    whole = bytes_text(sum(leaf.type.bytes for leaf in facts.arguments))
    held, remark = given, f"arguments, of {whole} unpartitioned"
    if use is not None:
        held = bytes_text(use.peak)
        more = f"; {facts.compiled_text}" if facts.compiled_text else ""
        remark = f"predicted peak{more}; arguments {given} of {whole}"
    waiting = f"{seconds_text(waits)} of it waiting for collectives" if waits else "all compute"
    if facts.measured is not None:
        waiting += f"; measured {seconds_text(facts.measured.seconds)}"
    senders = f"in one run, by {len(facts.collectives)} collective ops"
    cards = (
        ("devices", str(mesh.size), str(mesh)),
        ("predicted time of one run", seconds_text(facts.timeline.seconds), waiting),
        ("sent by each device", bytes_text(facts.sent_bytes), senders),
        ("memory of each device", held, remark),
    )
    return tag(
        "div.cards",
        *(
            tag("div.card", tag("span.label", label), tag("b", value), tag("span", remark))
            for label, value, remark in cards
        ),
    )


def _spent(facts: Facts) -> Html:
    totals = costs.seconds_by_kind(facts.costs)
    whole = sum(totals.values())
    if not whole:
        return Html()
    parts, kinds = [], []
    for kind, seconds in totals.items():
        colour = f"background:var(--{kind})"
        title = f"{kind}: {seconds_text(seconds)}"
        share = share_text(seconds, facts.timeline.seconds)
        parts.append(tag("span", style=f"flex:{seconds / whole:.4f};{colour}", title=title))
        kinds.append(tag("span", tag("i", style=colour), f"{kind} {share}"))
    return joined(tag("div.spent", *parts), tag("p.kinds", *kinds))


def _most_costly(facts: Facts) -> Html:
    whole = facts.timeline.seconds
    title, most = costs.largest(facts.costs, whole)
    rows = []
    for cost in most:
        width = f"width:{cost.seconds / most[0].seconds:.1%};background:var(--{cost.kind})"
        lines = [
            joined(tag("span", source_text(place), title=place), tag("code", text))
            for place, text in costs.code_lines(cost)
        ]
        figures = tag(
            "div",
            tag("b", share_text(cost.seconds, whole)),
            " ",
            tag("span.soft", seconds_text(cost.seconds)),
            tag("i", style=width),
        )
        reason = tag("p.why", source_text(cost.reason)) if cost.reason else ""
        said = (tag("b", cost.title), " ", tag("span.soft", cost.remark), reason)
        rows.append(tag("li", figures, tag("div", *said, tag("div.code", *lines))))
    if not rows:
        return Html()
    return joined(tag("p.head", tag("b", title.capitalize())), tag("ol.costs", *rows))


def _timeline(facts: Facts) -> Html:
    drawn = pictures.bars_of(facts.timeline, facts.plan.mesh)
    if not drawn.seconds:
        return Html()
    axes = [name for name, atoms in facts.plan.mesh.axis_atoms.items() if atoms]
    kinds = dict.fromkeys((COMPUTE, *(segment.kind for segment in drawn.flat())))
    intro = tag(
        "p",
        "Compute, and the links of every mesh axis. A collective starts when its operands are "
        "there and its links are free; whoever reads its result waits for it. Iterations of a loop "
        "do not overlap.",
    )
    lost = facts.timeline.seconds - drawn.seconds
    slower = tag(
        "p",
        f"The prediction adds {seconds_text(lost)} to what is drawn: on this chip arithmetic and "
        "communication that run side by side slow each other.",
    )
    return joined(
        intro,
        slower if lost > drawn.seconds / 1000 else "",
        h.legend((kind, f"var(--{kind})") for kind in kinds),
        pictures.timeline_svg(drawn, axes, "timeline of one run"),
        *(_loop(loop, axes) for loop in drawn.loops),
        h.folded("time by source line", _by_line(facts.timeline)),
    )


def _loop(loop: pictures.Bars, axes: Sequence[str]) -> Html:
    """Shows one iteration of a loop, to unfold, with the loops inside it."""
    each = f": {seconds_text(loop.once)}"
    return tag(
        "details.iteration",
        tag("summary", f"one iteration of the {loop.title} at ", h.source(loop.place), each),
        pictures.timeline_svg(loop, axes, "timeline of one iteration"),
        *(_loop(inside, axes) for inside in loop.loops),
    )


def _by_line(timeline: Timeline) -> Html:
    totals: dict[str, list[float]] = {}
    for slot in timeline.slots:
        if not slot.op.regions:
            both = totals.setdefault(slot.op.loc.trail, [0.0, 0.0])
            both[slot.lane != COMPUTE] += slot.seconds * slot.trips
    busy = timeline.compute_seconds + timeline.comm_seconds
    rows = [
        (
            source(trail),
            number(seconds_text(compute), compute),
            number(seconds_text(comm), comm),
            number(seconds_text(compute + comm), compute + comm),
            number(share_text(compute + comm, busy), compute + comm),
        )
        for trail, (compute, comm) in sorted(totals.items(), key=lambda item: -sum(item[1]))
    ]
    heads = ("source", "compute", "collectives", "together", "share")
    return h.table(Table(heads, rows, sort="together", search="a function or a file"))


def _collectives(facts: Facts) -> Html:
    ordered = sorted(costs.collective_rows(facts.collectives), key=lambda row: -row.seconds)
    made = costs.collective_table(ordered).without("ms")
    made = made._replace(heads=(*made.heads[:-1], "source and reason"))
    return h.table(made) or tag("p", "None: no device ever waits for another.")


def _traffic(facts: Facts) -> Html:
    rows = []
    for total in costs.traffic(facts.collectives):
        kind, colour = total.like.kind, f"var(--{total.like.kind})"
        over = tag("span.soft", f" over {', '.join(total.like.axes)}")
        figures = f"{bytes_text(total.bytes)}, {total.runs}x, {seconds_text(total.seconds)}"
        rows.append((joined(h.dot(colour), kind, over), total.bytes, figures, colour))
    return h.bars(rows)


def _measured(facts: Facts) -> Html:
    if facts.measured is None:
        return Html()
    (title, kinds), *others = facts.measured.tables()
    return joined(
        tag("p", title[:1].upper(), title[1:]),
        h.table(part_table(kinds)),
        *(h.folded(title, h.table(part_table(parts))) for title, parts in others),
    )


def _memory(facts: Facts) -> Html:
    if facts.use is None:
        return Html()
    curve = memory_curve(facts.use, facts.stages.optimized.program)
    rows = [
        (
            number(bytes_text(row.bytes), row.bytes),
            count(row.values),
            Cell(row.kind, style="t"),
            Cell(row.label, "name", style="w"),
            code(row.type),
            source(row.source),
        )
        for row in curve.at_peak[:TOP_VALUES]
    ]
    heads = ("bytes", "n", "alive as", "made by", "local type", "source")
    figures = [(Cell(what), Cell(size)) for what, size in memory_rows(facts)]
    intro = tag(
        "p",
        "Predicted from the local program: only values that XLA stores count. Arguments and "
        "results are held throughout; results that donated arguments make room for are part of the "
        f"arguments. {facts.compiled_text}{'.' * bool(facts.compiled_text)}",
    )
    return joined(
        intro,
        h.legend(zip(KINDS, pictures.MEMORY_COLOURS, strict=True)),
        pictures.memory_svg(curve, facts.plan.topology.hbm_bytes),
        h.folded("the largest at the peak", h.table(Table(heads, rows, sort="bytes"))),
        h.folded("totals", h.table(Table(("what", "bytes"), figures))),
    )


def _marks(facts: Facts) -> Html:
    if facts.prices is None or not facts.prices.marks.groups:
        return Html()
    found = facts.prices.marks
    rows = [
        (
            source(marks.name),
            code(spec_text(marks.sharding, facts.plan.mesh)),
            count(len(marks.values)),
            number(seconds_text(-price.seconds), -price.seconds),
            Cell(price.text, style="w"),
        )
        for marks, price, *_ in found.reliefs
    ]
    heads = ("mark", "sharding", "values", "costs", "without it")
    none = tag("p", "None of them costs 1% of the collectives' time or more.")
    shown = h.table(Table(heads, rows, sort="costs")) or none
    return joined(tag("p", f"{marks_title(found).capitalize()}."), shown)


def _conflicts(conflicts: Sequence[ConflictRow]) -> Html:
    rows = []
    for row in conflicts:
        place = joined(row.op, BREAK, h.source(row.source))
        losers, least = tag("span.soft", "not asked"), math.inf
        if row.losers is not None:
            shown = (
                joined(tag("b", axes), f": {price.text if price else UNPRICED}")
                for axes, price in row.losers
            )
            losers = joined(*shown, by=BREAK)
            least = min((price.seconds for _, price in row.losers if price), default=math.inf)
        claims = [
            joined(tag("b", axes), f" on dim {dim} of ", tag("code", h.breakable(name)), " ",
                   tag("code.soft", type_))
            for name, type_, dim, axes in row.claims
        ]  # fmt: skip
        rows.append(
            (
                Cell(place, key=f"{row.op} {row.source}", style="w"),
                count(row.ops),
                Cell(joined(*claims, by=BREAK), key=str(row.claims), style="w"),
                Cell(tag("b", row.taken), key=row.taken, style="t"),
                Cell(losers, key=least, style="w"),
            )
        )
    heads = ("op", "n", "who wants what", "the plan took", "what else would cost")
    return h.table(Table(heads, rows, search="an op, an argument, an axis"))
