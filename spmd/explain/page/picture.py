"""Pictures of meshes and of tensors cut into tiles, as SVG.

A device has one colour in all pictures: the hue is its coordinate along the first mesh axis, the
lightness that along the others. A tile that several devices hold shows the colours of all of them
as bands under a hatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, axis_refs

MAX_DEVICES = 256
"""Devices that a mesh's picture shows."""

MAX_PIECES = 32
"""Pieces of one dim that a tensor's picture shows."""

_MAX_BANDS = 8
_WIDTH, _HEIGHT, _LEAST = 190, 150, 26


def device_colour(mesh: Mesh, position: int) -> str:
    """The colour of the device at a position (row-major) of the mesh."""
    first = mesh.sizes[0] if mesh.sizes else 1
    rest = max(1, mesh.size // first)
    row, column = divmod(position, rest)
    hue = (205 + 300 * row / first) % 360
    light = 62 + (20 * column / (rest - 1) if rest > 1 else 8)
    return f"hsl({hue:.0f} 52% {light:.0f}%)"


def mesh_picture(mesh: Mesh) -> str:
    """Devices as a grid: the last axis across, all others down."""
    columns = min(mesh.sizes[-1], MAX_PIECES) if mesh.sizes else 1
    whole = mesh.sizes[-1] if mesh.sizes else 1
    rows = min(max(1, mesh.size // whole), MAX_DEVICES // columns)
    cell = max(16, min(46, 560 // max(rows, columns)))
    left, top = 24, 22
    parts = []
    for row in range(rows):
        for column in range(columns):
            position = row * whole + column
            label = str(mesh.device_ids[position])
            box = (left + column * cell, top + row * cell, cell, cell)
            parts.append(_cell(box, [device_colour(mesh, position)], [label]))
    if mesh.sizes:
        down = " x ".join(mesh.axis_names[:-1])
        parts.append(f'<text class="soft" x="{left}" y="14">{escape(mesh.axis_names[-1])}</text>')
        middle = top + rows * cell / 2
        parts.append(
            f'<text class="soft" x="14" y="{middle:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 14 {middle:.0f})">{escape(down)}</text>'
        )
    size = (left + columns * cell + 2, top + rows * cell + 2)
    return _svg(size, parts, f"the mesh {mesh}")


def tile_picture(type_: TensorType, sharding: Sharding, mesh: Mesh) -> str:
    """A tensor as a rectangle of two of its dims, cut into the pieces that devices hold."""
    down, across = _shown_dims(sharding)
    axes_down = sharding.dims[down] if down is not None else ()
    axes_across = sharding.dims[across] if across is not None else ()
    size_down = type_.shape[down] if down is not None else 1
    size_across = type_.shape[across] if across is not None else 1
    width, height = _box(size_down, size_across)
    rows, columns = (min(mesh.extent(axes), MAX_PIECES) for axes in (axes_down, axes_across))
    holders = _holders(mesh, axes_down, axes_across)
    left, top = 24, 20
    parts = []
    for row in range(rows):
        for column in range(columns):
            held = holders[row, column]
            box = (
                left + column * width / columns,
                top + row * height / rows,
                width / columns,
                height / rows,
            )
            colours = [device_colour(mesh, p) for p in held[:_MAX_BANDS]]
            ids = [str(mesh.device_ids[p]) for p in held]
            labels = ids if len(held) <= _MAX_BANDS else [f"×{len(held)}"]
            parts.append(_cell(box, colours, labels))
    parts.append(f'<rect class="frame" x="{left}" y="{top}" width="{width}" height="{height}"/>')
    parts += _dim_labels((left, top, width, height), _dim_text(size_down, axes_down, mesh, down),
                         _dim_text(size_across, axes_across, mesh, across))  # fmt: skip
    return _svg((_WIDTH + left + 2, top + height + 2), parts, "the tensor's tiles")


def _shown_dims(sharding: Sharding) -> tuple[int | None, int | None]:
    """The two dims to draw, down and across: split ones first, then the last ones."""
    order = sorted(range(sharding.rank), key=lambda d: (not sharding.dims[d], -d))[:2]
    if not order:
        return None, None
    return (min(order), max(order)) if len(order) == 2 else (None, order[0])


def _box(down: int, across: int) -> tuple[int, int]:
    """Width and height in pixels: the dims' ratio, softened so that both can be seen."""
    ratio = math.sqrt(max(down, 1) / max(across, 1))
    height = max(_LEAST, min(_HEIGHT, round(_WIDTH * ratio)))
    width = max(_LEAST * 2, min(_WIDTH, round(height / ratio)))
    return width, height


def _holders(
    mesh: Mesh, down: Sequence[int], across: Sequence[int]
) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for position in range(mesh.size):
        key = (mesh.coordinate(position, down), mesh.coordinate(position, across))
        found.setdefault(key, []).append(position)
    return found


def _dim_text(size: int, axes: Axes, mesh: Mesh, dim: int | None) -> str:
    if dim is None:
        return ""
    names = ", ".join(str(ref) for ref in axis_refs(axes, mesh))
    pieces = mesh.extent(axes)
    shown = f" ({MAX_PIECES} of {pieces})" if pieces > MAX_PIECES else ""
    return f"{size} over {names}{shown}" if names else str(size)


def _dim_labels(box: tuple[int, int, int, int], down: str, across: str) -> list[str]:
    left, top, _, height = box
    middle = top + height / 2
    return [
        f'<text class="soft" x="{left}" y="13">{escape(across)}</text>',
        f'<text class="soft" x="14" y="{middle:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle:.0f})">{escape(down)}</text>',
    ]


def _cell(
    box: tuple[float, float, float, float], colours: Sequence[str], labels: Sequence[str]
) -> str:
    """One tile: bands of its holders' colours, hatched if there are several, and labels."""
    x, y, width, height = box
    band = width / len(colours)
    parts = [
        f'<rect x="{x + i * band:.2f}" y="{y:.2f}" width="{band:.2f}" height="{height:.2f}" '
        f'fill="{colour}"/>'
        for i, colour in enumerate(colours)
    ]
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    if len(colours) > 1:
        parts.append(f'<rect {place} fill="url(#hatch)"/>')
    parts.append(f'<rect class="edge" {place}/>')
    share = width / len(labels)
    if max(map(len, labels)) * 6.8 <= share and height >= 12:
        parts += [
            f'<text class="on" x="{x + (i + 0.5) * share:.2f}" y="{y + height / 2 + 4:.2f}" '
            f'text-anchor="middle">{escape(label)}</text>'
            for i, label in enumerate(labels)
        ]
    return "".join(parts)


HATCH = (
    '<svg width="0" height="0" style="position:absolute"><defs><pattern id="hatch" width="6" '
    'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs></svg>'
)
"""Defines the hatch that the pictures refer to; once on every page that shows one."""


def _svg(size: tuple[float, float], parts: Sequence[str], what: str) -> str:
    width, height = size
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{escape(what)}">{"".join(parts)}</svg>'
    )
