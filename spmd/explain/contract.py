"""A performance contract: a plan may send, hold and take no more than one that was kept.

Plans are compared, not times: nothing runs, and a program has the same plan on any computer. What
grew is named by source line; lines that moved and names that changed are no breach.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from spmd.explain import words as w
from spmd.explain.costs import Collective, Total, totals
from spmd.explain.data import PlanReport, from_json

WRITE = "SPMD_WRITE_PLANS"
"""Environment variable; if it is 1, `assert_plan` writes the plans that it would compare with."""


class Budget(NamedTuple):
    """By which share each figure may grow; collectives may not become more."""

    seconds: float = 0.01  # predicted, of a run
    sent: float = 0.01  # bytes that a device sends, of each kind along each axis
    memory: float = 0.01  # a device's peak


BUDGET = Budget()


def breaches(kept: PlanReport, now: PlanReport, budget: Budget = BUDGET) -> list[str]:
    """Returns a sentence for each figure of `now` that is over the budget, with what did it."""
    found = [
        f"{what} grew from {text(old)} to {text(new)}, {new / max(old, 1e-30) - 1:+.1%}"
        for what, old, new, share, text in (
            ("the predicted time", kept.timeline.seconds, now.timeline.seconds, budget.seconds,
             w.seconds_text),
            ("the peak memory of a device", kept.peak_bytes, now.peak_bytes, budget.memory,
             w.bytes_text),
        )
        if new > old * (1 + share)
    ]  # fmt: skip
    before, after = (totals((c for c in of.collectives if c.count), _key) for of in (kept, now))
    for key, total in after.items():
        old = before.get(key)
        runs, sent = (0, 0) if old is None else (old.runs, old.bytes)
        if total.runs > runs or total.bytes > sent * (1 + budget.sent):
            kind, axes = key
            was = f"{w.plural(runs, 'run')}, {w.bytes_text(sent)}"
            said = f"{kind} over {axes}: {w.plural(total.runs, 'run')}, {w.bytes_text(total.bytes)}"
            found.append(f"{said}; it was {was}")
            found += (f"  {line}" for line in _culprits(kept, now, key))
    return found


def assert_plan(program: Any, file: str | os.PathLike[str], budget: Budget = BUDGET) -> None:
    """Raises AssertionError if a program's plan is over the budget of that which `file` keeps.

    Args:
      program: a `Lowered` or `Compiled`, as `step.lower(*structs, topology="v5e:4x4")`.
      file: JSON, as `json.dump(program.to_json(), ...)` writes it. It is written if the environment
        has `SPMD_WRITE_PLANS=1`.
      budget: by which share each figure may grow.

    Example:
      >>> assert_plan(step.lower(params, batch, topology="v5e:4x4"), "plans/step.json")
    """
    path, now = Path(file), program._report()
    if os.environ.get(WRITE) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now.to_json()), encoding="utf-8")
        return
    if not path.exists():
        raise AssertionError(f"there is no plan {path}; {WRITE}=1 writes it")
    found = breaches(from_json(json.loads(path.read_text(encoding="utf-8"))), now, budget)
    if found:
        lines = "\n".join(found)
        raise AssertionError(f"{path}: the plan became worse\n{lines}\nif it has to be, {WRITE}=1")


Key = tuple[str, str]  # the kind of a collective, and its axes


def _key(each: Collective) -> Key:
    return each.kind, ", ".join(each.axes)


def _culprits(kept: PlanReport, now: PlanReport, key: Key) -> Iterator[str]:
    """Yields where collectives of one kind and axes became more, or larger, and why they are."""

    def at(report: PlanReport) -> dict[tuple[str, str], Total]:
        own = (c for c in report.collectives if c.count and _key(c) == key)
        # By function and layer: line numbers change with what is written above them.
        return totals(own, lambda c: (c.layer, c.source.rpartition("(")[2]))

    before = at(kept)
    for place, total in at(now).items():
        old = before.get(place)
        if old is None or total.runs > old.runs or total.bytes > old.bytes:
            like = total.like
            yield f"at {w.source_text(like.source)}: {w.source_text(like.reason)}"
