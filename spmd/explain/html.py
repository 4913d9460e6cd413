"""The report as one self-contained HTML page: the tables of `data`, laid out, with pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from spmd.explain import data, picture
from spmd.explain.collectives import Collective
from spmd.explain.data import Group, Overview, Stages
from spmd.explain.memory import Memory

PICTURES = 8
"""How many arguments are drawn."""


def write_report(
    path: str | os.PathLike[str],
    stages: Stages,
    collectives: Sequence[Collective],
    memory: Memory | None,
) -> None:
    """Writes what `explain_program` says, with pictures, as one page without outside resources.

    Args:
      path: the file to write.
      stages: the pipeline's results.
      collectives: what one run of the program exchanges.
      memory: what XLA reports, or None where it has not compiled the program.
    """
    Path(path).write_text(render(stages, collectives, memory), encoding="utf-8")


def render(stages: Stages, collectives: Sequence[Collective], memory: Memory | None) -> str:
    """The page's text; arguments as in `write_report`."""
    figures = data.overview(stages, collectives, memory)
    sections = [s for s in _sections(stages, collectives, figures) if s.body]
    title = f"{stages.plan.program.name} on {figures.devices} devices"
    links = "".join(f'<a href="#{s.anchor}">{escape(s.title)}</a>' for s in sections)
    body = "".join(
        f'<h2 id="{s.anchor}">{escape(s.title)}<small>{escape(s.remark)}</small></h2>{s.body}'
        for s in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{_resource('report.css')}</style></head><body>"
        f"{picture.HATCH}<h1>{escape(title)}</h1>"
        f'<p class="lead">Mesh {escape(figures.mesh)} on {escape(figures.topology)}, '
        f"planned by the {escape(figures.solver)} solver.</p>"
        f"{_cards(stages, collectives, figures)}<nav>{links}</nav>{body}"
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
    stages: Stages, collectives: Sequence[Collective], figures: Overview
) -> list[_Section]:
    sent = data.bytes_text(figures.comm_bytes)
    arguments, results = data.argument_leaves(stages), data.result_leaves(stages)
    conflicts = data.conflict_rows(stages)
    return [
        _Section("mesh", "Mesh and tiles", "who holds what", _pictures(stages)),
        _Section("collectives", "Collectives", f"{len(collectives)} ops, {sent} sent by each "
                 "device in one run", _collectives(collectives)),
        _Section("bytes", "Bytes by kind and axes", "sent by each device, executions, time",
                 _traffic(collectives)),
        _Section("arguments", "Arguments", _split_text(arguments), _leaves(arguments, stages)),
        _Section("results", "Results", _split_text(results), _leaves(results, stages)),
        _Section("largest", "Largest values", "made inside the program, bytes per device",
                 _largest(stages)),
        _Section("conflicts", "Conflicts", f"{len(conflicts)} that the plan settled",
                 _conflicts(conflicts)),
        _Section("notes", "Notes", "", _notes(stages.plan.notes)),
        _Section("memory", "Memory", "per device", _memory(figures)),
        _Section("stages", "Stage times", "of this compiler, without XLA", _stage_times(stages)),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Pieces of HTML.


class _Cell(NamedTuple):
    """A table cell: its HTML, what it sorts by, and its class (`n`: a number, flush right)."""

    html: str
    key: str | float = ""
    style: str = ""


def _text(text: str, style: str = "") -> _Cell:
    return _Cell(escape(text), text, style)


def _code(text: str, style: str = "t") -> _Cell:
    return _Cell(f"<code>{escape(text)}</code>", text, style)


def _number(text: str, key: float) -> _Cell:
    return _Cell(escape(text), key, "n")


def _table(heads: Sequence[str], rows: Iterable[Sequence[_Cell]], sort: str = "") -> str:
    """A sortable table; `sort` names the column by which the rows already are in order."""
    made = list(rows)
    if not made:
        return ""
    head = "".join(
        f"<th{_class(cell.style if cell.style == 'n' else '')}"
        f"{' aria-sort=descending' if name == sort else ''}>{escape(name)}</th>"
        for name, cell in zip(heads, made[0], strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_td, row))}</tr>" for row in made)
    return (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _td(cell: _Cell) -> str:
    return f'<td{_class(cell.style)} data-v="{escape(str(cell.key))}">{cell.html}</td>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _source(source: str) -> str:
    return f'<code title="{escape(source)}">{escape(data.source_text(source))}</code>'


def _breakable(name: str) -> str:
    """A path that may go on in the next line after any of its parts."""
    return re.sub(r"([/,])", r"\1<wbr>", escape(name))


def _kind(kind: str) -> str:
    return f'<span class="dot" style="background:var(--{escape(kind)})"></span>{escape(kind)}'


def _bars(rows: Sequence[tuple[str, float, str, str]]) -> str:
    """(label as HTML, amount, text, CSS colour) as horizontal bars, the largest one full."""
    most = max((amount for _, amount, _, _ in rows), default=0) or 1
    cells = "".join(
        f'<div>{label}</div><div class="track"><div class="bar" style="width:'
        f'{100 * amount / most:.2f}%;background:{colour}"></div></div>'
        f'<div class="value">{escape(text)}</div>'
        for label, amount, text, colour in rows
    )
    return f'<div class="bars">{cells}</div>' if rows else ""


# ---------------------------------------------------------------------------------------------
# The sections.


def _cards(stages: Stages, collectives: Sequence[Collective], figures: Overview) -> str:
    memory = figures.memory
    known = memory is not None and memory.peak_bytes
    held = memory.peak_bytes if memory is not None and known else figures.argument_bytes
    whole = data.bytes_text(figures.whole_argument_bytes)
    compute = data.seconds_text(figures.compute_seconds)
    peak = "predicted" if memory is not None and memory.is_predicted else "at most"
    cards = [
        ("devices", str(figures.devices), figures.mesh),
        (
            "predicted time of one run",
            data.seconds_text(figures.seconds),
            f"bound by {figures.bound}; compute {compute}, collectives "
            f"{data.seconds_text(figures.comm_seconds)}",
        ),
        (
            "sent by each device",
            data.bytes_text(figures.comm_bytes),
            f"in one run, by {len(collectives)} collective ops",
        ),
        (
            "memory of each device",
            data.bytes_text(held),
            f"peak, {peak}; arguments {data.bytes_text(figures.argument_bytes)} of {whole}"
            if known
            else f"arguments, of {whole} unpartitioned",
        ),
    ]
    return '<div class="cards">' + "".join(
        f'<div class="card"><span class="label">{escape(label)}</span><b>{escape(value)}</b>'
        f"<span>{escape(remark)}</span></div>"
        for label, value, remark in cards
    ) + "</div>"  # fmt: skip


def _pictures(stages: Stages) -> str:
    mesh = stages.plan.mesh
    shown = ""
    if mesh.size > picture.MAX_DEVICES:
        shown = f", the first {picture.MAX_DEVICES} of {mesh.size}"
    figures = [_figure(picture.mesh_picture(mesh), "the mesh", f"{mesh}{shown}", "device ids")]
    for group in _drawn(stages):
        leaf = group.leaves[0]
        caption = (
            f"{data.type_text(leaf.type)} {data.spec_text(leaf.sharding, mesh)}",
            f"{data.type_text(leaf.local)} on each device",
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
    return f"<figure>{svg}<figcaption><b>{_breakable(title)}</b>{lines}</figcaption></figure>"


def _drawn(stages: Stages) -> list[Group]:
    """The largest leaf of every sharding first, then the next largest ones."""
    groups = [g for g in data.group_leaves(data.argument_leaves(stages)) if g.leaves[0].type.rank]
    groups.sort(key=lambda group: -group.leaves[0].type.bytes)
    seen: set[object] = set()
    first: list[Group] = []
    second: list[Group] = []
    for group in groups:
        key = group.leaves[0].sharding
        (second if key in seen else first).append(group)
        seen.add(key)
    return (first + second)[: PICTURES - 1]


def _split_text(leaves: Sequence[data.Leaf]) -> str:
    split = sum(any(leaf.sharding.dims) for leaf in leaves)
    return f"{len(leaves)}, {split} of them split"


def _leaves(leaves: Sequence[data.Leaf], stages: Stages) -> str:
    heads = ("name", "n", "type", "sharding", "local", "per device", "origin")
    rows = []
    for group in data.group_leaves(leaves):
        leaf = group.leaves[0]
        rows.append(
            (
                _Cell(_group_name(group), group.pattern, "w"),
                _number(str(len(group.leaves)), len(group.leaves)),
                _code(data.type_text(leaf.type)),
                _code(data.spec_text(leaf.sharding, stages.plan.mesh)),
                _code(data.type_text(leaf.local)),
                _number(data.bytes_text(group.bytes), group.bytes),
                _Cell(_breakable(group.origin), group.origin, "w"),
            )
        )
    return _table(heads, rows)


def _group_name(group: Group) -> str:
    name = f"<code>{_breakable(group.pattern)}</code>"
    if len(group.leaves) == 1:
        return name
    items = "".join(
        f"<li><code>{_breakable(leaf.name)}</code> {_breakable(leaf.origin)}</li>"
        for leaf in group.leaves
    )
    return f"<details><summary>{name}</summary><ul>{items}</ul></details>"


def _collectives(collectives: Sequence[Collective]) -> str:
    heads = ("kind", "axes", "bytes", "times", "ops", "total", "time", "source and reason")
    ordered = sorted(data.collective_rows(collectives), key=lambda row: -row.seconds)
    rows = [
        (
            _Cell(_kind(row.kind), row.kind, "t"),
            _text(", ".join(row.axes), "t"),
            _number(data.bytes_text(row.bytes), row.bytes),
            _number(str(row.count), row.count),
            _number(str(row.ops), row.ops),
            _number(data.bytes_text(row.total_bytes), row.total_bytes),
            _number(data.seconds_text(row.seconds), row.seconds),
            _Cell(
                f'{_source(row.source)}<span class="reason">'
                f"{escape(data.source_text(row.reason))}</span>",
                row.source,
                "w",
            ),
        )
        for row in ordered
    ]
    return _table(heads, rows, sort="time") or "<p>None: no device ever waits for another.</p>"


def _traffic(collectives: Sequence[Collective]) -> str:
    return _bars(
        [
            (
                f"{_kind(total.kind)} <span class=soft>over {escape(', '.join(total.axes))}</span>",
                total.bytes,
                f"{data.bytes_text(total.bytes)}, {total.runs}x, "
                f"{data.seconds_text(total.seconds)}",
                f"var(--{total.kind})",
            )
            for total in data.traffic(collectives)
        ]
    )


def _largest(stages: Stages) -> str:
    heads = ("per device", "n", "type", "sharding", "local", "op", "source")
    rows = [
        (
            _number(data.bytes_text(row.local.bytes), row.local.bytes),
            _number(str(row.values), row.values),
            _code(data.type_text(row.type)),
            _code(data.spec_text(row.sharding, stages.plan.mesh), "w"),
            _code(data.type_text(row.local)),
            _text(f"copy for {row.op}" if row.copy else row.op, "w"),
            _Cell(_source(row.source), row.source, "w"),
        )
        for row in data.largest_values(stages, 20)
    ]
    return _table(heads, rows, sort="per device")


def _conflicts(conflicts: Sequence[data.ConflictRow]) -> str:
    rows = [
        (
            _text(row.op, "t"),
            _number(str(row.ops), row.ops),
            _Cell(
                "<br>".join(
                    f"<code>{escape(name)} {escape(type_)}</code> dim {dim} wants {escape(axes)}"
                    for name, type_, dim, axes in row.claims
                ),
                str(row.claims),
                "w",
            ),
            _text(row.taken, "t"),
            _Cell(_source(row.source), row.source, "w"),
        )
        for row in conflicts
    ]
    return _table(("op", "n", "claims", "the plan took", "source"), rows)


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(data.source_text(note))}</li>" for note in dict.fromkeys(notes))
    return f"<ul>{items}</ul>" if items else ""


def _memory(figures: Overview) -> str:
    rows = [(_text(what), _text(size)) for what, size in data.memory_rows(figures)]
    return _table(("what", "bytes"), rows)


def _stage_times(stages: Stages) -> str:
    return _bars(
        [
            (escape(stage), seconds, data.seconds_text(seconds), "var(--accent)")
            for stage, seconds in stages.seconds.items()
        ]
    )
