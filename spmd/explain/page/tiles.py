"""The part of the page about who holds what: pictures of the mesh and of the largest arguments."""

from __future__ import annotations

from html import escape

from spmd.explain.facts import Facts
from spmd.explain.leaves import Group, group_leaves
from spmd.explain.page import parts as h
from spmd.explain.page import picture
from spmd.explain.words import spec_text, type_text

PICTURES = 8
"""How many arguments are drawn, and the mesh."""


def tiles(facts: Facts) -> str:
    """The mesh and the largest arguments as pictures: who holds what."""
    mesh = facts.plan.mesh
    shown = ""
    if mesh.size > picture.MAX_DEVICES:
        shown = f", the first {picture.MAX_DEVICES} of {mesh.size}"
    figures = [_figure(picture.mesh_picture(mesh), "the mesh", f"{mesh}{shown}", "device ids")]
    for group in _drawn(facts):
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


def _drawn(facts: Facts) -> list[Group]:
    """The largest leaf of every sharding first, then the next largest ones."""
    groups = [g for g in group_leaves(facts.arguments) if g.leaves[0].type.rank]
    groups.sort(key=lambda group: -group.leaves[0].type.bytes)
    seen: set[object] = set()
    first: list[Group] = []
    second: list[Group] = []
    for group in groups:
        key = group.leaves[0].sharding
        (second if key in seen else first).append(group)
        seen.add(key)
    return (first + second)[: PICTURES - 1]
