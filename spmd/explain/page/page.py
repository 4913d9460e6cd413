"""Writes the report as one self-contained HTML page: the largest costs, then sections to unfold."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from spmd.explain import costs
from spmd.explain import words as w
from spmd.explain.data import PlanReport
from spmd.explain.memory import KINDS
from spmd.explain.page import html as h
from spmd.explain.page import pictures
from spmd.explain.page.html import Html, joined, tag
from spmd.predict.timeline import COMPUTE

Part = tuple[str, str, Html, bool]  # title, remark, body, whether it is unfolded at first

UNFOLDED = (
    "program", "measured by kind", "rings", "pipelines", "forms", "notes", "memory per device"
)  # fmt: skip
"""Titles of sections that are unfolded at first."""

TOP_VALUES = 15  # rows of the table of what is alive at the peak


def render(report: PlanReport) -> str:
    """Returns the whole page: what `explain_program` reports, with pictures, in one file."""
    links, parts = [], []
    for title, remark, shown, is_open in _parts(report):
        if shown:
            anchor = title.lower().replace(" ", "-")
            links.append(tag("a", title, href=f"#{anchor}"))
            summary = tag("summary", tag("h2", title, tag("small", remark), id=anchor))
            parts.append(tag("section", tag("details.part", summary, shown, open=is_open)))
    devices = w.plural(report.mesh.size, "device")
    title = f"{report.title} on {devices}"
    lead = f"Mesh {report.mesh} on {report.machine.name}. The solver: {report.solver}. "
    if report.machine.platform == "cpu":
        lead += f"Times are predicted for {devices} of their own. CPU devices are threads that "
        lead += "share one machine, and take longer."
    first = _first_screen(report)
    lines = [lead, *(f"{part}." for part in w.parts_of_axes("".join([first, *parts]), report.mesh))]
    return whole(title, lines, first, tag("nav", *links), tag("main", *parts))


def diff_page(a: PlanReport, b: PlanReport, text: str) -> str:
    """Returns a page with what differs between two plans, `text`, and how each takes its time."""
    pictures_ = []
    for of in (a, b):
        head = tag("p.head", tag("b", f"{of.mesh} on {of.machine.name}"))
        pictures_.append(joined(head, _first_screen(of), _timeline(of)))
    said = tag("div.scroll", tag("pre", tag("code", text)))
    return whole(f"{a.title} and {b.title}", (), said, *pictures_)


def whole(title: str, lead: Sequence[str], *parts: Html) -> str:
    """Returns a page in one file: its title, lines below that, and parts."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", _resource("report.css"), _resource("first.css")),
    )
    header = tag("header", tag("h1", title), *(tag("p.lead", line) for line in lead))
    body = tag("body.spmd", pictures.HATCH, header, *parts, tag("script", _resource("report.js")))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def notebook_cell(report: PlanReport) -> Html:
    """Returns the figures that the page begins with, and their CSS, for a notebook's cell."""
    return tag(
        "div.spmd spmd-cell",
        tag("style", _resource("first.css")),
        tag("p.title", tag("b", report.title), f" on {report.mesh}, {report.machine.name}"),
        _first_screen(report),
    )


def _resource(name: str) -> Html:
    """Returns the text of a CSS or JavaScript file in this folder, as markup for the page."""
    return Html(files("spmd.explain.page").joinpath(name).read_text(encoding="utf-8"))


def _parts(report: PlanReport) -> list[Part]:
    """Returns (title, remark, body, unfolded?) of each section: the text report's, and pictures."""
    side_by_side = "compute and links at the same time where neither waits for the other"
    parts = [("Timeline", f"predicted; {side_by_side}", _timeline(report), True)]
    pictures_of = {"pipelines": pictures.pipelines, "memory per device": _memory}
    for section in report.sections:
        title, shown = section.title, h.section(section)
        if shown and title in pictures_of:
            shown = joined(pictures_of[title](report), shown)
        parts.append((title.capitalize(), section.remark, shown, title in UNFOLDED))
    return [*parts, ("Mesh and tiles", "who holds what", pictures.tiles(report), False)]


def _first_screen(report: PlanReport) -> Html:
    """Returns cards with a program's main figures, its time by kind of work, and largest costs."""
    mesh, waits = report.mesh, report.timeline.exposed_seconds
    memory, limit = dict(report.memory), w.bytes_text(report.machine.hbm_bytes)
    held = f"predicted peak of {limit}: {memory['on the device']}; arguments {memory['arguments']}"
    waiting = f"{w.seconds_text(waits)} of it waiting for collectives" if waits else "all compute"
    if report.measured_seconds is not None:
        waiting += f"; measured {w.seconds_text(report.measured_seconds)}"
    senders = f"in one run, by {len(report.collectives)} collective ops"
    cards = (
        ("devices", str(mesh.size), str(mesh)),
        ("predicted time of one run", w.seconds_text(report.timeline.seconds), waiting),
        ("sent by each device", w.bytes_text(report.sent_bytes), senders),
        ("memory of each device", w.bytes_text(report.peak_bytes), held),
    )
    whole, totals = report.timeline.seconds, costs.seconds_by_kind(report.costs)
    colours = {kind: f"var(--{kind})" for kind in totals}
    parts = h.stretches(totals, colours)
    kinds = [
        tag("span", tag("i", style=f"background:{colours[kind]}"), f"{kind} {w.seconds_text(took)}")
        for kind, took in totals.items()
    ]
    title, most = costs.largest(report.costs, whole)
    rows = []
    for cost in most:
        width = f"width:{cost.seconds / most[0].seconds:.1%};background:var(--{cost.kind})"
        lines = [
            joined(tag("span", w.source_text(place), title=place), tag("code", text))
            for place, text in costs.code_lines(cost, report.code)
        ]
        share, took = w.share_text(cost.seconds, whole), w.seconds_text(cost.seconds)
        figures = tag("div", tag("b", share), " ", tag("span.soft", took), tag("i", style=width))
        reason = tag("p.why", w.source_text(cost.reason)) if cost.reason else ""
        said = (tag("b", cost.title), " ", tag("span.soft", cost.remark), reason)
        rows.append(tag("li", figures, tag("div", *said, tag("div.code", *lines))))
    spent = (tag("div.spent", *parts), tag("p.kinds", *kinds)) if parts else ()
    costly = (tag("p.head", tag("b", title.capitalize())), tag("ol.costs", *rows)) if rows else ()
    return joined(h.cards(cards), *spent, *costly)


