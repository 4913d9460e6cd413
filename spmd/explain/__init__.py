"""Reports on a plan: as text and as a page, of one value, and of two plans side by side."""

from typing import Any

__all__ = ["diff"]


def diff(a: Any, b: Any) -> str:
    """Returns what changed from one plan to another, and what that costs.

    Args:
      a: a lowered or compiled program.
      b: another one: of the same function on another mesh, with other marks or other options.

    Returns:
      Text to print: predicted time, bytes sent and peak memory of both and the difference (and the
      measured time, where both were measured); arguments, results and values inside that lie
      otherwise; collectives that were added, removed or resized, by layer and source line. Parts
      in which nothing changed are left out.

    Example:
      >>> print(spmd.explain.diff(step.lower(*args), other.lower(*args)))
    """
    # Loaded when asked for: training and serving go without reports.
    from spmd.explain.text import diff_text

    return diff_text(a._facts(), b._facts())
