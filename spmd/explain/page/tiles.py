"""Who holds what: pictures of the mesh and of tensors cut into tiles, as SVG.

A device has one colour in all pictures: the hue is its coordinate along the first mesh axis, the
lightness that along the others. A tile that several devices hold shows the colours of all of them
as bands under a hatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spmd.explain.facts import Facts
from spmd.explain.leaves import Group, group_leaves
from spmd.explain.page.html import Html, breakable, drawing, joined, rect, tag, words
from spmd.explain.words import axes_text, spec_text, type_text
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding

PICTURES = 8  # how many arguments are drawn, and the mesh
MAX_DEVICES = 256  # devices that a mesh's picture shows
MAX_PIECES = 32  # pieces of one dim that a tensor's picture shows

_MAX_BANDS = 8
_WIDTH, _HEIGHT, _LEAST = 190, 150, 26
_LEFT, _TOP = 24, 20

HATCH = Html(
    '<svg width="0" height="0" style="position:absolute"><defs><pattern id="hatch" width="6" '
    'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs></svg>'
)
"""Defines the hatch that the pictures refer to; once on every page that shows one."""

_Holders = Mapping[tuple[int, int], Sequence[int]]
"""(row, column) -> positions in the mesh of the devices that hold this tile."""


def tiles(facts: Facts) -> Html:
    """The mesh and the largest arguments as pictures: who holds what."""
    mesh = facts.plan.mesh
    shown = ""
    if mesh.size > MAX_DEVICES:
        shown = f", the first {MAX_DEVICES} of {mesh.size}"
    figures = [_figure(mesh_picture(mesh), "the mesh", f"{mesh}{shown}", "device ids")]
    for group in _drawn(facts):
        leaf = group.leaves[0]
        figures.append(
            _figure(
                tile_picture(leaf.type, leaf.sharding, mesh),
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
    return tag("figure", svg, tag("figcaption", tag("b", breakable(title)), *lines))


def _drawn(facts: Facts) -> list[Group]:
    """The largest leaf of every sharding first, then the next largest ones."""
    groups = [g for g in group_leaves(facts.arguments) if g.leaves[0].type.rank]
    groups.sort(key=lambda group: -group.leaves[0].type.bytes)
    first = {group.leaves[0].sharding: group for group in reversed(groups)}
    groups.sort(key=lambda group: first[group.leaves[0].sharding] is not group)
    return groups[: PICTURES - 1]


def mesh_picture(mesh: Mesh) -> Html:
    """Devices as a grid: the last axis across, all others down."""
    whole = mesh.sizes[-1] if mesh.sizes else 1
    columns = min(whole, MAX_PIECES)
    rows = min(max(1, mesh.size // whole), MAX_DEVICES // columns)
    cell = max(16, min(46, 560 // max(rows, columns)))
    holders = {(r, c): [r * whole + c] for r in range(rows) for c in range(columns)}
    across = mesh.axis_names[-1] if mesh.sizes else ""
    down = " x ".join(mesh.axis_names[:-1])
    return _grid(mesh, holders, columns * cell, rows * cell, down, across, f"the mesh {mesh}")


def tile_picture(type_: TensorType, sharding: Sharding, mesh: Mesh) -> Html:
    """A tensor as a rectangle of two of its dims, cut into the pieces that devices hold."""
    # Split dims first, then the last ones; a tensor of fewer dims is drawn one element high.
    order = sorted(range(sharding.rank), key=lambda d: (not sharding.dims[d], -d))[:2]
    shown = [(type_.shape[dim], sharding.dims[dim]) for dim in sorted(order)]
    (size_down, down), (size_across, across) = [(1, ())] * (2 - len(shown)) + shown
    holders: dict[tuple[int, int], list[int]] = {}
    for position in range(mesh.size):
        tile = mesh.coordinate(position, down), mesh.coordinate(position, across)
        if max(tile) < MAX_PIECES:
            holders.setdefault(tile, []).append(position)
    text_across = _dim_text(size_across, across, mesh) if shown else ""
    text_down = _dim_text(size_down, down, mesh) if len(shown) == 2 else ""
    width, height = _box(size_down, size_across)
    return _grid(mesh, holders, width, height, text_down, text_across, "the tensor's tiles")


def _box(down: int, across: int) -> tuple[int, int]:
    """Width and height in pixels: the dims' ratio, softened so that both can be seen."""
    ratio = math.sqrt(max(down, 1) / max(across, 1))
    height = max(_LEAST, min(_HEIGHT, round(_WIDTH * ratio)))
    width = max(_LEAST * 2, min(_WIDTH, round(height / ratio)))
    return width, height


def _dim_text(size: int, axes: Sequence[int], mesh: Mesh) -> str:
    pieces = mesh.extent(axes)
    shown = f" ({MAX_PIECES} of {pieces})" if pieces > MAX_PIECES else ""
    return f"{size} over {axes_text(tuple(axes), mesh)}{shown}" if axes else str(size)


def _grid(
    mesh: Mesh, holders: _Holders, width: int, height: int, down: str, across: str, what: str
) -> Html:
    """Tiles that fill a box, with what its two sides are written beside them."""
    rows, columns = (1 + max(place) for place in zip(*holders, strict=True))
    tile_width, tile_height = width / columns, height / rows
    tiles = [
        _tile(
            mesh,
            (_LEFT + column * tile_width, _TOP + row * tile_height, tile_width, tile_height),
            held,
        )
        for (row, column), held in holders.items()
    ]
    middle = _TOP + height / 2
    turn = f"rotate(-90 14 {middle:.0f})"
    shapes = [
        *tiles,
        rect("frame", (_LEFT, _TOP, width, height)),
        words(_LEFT, 13, across, "soft"),
        words(14, middle, down, "soft", text_anchor="middle", transform=turn),
    ]
    # Labels may be longer than the side that they are written beside.
    return drawing("", _LEFT + max(width, _WIDTH) + 2, _TOP + height + 2, shapes, what)


def _tile(mesh: Mesh, box: tuple[float, float, float, float], held: Sequence[int]) -> Html:
    """One tile: bands of its holders' colours, hatched if there are several, and their ids."""
    x, y, width, height = box
    drawn = held[:_MAX_BANDS]
    band = width / len(drawn)
    parts = [
        rect("", (x + i * band, y, band, height), fill=device_colour(mesh, place))
        for i, place in enumerate(drawn)
    ]
    if len(drawn) > 1:
        parts.append(rect("", box, fill="url(#hatch)"))
    parts.append(rect("edge", box))
    ids = [str(mesh.device_ids[place]) for place in held]
    labels = ids if len(held) <= _MAX_BANDS else [f"×{len(held)}"]
    share = width / len(labels)
    if max(map(len, labels)) * 6.8 <= share and height >= 12:
        parts += [
            words(x + (i + 0.5) * share, y + height / 2 + 4, label, "on", text_anchor="middle")
            for i, label in enumerate(labels)
        ]
    return joined(*parts)


def device_colour(mesh: Mesh, position: int) -> str:
    """The colour of the device at a position (row-major) of the mesh."""
    first = mesh.sizes[0] if mesh.sizes else 1
    rest = max(1, mesh.size // first)
    row, column = divmod(position, rest)
    hue = (205 + 300 * row / first) % 360
    light = 62 + (20 * column / (rest - 1) if rest > 1 else 8)
    return f"hsl({hue:.0f} 52% {light:.0f}%)"