def _timeline(report: PlanReport) -> Html:
    timeline = report.timeline
    if not timeline.scheduled_seconds:
        return Html()
    kinds = dict.fromkeys((COMPUTE, *(slot.kind for slot in timeline.slots)))
    intro = (
        "Compute, and the links of mesh axes. A collective starts when its operands are "
        "there and its links are free; whoever reads its result waits for it. Iterations of a loop "
        "do not overlap: the first one is drawn, as long as all take together."
    )
    whole = timeline.seconds
    rows = [
        (c.title, c.ops, c.runs, c.seconds, (c.seconds, whole), " <- ".join(map(str, c.frames)))
        for c in report.costs
    ]
    heads = ("cost", "ops", "runs", "time", "share", "source")
    every = w.Table(heads, rows, sort="time", search="all_gather a function, a file")
    lost = whole - timeline.scheduled_seconds
    if lost > timeline.scheduled_seconds / 1000:
        intro += (
            f" The prediction adds {w.seconds_text(lost)} to what is drawn: on this chip "
            "arithmetic and communication that run side by side slow each other."
        )
    return joined(
        tag("p", intro),
        h.legend((kind, f"var(--{kind})") for kind in kinds),
        pictures.timeline_svg(timeline),
        tag("details", tag("summary", "all costs, by source line"), h.table(every)),
    )


def _memory(report: PlanReport) -> Html:
    curve = report.curve
    largest = curve.at_peak.first(TOP_VALUES)
    intro = tag(
        "p",
        "Predicted from the local program: only values that XLA stores count. Arguments and "
        "results are held throughout; results that donated arguments make room for are part of the "
        "arguments.",
    )
    return joined(
        intro,
        h.legend(zip(KINDS, pictures.MEMORY_COLOURS, strict=True)),
        pictures.memory_svg(curve, report.machine.hbm_bytes),
        tag("details", tag("summary", "the largest at the peak"), h.table(largest)),
    )


# The candidates of a search beside each other.

PALETTE = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
"""Names of the page's colours, which stand for mesh axes here."""


def render_plans(
    title: str,
    lead: Sequence[str],
    cards: Sequence[tuple[str, str, str]],
    bars: Sequence[tuple[str, Any]],
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Returns a page with a search's candidates: cards of the best, their bars, and all figures.

    A bar is of a name and a `spmd.RankedPlan`.
    """
    lanes = list(dict.fromkeys(lane for _, row in bars for lane in row.spent))
    colours = {
        lane: f"var(--{COMPUTE if lane == COMPUTE else PALETTE[i % len(PALETTE)]})"
        for i, lane in enumerate(sorted(lanes, key=lambda lane: lane != COMPUTE))
    }
    longest = max((sum(row.spent.values()) for _, row in bars), default=1.0)
    names = [(lane if lane == COMPUTE else f"waiting for {lane}", colours[lane]) for lane in lanes]
    table = w.Table(tuple(heads), [tuple(row) for row in rows], search="a mesh or a choice")
    return whole(
        title,
        lead,
        h.cards(cards),
        tag("p.head", tag("b", "Predicted time and memory of each candidate")),
        h.legend(names),
        tag("ol.costs plans", *(_bar(name, row, colours, longest) for name, row in bars)),
        tag("p.head", tag("b", "All figures")),
        tag("main", h.table(table)),
    )


def _bar(name: str, row: Any, colours: Mapping[str, str], longest: float) -> Html:
    seconds, limit = sum(row.spent.values()), row.machine.hbm_bytes
    parts = h.stretches(row.spent, colours)
    share = min(row.bytes / limit, 1.0)
    colour = {"fits": "--saved", "tight": "--collective_permute"}.get(row.verdict, "--bad")
    held = f"{w.bytes_text(row.bytes)} of {w.bytes_text(limit)}: {row.verdict}"
    filled = tag("i", style=f"width:{share:.1%};background:var({colour})")
    return tag(
        "li",
        tag("div", tag("b", w.seconds_text(seconds)), tag("div.soft", held), filled),
        tag(
            "div",
            tag("span", name),
            tag("div.spent", *parts, style=f"width:{seconds / longest:.1%};margin:4px 0 0"),
        ),
    )
