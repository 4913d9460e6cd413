"""Writes reports on plans, as text or as an HTML page; `diff` compares two plans."""

from typing import Any

from spmd.explain.contract import Budget, assert_plan
from spmd.explain.data import PlanReport, from_json

__all__ = ["Budget", "PlanReport", "assert_plan", "diff", "from_json"]


def diff(a: Any, b: Any) -> str:
    """Returns a text that says how plan `b` differs from plan `a`, and what that costs.

    Args:
      a: a lowered or compiled program.
      b: another one: of the same function on another mesh, with other marks or other options.

    Returns:
      Text to print: predicted time, bytes sent and peak memory of both and the difference (and the
      measured time, if both were measured); arguments, results and intermediate values whose
      sharding differs; collectives that were added, removed or resized, by layer and source line.
      Parts in which nothing changed are left out.

    Example:
      >>> print(spmd.explain.diff(step.lower(*args), other.lower(*args)))
    """
    # Loaded when asked for: training and serving go without reports.
    from spmd.explain.text import diff_text

    return diff_text(*(each if hasattr(each, "sections") else each._report() for each in (a, b)))
