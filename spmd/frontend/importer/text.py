"""Refuses module text that would end the process inside MLIR's parser."""

from __future__ import annotations

import re

from spmd.errors import FrontendError

DEEPEST = 1000
"""How many brackets of a module's text may be open at once."""
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|->|[(){}\[\]<>]')
_ESCAPE = rb"\\([0-9a-fA-F]{2})"


def check_text(text: str) -> None:
    """Refuses text that would end the process.

    Raises:
      FrontendError: brackets nest too deeply.
      UnicodeDecodeError: a string with escapes that are not UTF-8.
    """
    _check_depth(text)
    _check_strings(text)


def line_of(error: Exception, text: str) -> str | None:
    """The line of a module's text that MLIR complains about."""
    found = re.search(r'error: "-":(\d+):', str(error))
    if found is None:
        return None
    lines = text.split("\n", int(found[1]))
    return lines[int(found[1]) - 1].strip()[:200] if len(lines) >= int(found[1]) else None


def _check_depth(text: str) -> None:
    """MLIR's parser calls itself for each bracket inside another and has no limit of its own."""
    if sum(map(text.count, "({[<")) <= DEEPEST:
        return
    depth = 0
    for part in _BRACKETS.finditer(text):
        depth += 1 if part[0] in "({[<" else -1 if part[0] in ")}]>" else 0
        if depth > DEEPEST:
            raise FrontendError(
                f"the module nests more than {DEEPEST} brackets",
                source=f"line {text.count(chr(10), 0, part.start()) + 1} of the module",
            )


def _check_strings(text: str) -> None:
    """MLIR aborts the process when it has to complain about a name that is not UTF-8."""
    if re.search(r"\\[89a-fA-F][0-9a-fA-F]", text) is None:
        return
    for part in _BRACKETS.finditer(text):
        if part[0].startswith('"') and "\\" in part[0]:
            raw = part[0].encode()
            re.sub(_ESCAPE, lambda found: bytes.fromhex(found[1].decode()), raw).decode()
