"""Who works on what in which step, as SVG: a line for each worker, a column for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spmd.explain.page.html import Html, drawing, joined, line, rect, tag, words

MOST_COLUMNS = 34
"""Columns that are drawn; of more, those in the middle are left out."""

_WIDE, _HIGH, _LEFT, _ABOVE = 30, 24, 74, 26


class Square(NamedTuple):
    """What one worker does in one step.

    Attributes:
      text: what is written on it.
      title: what is shown on hovering.
      colour: CSS; none where nothing is done.
      share: how much of it is done, from the left.
    """

    text: str
    title: str
    colour: str = ""
    share: float = 1.0


class Bracket(NamedTuple):
    """A name above some columns: the first, and the one behind the last."""

    first: int
    end: int
    text: str


def shown_steps(count: int, most: int = MOST_COLUMNS) -> list[int | None]:
    """The steps that get a column; None stands for those that are left out.

    Example:
      >>> shown_steps(100, 5)
      [0, 1, None, 98, 99]
    """
    if count <= most:
        return list(range(count))
    begin, end = most // 2, (most - 1) // 2
    return [*range(begin), None, *range(count - end, count)]


def grid(
    names: Sequence[str],
    heads: Sequence[str],
    squares: Sequence[Sequence[Square | None]],
    brackets: Sequence[Bracket],
    label: str,
) -> Html:
    """The picture.

    Args:
      names: of the lines.
      heads: of the columns, below them.
      squares: of each line; None where a column stands for steps that are left out.
      brackets: over columns.
      label: what screen readers say.
    """
    top = _ABOVE if brackets else 0
    bottom = top + len(names) * _HIGH
    parts = [_bracket(bracket) for bracket in brackets]
    for row, (name, own) in enumerate(zip(names, squares, strict=True)):
        y = top + row * _HIGH
        parts.append(words(_LEFT - 10, y + _HIGH / 2 + 4, name, "soft", text_anchor="end"))
        parts += [_square(_LEFT + i * _WIDE, y, square) for i, square in enumerate(own)]
    parts += [
        words(_LEFT + (i + 0.5) * _WIDE, bottom + 15, head, "soft", text_anchor="middle")
        for i, head in enumerate(heads)
    ]
    picture = drawing("grid", _LEFT + len(heads) * _WIDE + 2, bottom + 20, parts, label)
    return tag("div.scroll", picture, tabindex=0, role="group", aria_label=label)


def _bracket(bracket: Bracket) -> Html:
    x, end = _LEFT + bracket.first * _WIDE + 3, _LEFT + bracket.end * _WIDE - 3
    middle, y = (x + end) / 2, _ABOVE - 7
    return joined(
        tag("path.bracket", d=f"M{x} {y + 5}v-5H{end}v5"),
        words(middle, y - 5, bracket.text, "soft", text_anchor="middle"),
    )


def _square(x: float, y: float, square: Square | None) -> Html:
    middle = x + _WIDE / 2
    if square is None:
        return words(middle, y + _HIGH / 2 + 4, "…", "soft", text_anchor="middle")
    box = (x + 1, y + 1, _WIDE - 2, _HIGH - 2)
    if not square.colour:
        corner = line("idle", x + 2, y + _HIGH - 2, x + _WIDE - 2, y + 2)
        return joined(rect("idle", box, square.title), corner)
    # What is half done has its text beside the colour, to be read on light and dark pages.
    is_part = square.share < 1
    done = (box[0], box[1], box[2] * square.share, box[3])
    middle = (done[0] + done[2] + x + _WIDE) / 2 if is_part else middle
    return joined(
        rect("idle", box, square.title) if is_part else "",
        rect("", done, square.title, fill=square.colour),
        words(
            middle, y + _HIGH / 2 + 4, square.text, "" if is_part else "on", text_anchor="middle"
        ),
    )
