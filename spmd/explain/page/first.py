"""The first screen: the figures of a run, where its time goes, and the largest costs.

The page opens with it, and notebooks show it alone.
"""

from __future__ import annotations

from importlib.resources import files

from spmd.explain.costs import code_lines, largest, seconds_by_kind
from spmd.explain.facts import Facts
from spmd.explain.page.html import Html, joined, tag
from spmd.explain.words import bytes_text, seconds_text, share_text, source_text


def resource(name: str) -> Html:
    """The text of a file beside this one, which is part of a page as it is."""
    return Html(files("spmd.explain.page").joinpath(name).read_text(encoding="utf-8"))


def notebook_cell(facts: Facts) -> Html:
    """The first screen as a piece of HTML that brings its own style."""
    on = f" on {facts.plan.mesh}, {facts.plan.topology}"
    return tag(
        "div.spmd spmd-cell",
        tag("style", resource("first.css")),
        tag("p.title", tag("b", facts.title), on),
        first_screen(facts),
    )


def first_screen(facts: Facts) -> Html:
    """The figures, and the largest of what the time is spent on."""
    return joined(_cards(facts), _spent(facts), _largest(facts))


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
    """The whole run as one bar: compute, and what each kind of collective adds to it."""
    totals = seconds_by_kind(facts.costs)
    whole = sum(totals.values())
    if not whole:
        return Html()
    parts, legend = [], []
    for kind, seconds in totals.items():
        colour = f"background:var(--{kind})"
        title = f"{kind}: {seconds_text(seconds)}"
        share = share_text(seconds, facts.timeline.seconds)
        parts.append(tag("span", style=f"flex:{seconds / whole:.4f};{colour}", title=title))
        legend.append(tag("span", tag("i", style=colour), f"{kind} {share}"))
    return joined(tag("div.spent", *parts), tag("p.kinds", *legend))


def _largest(facts: Facts) -> Html:
    whole = facts.timeline.seconds
    title, most = largest(facts.costs, whole)
    rows = []
    for cost in most:
        width = f"width:{cost.seconds / most[0].seconds:.1%};background:var(--{cost.kind})"
        code = [
            joined(tag("span", source_text(place), title=place), tag("code", text))
            for place, text in code_lines(cost)
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
        rows.append(tag("li", figures, tag("div", *said, tag("div.code", *code))))
    if not rows:
        return Html()
    return joined(tag("p.head", tag("b", title.capitalize())), tag("ol.costs", *rows))
