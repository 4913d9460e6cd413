"""The part of the page about who holds what: pictures of the mesh and of the largest arguments."""

from __future__ import annotations

from spmd.explain.facts import Facts
from spmd.explain.leaves import Group, group_leaves
from spmd.explain.page import parts as h
from spmd.explain.page import picture
from spmd.explain.page.html import Html, joined, tag
from spmd.explain.words import spec_text, type_text

PICTURES = 8
"""How many arguments are drawn, and the mesh."""


def tiles(facts: Facts) -> Html:
    """The mesh and the largest arguments as pictures: who holds what."""
    mesh = facts.plan.mesh
    shown = ""
    if mesh.size > picture.MAX_DEVICES:
        shown = f", the first {picture.MAX_DEVICES} of {mesh.size}"
    figures = [_figure(picture.mesh_picture(mesh), "the mesh", f"{mesh}{shown}", "device ids")]
    for group in _drawn(facts):
        leaf = group.leaves[0]
        figures.append(
            _figure(
                picture.tile_picture(leaf.type, leaf.sharding, mesh),
                group.pattern,
                f"{type_text(leaf.type)} {spec_text(leaf.sharding, mesh)}",
                f"{type_text(leaf.local)} on each device",
            )
        )
    intro = tag(
        "p",
        "Every device has its colour. A tile shows the devices that hold it; hatched ones are "
        "held by several. Of a tensor with more than two dims two are drawn, split ones first.",
    )
    return joined(intro, tag("div.tiles", *figures))


def _figure(svg: Html, title: str, *captions: str) -> Html:
    lines = [tag("span", tag("code", text)) for text in captions]
    return tag("figure", svg, tag("figcaption", tag("b", h.breakable(title)), *lines))


def _drawn(facts: Facts) -> list[Group]:
    """The largest leaf of every sharding first, then the next largest ones."""
    groups = [g for g in group_leaves(facts.arguments) if g.leaves[0].type.rank]
    groups.sort(key=lambda group: -group.leaves[0].type.bytes)
    first = {group.leaves[0].sharding: group for group in reversed(groups)}
    groups.sort(key=lambda group: first[group.leaves[0].sharding] is not group)
    return groups[: PICTURES - 1]
