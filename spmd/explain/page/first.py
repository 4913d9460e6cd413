"""The first screen: the figures of a run, where its time goes, and the largest costs.

The page opens with it, and notebooks show it alone.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files

from spmd.explain.costs import Cost, code_lines, largest, seconds_by_kind
from spmd.explain.facts import Facts
from spmd.explain.words import bytes_text, seconds_text, share_text, source_text


def resource(name: str) -> str:
    """The text of a file beside this one."""
    return files("spmd.explain.page").joinpath(name).read_text(encoding="utf-8")


def notebook_cell(facts: Facts) -> str:
    """The first screen as a piece of HTML that brings its own style."""
    return (
        f'<div class="spmd spmd-cell"><style>{resource("first.css")}</style>'
        f'<p class="title"><b>{escape(facts.name)}</b> on {escape(str(facts.plan.mesh))}, '
        f"{escape(str(facts.plan.topology))}</p>{first_screen(facts)}</div>"
    )


def first_screen(facts: Facts) -> str:
    """The figures, and the largest of what the time is spent on."""
    return f"{_cards(facts)}{_spent(facts)}{_largest(facts)}"


def _cards(facts: Facts) -> str:
    memory, mesh, waits = facts.memory, facts.plan.mesh, facts.timeline.exposed_seconds
    given = bytes_text(sum(leaf.local.bytes for leaf in facts.arguments))
    whole = bytes_text(sum(leaf.type.bytes for leaf in facts.arguments))
    held, remark = given, f"arguments, of {whole} unpartitioned"
    if memory is not None and memory.peak_bytes:
        held = bytes_text(memory.peak_bytes)
        remark = f"peak, {facts.peak_kind}; arguments {given} of {whole}"
    cards = [
        ("devices", str(mesh.size), str(mesh)),
        (
            "predicted time of one run",
            seconds_text(facts.timeline.seconds),
            f"{seconds_text(waits)} of it waiting for collectives" if waits else "all compute",
        ),
        (
            "sent by each device",
            bytes_text(facts.sent_bytes),
            f"in one run, by {len(facts.collectives)} collective ops",
        ),
        ("memory of each device", held, remark),
    ]
    return '<div class="cards">' + "".join(
        f'<div class="card"><span class="label">{escape(label)}</span><b>{escape(value)}</b>'
        f"<span>{escape(remark)}</span></div>"
        for label, value, remark in cards
    ) + "</div>"  # fmt: skip


def _spent(facts: Facts) -> str:
    """The whole run as one bar: compute, and what each kind of collective adds to it."""
    totals = seconds_by_kind(facts.costs)
    whole = sum(totals.values())
    parts = "".join(
        f'<span style="flex:{seconds / whole:.4f};background:var(--{kind})" '
        f'title="{kind}: {seconds_text(seconds)}"></span>'
        for kind, seconds in totals.items()
    )
    legend = "".join(
        f'<span><i style="background:var(--{kind})"></i>{kind} '
        f"{share_text(seconds, facts.timeline.seconds)}</span>"
        for kind, seconds in totals.items()
    )
    return f'<div class="spent">{parts}</div><p class="kinds">{legend}</p>' if whole else ""


def _largest(facts: Facts) -> str:
    title, most = largest(facts.costs, facts.timeline.seconds)
    rows = "".join(_row(cost, facts.timeline.seconds, most[0].seconds) for cost in most)
    head = f'<p class="head"><b>{title.capitalize()}</b></p>'
    return f'{head}<ol class="costs">{rows}</ol>' if rows else ""


def _row(cost: Cost, whole: float, most: float) -> str:
    code = "".join(
        f'<span title="{escape(place)}">{escape(source_text(place))}</span>'
        f"<code>{escape(text)}</code>"
        for place, text in code_lines(cost)
    )
    why = f'<p class="why">{escape(source_text(cost.reason))}</p>' if cost.reason else ""
    bar = f'<i style="width:{100 * cost.seconds / most:.1f}%;background:var(--{cost.kind})"></i>'
    return (
        f"<li><div><b>{share_text(cost.seconds, whole)}</b> "
        f'<span class="soft">{seconds_text(cost.seconds)}</span>{bar}</div>'
        f'<div><b>{escape(cost.title)}</b> <span class="soft">{escape(cost.remark)}</span>'
        f'{why}<div class="code">{code}</div></div></li>'
    )
