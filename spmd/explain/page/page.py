"""The report as one self-contained HTML page: what costs most first, the rest to unfold."""

from __future__ import annotations

from typing import NamedTuple

from spmd.explain.decisions import conflict_rows
from spmd.explain.facts import Facts, proof_text
from spmd.explain.page import decided, picture, pipelined, run
from spmd.explain.page import parts as h
from spmd.explain.page.first import first_screen, resource
from spmd.explain.page.html import Html, tag
from spmd.explain.recomputed import recomputed_rows, recomputed_title
from spmd.explain.tables import largest_table, leaf_table, split_text
from spmd.explain.words import bytes_text, plural, seconds_text, source_text


def render(facts: Facts) -> str:
    """What `explain_program` says, with pictures, as one page without outside resources.

    Args:
      facts: of the program.
    """
    plan = facts.plan
    sections = [section for section in _sections(facts) if section.body]
    texts = dict.fromkeys([*(form.text for form in plan.forms), *plan.notes])
    notes = [tag("li", source_text(text)) for text in texts]
    title = f"{facts.title} on {plural(plan.mesh.size, 'device')}"
    lead = f"Mesh {plan.mesh} on {plan.topology}, planned by the solver, {proof_text(plan)}. "
    lead += facts.shared_text
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", resource("report.css"), resource("first.css")),
    )
    body = tag(
        "body.spmd",
        picture.HATCH,
        tag("header", tag("h1", title), tag("p.lead", lead)),
        tag("ul.notes", *notes) if notes else "",
        first_screen(facts),
        tag("nav", *(tag("a", s.title, href=f"#{s.anchor}") for s in sections)),
        tag("main", *map(_folded, sections)),
        tag("script", resource("report.js")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


class _Section(NamedTuple):
    """One part of the page; left out if it has no body."""

    anchor: str
    title: str
    remark: str
    body: Html
    is_open: bool = False


def _folded(section: _Section) -> Html:
    head = tag("h2", section.title, tag("small", section.remark), id=section.anchor)
    part = tag("details.part", tag("summary", head), section.body, open=section.is_open)
    return tag("section", part)


def _sections(facts: Facts) -> list[_Section]:
    stages, mesh = facts.stages, facts.plan.mesh
    conflicts = conflict_rows(stages, facts.prices)
    again = recomputed_title(recomputed_rows(facts.plan), facts.timeline).partition(": ")[2]
    times = [(stage, n, seconds_text(n), "var(--accent)") for stage, n in stages.seconds.items()]
    return [
        _Section("timeline", "Timeline", "predicted; compute and links at the same time where "
                 "neither waits for the other", run.timeline_chart(facts), True),
        _Section("measured", "Measured", facts.measured.title if facts.measured else "",
                 run.measured(facts), True),
        _Section("pipelines", "Pipelines", "which stage works on what in which step",
                 pipelined.pipelines(facts), True),
        _Section("rings", "Rings", "operands that come piece by piece, and those that could",
                 pipelined.rings(facts), True),
        _Section("plan", "The plan", "against the greedy one and the best there can be",
                 run.quality(facts), True),
        _Section("collectives", "Collectives", f"{plural(len(facts.collectives), 'op')}, "
                 f"{bytes_text(facts.sent_bytes)} sent by each device in one run",
                 run.collectives(facts)),
        _Section("bytes", "Bytes by kind", "sent by each device, executions, time",
                 run.bytes_by_kind(facts)),
        _Section("marks", "Prices of marks", "what would have been cheaper, and which mark forbids "
                 "it", decided.mark_table(facts)),
        _Section("conflicts", "Conflicts", f"{len(stages.propagated.conflicts)} disagreements of "
                 f"{plural(len(conflicts), 'kind')}, and how the plan settled them",
                 decided.conflict_table(conflicts)),
        _Section("memory", "Memory over time", "of each device",
                 run.memory_chart(facts), True),
        _Section("again", "Made again", again, run.recomputed(facts)),
        _Section("mesh", "Mesh and tiles", "who holds what", picture.tiles(facts)),
        _Section("arguments", "Arguments", split_text(facts.arguments),
                 h.table(leaf_table(facts.arguments, mesh))),
        _Section("results", "Results", split_text(facts.results),
                 h.table(leaf_table(facts.results, mesh))),
        _Section("constants", "Constants", split_text(facts.constants),
                 h.table(leaf_table(facts.constants, mesh))),
        _Section("largest", "Largest values", "made inside the program, bytes per device",
                 h.table(largest_table(stages, 20))),
        _Section("stages", "Stage times", "of this compiler, without XLA", h.bars(times)),
    ]  # fmt: skip
