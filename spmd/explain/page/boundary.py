"""Parts of the page about arguments and results: pictures of their tiles, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from spmd.explain.leaves import Group, Leaf, argument_leaves, group_leaves
from spmd.explain.page import parts as h
from spmd.explain.page import picture
from spmd.explain.page.parts import Cell
from spmd.explain.words import bytes_text, spec_text, type_text
from spmd.pipeline import Stages

PICTURES = 8
"""How many arguments are drawn, and the mesh."""


def tiles(stages: Stages) -> str:
    """The mesh and the largest arguments as pictures: who holds what."""
    mesh = stages.plan.mesh
    shown = ""
    if mesh.size > picture.MAX_DEVICES:
        shown = f", the first {picture.MAX_DEVICES} of {mesh.size}"
    figures = [_figure(picture.mesh_picture(mesh), "the mesh", f"{mesh}{shown}", "device ids")]
    for group in _drawn(stages):
        leaf = group.leaves[0]
        caption = (
            f"{type_text(leaf.type)} {spec_text(leaf.sharding, mesh)}",
            f"{type_text(leaf.local)} on each device",
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
    return f"<figure>{svg}<figcaption><b>{h.breakable(title)}</b>{lines}</figcaption></figure>"


def _drawn(stages: Stages) -> list[Group]:
    """The largest leaf of every sharding first, then the next largest ones."""
    groups = [g for g in group_leaves(argument_leaves(stages)) if g.leaves[0].type.rank]
    groups.sort(key=lambda group: -group.leaves[0].type.bytes)
    seen: set[object] = set()
    first: list[Group] = []
    second: list[Group] = []
    for group in groups:
        key = group.leaves[0].sharding
        (second if key in seen else first).append(group)
        seen.add(key)
    return (first + second)[: PICTURES - 1]


def split_text(leaves: Sequence[Leaf]) -> str:
    """How many there are, and how many of them are split."""
    split = sum(any(leaf.sharding.dims) for leaf in leaves)
    return f"{len(leaves)}, {split} of them split"


def leaf_table(leaves: Sequence[Leaf], stages: Stages) -> str:
    """Arguments or results, those that are alike in one row."""
    heads = ("name", "n", "type", "sharding", "local", "per device", "origin")
    rows = []
    for group in group_leaves(leaves):
        leaf = group.leaves[0]
        rows.append(
            (
                Cell(_group_name(group), group.pattern, "w"),
                h.number(str(len(group.leaves)), len(group.leaves)),
                h.code(type_text(leaf.type)),
                h.code(spec_text(leaf.sharding, stages.plan.mesh)),
                h.code(type_text(leaf.local)),
                h.number(bytes_text(group.bytes), group.bytes),
                Cell(h.breakable(group.origin), group.origin, "w"),
            )
        )
    return h.table(heads, rows, search="a name or a sharding" if len(rows) > 6 else "")


def _group_name(group: Group) -> str:
    name = f"<code>{h.breakable(group.pattern)}</code>"
    if len(group.leaves) == 1:
        return name
    items = "".join(
        f"<li><code>{h.breakable(leaf.name)}</code> {h.breakable(leaf.origin)}</li>"
        for leaf in group.leaves
    )
    return f"<details><summary>{name}</summary><ul>{items}</ul></details>"
