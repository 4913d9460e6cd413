"""Fenced blocks of Markdown pages, for tests that run what the pages show."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

_BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: what follows the opening fence.
        text: the lines between the fences.
        line: of the page, where the text begins.
        note: the HTML comment directly above the fence, or nothing.
    """

    language: str
    text: str
    line: int
    note: str


def blocks_of(page: str) -> list[Block]:
    return [
        Block(m["language"], m["text"], page.count("\n", 0, m.start("text")) + 1, m["note"] or "")
        for m in _BLOCK.finditer(page)
    ]


def name_of(page: Path) -> str:
    """A page as its readers call it: `docs/design.md`."""
    return page.relative_to(ROOT).as_posix()
