"""HTML and SVG as values: `tag` makes an element and escapes all text that is put into it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Html(str):
    """Text that is markup already: `tag` takes it as it is."""

    __slots__ = ()


def tag(look: str, *children: str, **attributes: object) -> Html:
    """An element.

    Args:
      look: its name, with its class as in a CSS selector: `span.soft`.
      *children: what is in it. `Html` stays as it is, any other text is escaped.
      **attributes: its attributes, with `_` where the names have dashes; those that are None or
        False are left out.

    Example:
      >>> tag("p.soft", "a < b", title="order")
      '<p class="soft" title="order">a &lt; b</p>'
    """
    name, _, style = look.partition(".")
    given = {"class": style or None, **attributes}
    shown = "".join(_attribute(key, value) for key, value in given.items())
    if name in ("br", "input", "meta"):
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{joined(*children)}</{name}>")


def joined(*parts: str, by: str = "") -> Html:
    """Elements and text in a row."""
    return Html(by.join(p if isinstance(p, Html) else escape(p) for p in parts))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = str(round(value, 2)) if isinstance(value, float) else str(value)
    return f' {name.replace("_", "-")}="{escape(text)}"'


# ---------------------------------------------------------------------------------------------
# Shapes of a drawing; lengths are in its pixels.


def drawing(
    look: str, width: float, height: float, shapes: Iterable[Html], label: str, **attributes: object
) -> Html:
    """An SVG picture of a class; screen readers say its label."""
    box = f"0 0 {width:.0f} {height:.0f}"
    size = {"viewBox": box, "width": width, "height": height}
    return tag(f"svg.{look}", *shapes, **size, role="img", aria_label=label, **attributes)


def rect(
    look: str, box: tuple[float, float, float, float], title: str = "", **attributes: object
) -> Html:
    """A rectangle of a class; `box` is (x, y, width, height), the title is shown on hovering."""
    x, y, width, height = box
    inside = [tag("title", title)] if title else []
    return tag(f"rect.{look}", *inside, x=x, y=y, width=width, height=height, **attributes)


def line(look: str, x1: float, y1: float, x2: float, y2: float) -> Html:
    """A straight line of a class."""
    return tag(f"line.{look}", x1=x1, y1=y1, x2=x2, y2=y2)


def words(x: float, y: float, text: str, look: str = "", **attributes: object) -> Html:
    """Text of a class, from (x, y) on unless `text_anchor` says otherwise."""
    return tag(f"text.{look}", text, x=x, y=y, **attributes)
