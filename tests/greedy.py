"""Greedy plans for tests that are about what programs compute, whatever their plans."""

from collections.abc import Iterator
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


@pytest.fixture(scope="module", autouse=True)
def greedy_plans(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a file or the conftest.py of a folder: greedy plans, but for modules and tests that are
    marked for exact ones, as in the root's conftest.py."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("exact_plans") is None:
            plan_all_greedily(patch)
        yield
