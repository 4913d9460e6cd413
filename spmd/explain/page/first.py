"""The first screen: the figures of a run, where its time goes, and the largest costs.

The page opens with it, and notebooks show it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from spmd.explain.collectives import Collective
from spmd.explain.costs import Cost, code_lines, costs, largest, seconds_by_kind
from spmd.explain.memory import Memory
from spmd.explain.overview import Overview, overview
from spmd.explain.words import bytes_text, seconds_text, share_text, source_text
from spmd.pipeline import Stages


def resource(name: str) -> str:
    """The text of a file beside this one."""
    return files("spmd.explain.page").joinpath(name).read_text(encoding="utf-8")


def notebook_cell(
    name: str, stages: Stages, collectives: Sequence[Collective], memory: Memory | None
) -> str:
    """The first screen as a piece of HTML that brings its own style.

    Args:
      name: what the program is called.
      stages: the pipeline's results.
      collectives: what one run of the program exchanges.
      memory: what XLA reports, or None where it has not compiled the program.
    """
    figures = overview(stages, collectives, memory)
    found = costs(figures.timeline, stages.plan.mesh, stages.plan.topology)
    return (
        f'<div class="spmd spmd-cell"><style>{resource("first.css")}</style>'
        f'<p class="title"><b>{escape(name)}</b> on {escape(figures.mesh)}, '
        f"{escape(figures.topology)}</p>{first_screen(figures, found)}</div>"
    )


def first_screen(figures: Overview, found: Sequence[Cost]) -> str:
    """The figures, and the largest of what the time is spent on."""
    return f"{_cards(figures)}{_spent(figures, found)}{_largest(figures, found)}"


def _cards(figures: Overview) -> str:
    memory = figures.memory
    known = memory is not None and memory.peak_bytes
    held = memory.peak_bytes if memory is not None and known else figures.argument_bytes
    whole = bytes_text(figures.whole_argument_bytes)
    peak = "predicted" if memory is not None and memory.is_predicted else "at most"
    waits = figures.timeline.exposed_seconds
    cards = [
        ("devices", str(figures.devices), figures.mesh),
        (
            "predicted time of one run",
            seconds_text(figures.seconds),
            f"{seconds_text(waits)} of it waiting for collectives" if waits else "all compute",
        ),
        (
            "sent by each device",
            bytes_text(figures.comm_bytes),
            f"in one run, by {figures.collectives} collective ops",
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


def _spent(figures: Overview, found: Sequence[Cost]) -> str:
    """The whole run as one bar: compute, and what each kind of collective adds to it."""
    totals = seconds_by_kind(found)
    whole = sum(totals.values())
    parts = "".join(
        f'<span style="flex:{seconds / whole:.4f};background:var(--{kind})" '
        f'title="{kind}: {seconds_text(seconds)}"></span>'
        for kind, seconds in totals.items()
    )
    legend = "".join(
        f'<span><i style="background:var(--{kind})"></i>{kind} '
        f"{share_text(seconds, figures.seconds)}</span>"
        for kind, seconds in totals.items()
    )
    return f'<div class="spent">{parts}</div><p class="kinds">{legend}</p>' if whole else ""


def _largest(figures: Overview, found: Sequence[Cost]) -> str:
    title, most = largest(found, figures.seconds)
    rows = "".join(_row(cost, figures.seconds, most[0].seconds) for cost in most)
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
