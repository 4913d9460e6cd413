"""Parts of the page about memory: over time, at its peak, and the largest values."""

from __future__ import annotations

from spmd.explain.largest import largest_values
from spmd.explain.memory import KINDS, MemoryCurve
from spmd.explain.overview import Overview, memory_rows
from spmd.explain.page import charts
from spmd.explain.page import parts as h
from spmd.explain.page.parts import Cell
from spmd.explain.words import bytes_text, spec_text, type_text
from spmd.pipeline import Stages

TOP_VALUES = 15
"""Rows of the table of what is alive at the peak."""


def memory_chart(figures: Overview, curve: MemoryCurve) -> str:
    """Memory over a run as a picture, what is held at its peak, and the totals."""
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
    peak = h.folded("the largest at the peak", h.table(heads, rows, sort="bytes"))
    totals = h.table(("what", "bytes"), [(h.text(w), h.text(s)) for w, s in memory_rows(figures)])
    return (
        "<p>Predicted from the local program: only values that XLA stores count. Arguments and "
        "results are held throughout; results that donated arguments make room for are part of the "
        f"arguments.</p>{legend}{chart}{peak}{h.folded('totals', totals)}"
    )


def largest_table(stages: Stages) -> str:
    """The largest values that are made inside the program."""
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
