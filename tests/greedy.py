"""Greedy plans for tests that are about what programs compute, whatever their plans."""

from __future__ import annotations

from typing import Any

import pytest

from spmd import compiler
from spmd.planning.exact import plan_exactly
from spmd.planning.greedy import plan_greedily


def plan_all_greedily(patch: pytest.MonkeyPatch) -> None:
    """Programs are planned as `Options(planner="greedy")` asks, in a fifth of the time.

    Not those with a memory limit: the greedy planner knows none.
    """

    def plan(problem: Any, try_out: Any, limit: int | None, *rest: Any) -> Any:
        if limit is not None:
            return plan_exactly(problem, try_out, limit, *rest)
        return try_out(plan_greedily(problem))

    patch.setattr(compiler, "plan_exactly", plan)
