"""The largest costs as text: the first section of a report."""

from __future__ import annotations

from collections.abc import Sequence

from spmd.explain.costs import Cost, code_lines, largest
from spmd.explain.text.layout import Lines, section, table
from spmd.explain.words import seconds_text, share_text, source_text


def cost_lines(found: Sequence[Cost], seconds: float) -> Lines:
    """The largest costs with the text of their source lines.

    Args:
      found: all costs, the largest first.
      seconds: predicted time of a run.
    """
    title, most = largest(found, seconds)
    heads = table(
        [
            (share_text(cost.seconds, seconds), seconds_text(cost.seconds), cost.title, cost.remark)
            for cost in most
        ],
        right=(0, 1),
    )
    lines: list[str] = []
    for head, cost in zip(heads, most, strict=True):
        lines += [head, *(f"    {line}" for line in _details(cost))]
    yield from section(title, lines)


def _details(cost: Cost) -> list[str]:
    why = [source_text(cost.reason)] if cost.reason else []
    return why + table([(source_text(place), text) for place, text in code_lines(cost)])
