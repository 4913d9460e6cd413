"""The report as one self-contained HTML page: what costs most first, the rest to unfold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from spmd.explain.collectives import Collective
from spmd.explain.costs import costs
from spmd.explain.decisions import conflict_rows
from spmd.explain.leaves import argument_leaves, result_leaves
from spmd.explain.memory import Memory, memory_curve
from spmd.explain.overview import Overview, overview
from spmd.explain.page import boundary, decided, held, picture, run
from spmd.explain.page import parts as h
from spmd.explain.page.bars import bars_of
from spmd.explain.page.first import first_screen, resource
from spmd.explain.prices import Prices
from spmd.explain.words import bytes_text, plural, seconds_text, source_text
from spmd.pipeline import Stages
from spmd.predict.memory import MemoryUse


def write_report(
    path: str | os.PathLike[str],
    stages: Stages,
    collectives: Sequence[Collective],
    memory: Memory | None,
    use: MemoryUse,
    prices: Prices | None = None,
    name: str = "",
) -> None:
    """Writes what `explain_program` says, with pictures, as one page without outside resources.

    Args:
      path: the file to write.
      stages: the pipeline's results.
      collectives: what one run of the program exchanges.
      memory: what XLA reports, or None where it has not compiled the program.
      use: what the program is predicted to hold, and when.
      prices: of what the plan decided against; left out if not given.
      name: what the program is called.
    """
    page = render(stages, collectives, memory, use, prices, name)
    Path(path).write_text(page, encoding="utf-8")


def render(
    stages: Stages,
    collectives: Sequence[Collective],
    memory: Memory | None,
    use: MemoryUse,
    prices: Prices | None = None,
    name: str = "",
) -> str:
    """The page's text; arguments as in `write_report`."""
    figures = overview(stages, collectives, memory)
    found = costs(figures.timeline, stages.plan.mesh, stages.plan.topology)
    sections = [s for s in _sections(stages, collectives, figures, use, prices) if s.body]
    title = f"{name or stages.plan.program.name} on {plural(figures.devices, 'device')}"
    links = "".join(f'<a href="#{s.anchor}">{escape(s.title)}</a>' for s in sections)
    style = f"{resource('report.css')}{resource('first.css')}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><style>\n{style}</style></head><body class="spmd">'
        f"{picture.HATCH}<header><h1>{escape(title)}</h1>"
        f'<p class="lead">Mesh {escape(figures.mesh)} on {escape(figures.topology)}, '
        f"planned by the {escape(figures.solver)} solver.</p></header>"
        f"{_notes(stages.plan.notes)}{first_screen(figures, found)}"
        f"<nav>{links}</nav><main>{''.join(map(_folded, sections))}</main>"
        f"<script>\n{resource('report.js')}</script></body></html>\n"
    )


class _Section(NamedTuple):
    """One part of the page; left out if it has no body."""

    anchor: str
    title: str
    remark: str
    body: str
    is_open: bool = False


def _folded(section: _Section) -> str:
    return (
        f'<section><details class="part"{" open" * section.is_open}><summary>'
        f'<h2 id="{section.anchor}">{escape(section.title)}<small>{escape(section.remark)}</small>'
        f"</h2></summary>{section.body}</details></section>"
    )


def _sections(
    stages: Stages,
    collectives: Sequence[Collective],
    figures: Overview,
    use: MemoryUse,
    prices: Prices | None,
) -> list[_Section]:
    sent = bytes_text(figures.comm_bytes)
    arguments, results = argument_leaves(stages), result_leaves(stages)
    conflicts = conflict_rows(stages, prices)
    bars = bars_of(figures.timeline, stages.plan.mesh)
    lost = figures.timeline.seconds - bars.seconds
    curve = memory_curve(use, stages.optimized.program)
    return [
        _Section("timeline", "Timeline", "predicted; compute and links at the same time where "
                 "neither waits for the other", run.timeline_chart(bars, lost, stages), True),
        _Section("plan", "The plan", "against the greedy one and the best there can be",
                 run.quality(figures), True),
        _Section("collectives", "Collectives", f"{plural(len(collectives), 'op')}, {sent} sent by "
                 "each device in one run", run.collective_table(collectives)),
        _Section("bytes", "Bytes by kind", "sent by each device, executions, time",
                 run.bytes_by_kind(collectives)),
        _Section("marks", "Prices of marks", "what would have been cheaper, and which mark forbids "
                 "it", decided.mark_table(stages, prices)),
        _Section("conflicts", "Conflicts", f"{len(stages.propagated.conflicts)} disagreements of "
                 f"{plural(len(conflicts), 'kind')}, and how the plan settled them",
                 decided.conflict_table(conflicts)),
        _Section("memory", "Memory over time", "of each device",
                 held.memory_chart(figures, curve), True),
        _Section("mesh", "Mesh and tiles", "who holds what", boundary.tiles(stages)),
        _Section("arguments", "Arguments", boundary.split_text(arguments),
                 boundary.leaf_table(arguments, stages)),
        _Section("results", "Results", boundary.split_text(results),
                 boundary.leaf_table(results, stages)),
        _Section("largest", "Largest values", "made inside the program, bytes per device",
                 held.largest_table(stages)),
        _Section("stages", "Stage times", "of this compiler, without XLA", _stage_times(stages)),
    ]  # fmt: skip


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(source_text(note))}</li>" for note in dict.fromkeys(notes))
    return f'<ul class="notes">{items}</ul>' if items else ""


def _stage_times(stages: Stages) -> str:
    return h.bars(
        [
            (escape(stage), seconds, seconds_text(seconds), "var(--accent)")
            for stage, seconds in stages.seconds.items()
        ]
    )
