"""Writes the page that compares the candidates of a search: times, memory, and all figures."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.explain import words as w
from spmd.explain.page import html as h
from spmd.explain.page.html import Html, tag
from spmd.explain.page.page import whole
from spmd.predict.timeline import COMPUTE

PALETTE = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
"""Names of the page's colours, which stand for mesh axes here."""


class PlanBar(NamedTuple):
    """What the pictures show of one candidate."""

    name: str
    spent: Mapping[str, float]  # `compute`, and mesh axes -> seconds
    bytes: int  # of one device, at the peak
    limit: int  # of the device
    verdict: str


def render(
    title: str,
    lead: Sequence[str],
    cards: Sequence[tuple[str, str, str]],
    bars: Sequence[PlanBar],
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Returns the page: (label, value, remark) of the best as cards, bars, and the whole table."""
    lanes = list(dict.fromkeys(lane for bar in bars for lane in bar.spent))
    colours = {
        lane: f"var(--{COMPUTE if lane == COMPUTE else PALETTE[i % len(PALETTE)]})"
        for i, lane in enumerate(sorted(lanes, key=lambda lane: lane != COMPUTE))
    }
    longest = max((sum(bar.spent.values()) for bar in bars), default=1.0)
    names = [(lane if lane == COMPUTE else f"waiting for {lane}", colours[lane]) for lane in lanes]
    table = w.Table(tuple(heads), [tuple(row) for row in rows], search="a mesh or a choice")
    return whole(
        title,
        lead,
        h.cards(cards),
        tag("p.head", tag("b", "Predicted time and memory of each candidate")),
        h.legend(names),
        tag("ol.costs plans", *(_bar(bar, colours, longest) for bar in bars)),
        tag("p.head", tag("b", "All figures")),
        tag("main", h.table(table)),
    )


def _bar(bar: PlanBar, colours: Mapping[str, str], longest: float) -> Html:
    seconds = sum(bar.spent.values())
    parts = h.stretches(bar.spent, colours)
    share = min(bar.bytes / bar.limit, 1.0)
    colour = {"fits": "--saved", "tight": "--collective_permute"}.get(bar.verdict, "--bad")
    held = f"{w.bytes_text(bar.bytes)} of {w.bytes_text(bar.limit)}: {bar.verdict}"
    filled = tag("i", style=f"width:{share:.1%};background:var({colour})")
    return tag(
        "li",
        tag("div", tag("b", w.seconds_text(seconds)), tag("div.soft", held), filled),
        tag(
            "div",
            tag("span", bar.name),
            tag("div.spent", *parts, style=f"width:{seconds / longest:.1%};margin:4px 0 0"),
        ),
    )
